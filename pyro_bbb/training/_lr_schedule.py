"""Learning rates over a run, as factors of the first by the share of training done."""

from __future__ import annotations

import math
from collections.abc import Callable


def cosine(progress: float) -> float:
    """From 1 to 0 along half a cosine (Loshchilov and Hutter 2017, SGDR, without restarts)."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def constant(progress: float) -> float:
    """Always 1."""
    return 1.0


_NAMED = {"constant": constant, "cosine": cosine}


def lr_factor(schedule: str | Callable[[float], float]) -> Callable[[float], float]:
    """A schedule by its name, or itself.

    Raises:
        ValueError: an unknown name.
    """
    if callable(schedule):
        return schedule
    if not isinstance(schedule, str) or schedule not in _NAMED:
        names = sorted(_NAMED)
        raise ValueError(f"lr_schedule must be one of {names} or a function, got {schedule!r}")
    return _NAMED[schedule]
