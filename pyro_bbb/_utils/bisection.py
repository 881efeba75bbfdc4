"""Bisection of a monotone function, elementwise."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def bisect(below: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, halvings: int) -> Tensor:
    """The upper end of brackets halved a number of times.

    Args:
        below: whether the root is above a point, elementwise.
        low: points below the roots.
        high: points above the roots, same shape.
        halvings: number of steps; each adds a binary digit.
    """
    for _ in range(halvings):
        middle = 0.5 * (low + high)
        above = below(middle)
        low, high = middle.where(above, low), high.where(above, middle)
    return high
