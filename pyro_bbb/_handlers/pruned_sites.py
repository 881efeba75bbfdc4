# SPDX-License-Identifier: Apache-2.0
"""Leave removed weights out of the model's priors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyro.distributions as dist
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_bbb.distributions.pruned import PrunedEvent


class UnprunedEntries:
    """Unpruned entries of the weights: true in a mask, and by their index in the flat tensor."""

    def __init__(self, masks: Mapping[str, Tensor]) -> None:
        self.masks = dict(masks)
        self.indices = {name: x.flatten().nonzero().squeeze(1) for name, x in masks.items()}


def unpruned_entries(guide: Any) -> UnprunedEntries | None:
    """The unpruned entries of a guide's weights, if any were pruned."""
    masks = getattr(guide, "unpruned", {})
    return UnprunedEntries(masks) if masks else None


def mask_pruned(model: Callable[..., Any], unpruned: UnprunedEntries | None) -> Callable[..., Any]:
    """The model with the prior of what is left of its weights, if any were removed."""
    return model if unpruned is None else _MaskPruned(unpruned.masks)(model)


class _MaskPruned(Messenger):
    """Leaves out the priors of removed weights."""

    def __init__(self, masks: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.masks = masks

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.masks and isinstance(msg["fn"], dist.Independent):
            msg["fn"] = PrunedEvent(msg["fn"], self.masks[msg["name"]])
