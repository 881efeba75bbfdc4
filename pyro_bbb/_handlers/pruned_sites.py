# SPDX-License-Identifier: Apache-2.0
"""Leave removed weights out of the model's priors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyro.distributions as dist
from pyro.poutine.messenger import Messenger
from torch import Tensor


def mask_pruned(
    model: Callable[..., Any], unpruned: Mapping[str, Tensor] | None
) -> Callable[..., Any]:
    """Return the model with the prior of the remaining weights alone.

    Args:
        model: the model.
        unpruned: masks by site name, true where a weight remains; ``None`` where none was removed.
    """
    return _MaskPruned(unpruned)(model) if unpruned else model


class _MaskPruned(Messenger):
    """Masks the priors of removed weights."""

    def __init__(self, masks: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.masks = masks

    def _pyro_sample(self, msg: Any) -> None:
        fn = msg["fn"]
        if msg["name"] in self.masks and isinstance(fn, dist.Independent):
            each = fn.base_dist.expand(fn.batch_shape + fn.event_shape)
            msg["fn"] = each.mask(self.masks[msg["name"]]).to_event(len(fn.event_shape))
