# SPDX-License-Identifier: Apache-2.0
"""Checks of what agents observe."""

from typing import Any

import torch
from torch import Tensor

from pyro_bbb._utils import validation as checks


def rows(name: str, value: Any, device: torch.device) -> None:
    """A tensor of one or more rows where the agent is."""
    if checks.kind(name, value, Tensor).dim() == 0 or len(value) == 0:
        raise ValueError(f"{name} must have a row or more, got shape {list(value.shape)}")
    if value.device != device:
        raise ValueError(f"{name} must be on {device}, got {value.device}")


def observation(
    contexts: Any, actions: Any, rewards: Any, num_actions: int, device: torch.device
) -> None:
    """Contexts, and for each the number of an action and a finite reward."""
    named: dict[str, Tensor] = {"contexts": contexts, "actions": actions, "rewards": rewards}
    for name, value in named.items():
        rows(name, value, device)
    if len(contexts) != len(actions) or actions.shape != rewards.shape:
        found = ", ".join(f"{name} {list(value.shape)}" for name, value in named.items())
        raise ValueError(f"contexts, actions and rewards must go together, got {found}")
    last = num_actions - 1
    if actions.dtype != torch.long or not ((actions >= 0) & (actions <= last)).all():
        raise ValueError(f"actions must be integers (int64) in [0, {last}], got {actions}")
    if rewards.is_complex() or not rewards.isfinite().all():
        raise ValueError(f"rewards must be finite real numbers, got {rewards}")
