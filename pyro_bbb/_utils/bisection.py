# SPDX-License-Identifier: Apache-2.0
"""Bisection of a monotone function, elementwise."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def bisect(below: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, halvings: int) -> Tensor:
    """The upper end of brackets, halved a number of times; ``below``: the root is above a point."""
    for _ in range(halvings):
        middle = 0.5 * (low + high)
        above = below(middle)
        low, high = middle.where(above, low), high.where(above, middle)
    return high
