# SPDX-License-Identifier: Apache-2.0
r"""The weight $\pi$ of the KL: model and guide scale $\ln p(w)$ and $\ln q(w)$ by it.

So does a user's own `SVI`, and the path by Pyro's surrogate loss; `free_energy` weighs the KL
itself. A guide of another library does not scale; `with_kl_weight` does it around the guide.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pyro import poutine
from pyro.poutine.guide import GuideMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import is_validation_enabled
from torch import Tensor, nn

from pyro_bbb._utils.validation import at_least_zero


def scale_kl(weight: float | Tensor) -> AbstractContextManager[Any]:
    """Multiply the log-densities inside by a non-negative weight, as ``poutine.scale`` does.

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
    """Multiply the log-densities of rows by their weights ``[n]``, which may be 0."""
    return nullcontext() if weight is None else _Scale(weight)


class _Scale(Messenger):
    """``poutine.scale`` that never reads its tensor; sites without another scale share it."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scale = scale

    def _process_message(self, msg: Any) -> None:
        plain = isinstance(msg["scale"], float) and msg["scale"] == 1.0
        msg["scale"] = self.scale if plain else self.scale * msg["scale"]


def position_of_kl_weight(function: Any) -> int | None:
    """Return the position of the argument ``kl_weight`` of a function or module, if it has one."""
    target = function.forward if isinstance(function, nn.Module) else function
    names = list(inspect.signature(target).parameters)
    return names.index("kl_weight") if "kl_weight" in names else None


def weighs_kl(guide: Any) -> bool:
    """Return whether a guide scales its log-density by ``kl_weight`` itself.

    Raises:
        TypeError: it is not callable.
    """
    if not callable(guide):
        raise TypeError(f"guide must be a guide or a function, got {guide!r}")
    ours = hasattr(guide, "_kl_weight")
    return ours or position_of_kl_weight(guide) is not None


def with_kl_weight(guide: Any) -> Any:
    """Return a guide whose log-density is scaled like the prior's."""
    if weighs_kl(guide):
        return guide
    if isinstance(guide, GuideMessenger):
        raise TypeError(
            f"guide must not run the model, as {type(guide).__name__} does: train it by "
            "pyro.infer.SVI(model, guide, optimizer, Trace_ELBO()); predict takes it then"
        )

    def with_weight(x: Tensor, y: Tensor, kl_weight: float) -> Any:
        with scale_kl(kl_weight):
            return guide(x, y, kl_weight)

    return with_weight
