# SPDX-License-Identifier: Apache-2.0
"""Weigh log-densities by a factor, 0 included."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import is_validation_enabled
from torch import Tensor

from pyro_bbb._utils.validation import at_least_zero


def scale_kl(weight: float | Tensor) -> AbstractContextManager[Any]:
    """Multiplies the log-densities inside by a non-negative weight, as ``poutine.scale`` does.

    ``poutine.scale`` refuses a weight of 0, which a Blundell schedule underflows to: there the
    log-densities are masked instead. Where Pyro does not validate, a tensor is used unread, as
    ``poutine.scale`` does: to read it would be to wait for its device.
    """
    if not isinstance(weight, Tensor):
        weight = at_least_zero("kl_weight", weight)
        if weight == 1:
            return nullcontext()
    elif not is_validation_enabled():
        return _Scale(weight)
    elif not weight >= 0:
        raise ValueError(f"kl_weight must be a non-negative number, got {weight}")
    return poutine.mask(mask=False) if weight == 0 else poutine.scale(scale=weight)


def scale_rows(weight: Tensor | None) -> AbstractContextManager[Any]:
    """Multiplies the log-densities of rows by their weights ``[n]``, which may be 0."""
    return nullcontext() if weight is None else _Scale(weight)


class _Scale(Messenger):
    """``poutine.scale`` unread, which leaves all sites the same tensor if nothing else scales."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale = scale

    def _process_message(self, msg: Any) -> None:
        plain = isinstance(msg["scale"], float) and msg["scale"] == 1.0
        msg["scale"] = self.scale if plain else self.scale * msg["scale"]
