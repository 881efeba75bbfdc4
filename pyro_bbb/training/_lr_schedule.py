# SPDX-License-Identifier: Apache-2.0
"""The learning rate by default, and its factors over the training, functions of [0, 1]."""

from __future__ import annotations

import math
from collections.abc import Callable


def cosine(progress: float) -> float:
    """Fall from 1 to 0 along half a cosine (Loshchilov and Hutter 2017, SGDR, without restarts)."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def warmup_cosine(progress: float) -> float:
    """Rise linearly from 0 to 1 in the first 5 % of the training, and fall as `cosine` from there.

    The first steps are the most likely to kill units, and small ones do not.
    """
    if progress < _WARMUP:
        return progress / _WARMUP
    return cosine((progress - _WARMUP) / (1 - _WARMUP))


_WARMUP = 0.05
_LR_SCHEDULES = {"constant": lambda _: 1.0, "cosine": cosine, "warmup_cosine": warmup_cosine}
MAX_LR_OF_LOCS = 0.01  # by default; larger steps of the means make convolutions ignore the data


def default_lr(num_steps: int) -> float:
    r"""Return a learning rate of Adam: 32 / ``num_steps``, clipped to [0.001, 0.03].

    Adam moves a parameter by at most about the learning rate in a step, so by about 16 in a
    training along half a cosine. That is three times the way of a $\rho$ from -5 to the scale of a
    standard Normal prior.
    """
    return min(max(32 / num_steps, 1e-3), 3e-2)


def lr_factor(schedule: str | Callable[[float], float]) -> Callable[[float], float]:
    """Return the schedule of the learning rate with a name; a function is taken as it is."""
    if callable(schedule):
        return schedule
    if not isinstance(schedule, str) or schedule not in _LR_SCHEDULES:
        names = sorted(_LR_SCHEDULES)
        raise ValueError(f"lr_schedule must be one of {names} or a function, got {schedule!r}")
    return _LR_SCHEDULES[schedule]
