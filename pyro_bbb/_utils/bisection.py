# SPDX-License-Identifier: Apache-2.0
"""Bisection of a monotone function, elementwise, and the derivatives of its root."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def bisect(below: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, halvings: int) -> Tensor:
    """Halve brackets of a root, and return their upper ends; constants for autograd.

    ``below`` returns whether a point is below the root.
    """
    low, high = low.detach(), high.detach()
    for _ in range(halvings):
        middle = 0.5 * (low + high)
        above = below(middle)
        low, high = middle.where(above, low), high.where(above, middle)
    return high


def with_derivatives(
    root: Tensor, cdf: Callable[[Tensor], Tensor], density: Callable[[Tensor], Tensor]
) -> Tensor:
    r"""Return the root x of $F(x) = p$ with its derivatives in all that F depends on.

    An implicit Newton step $x - (F(x) - p) / f(x)$ leaves the value and makes the first derivative
    right, a second step those up to the third. Where the density underflows they are 0.
    """
    for _ in range(2):
        value = cdf(root)
        if torch.compiler.is_compiling() and not value.requires_grad:  # keeps exports small
            return root
        slope = density(root)
        root = root - (value - value.detach()) / slope.where(slope > 0, math.inf)
    return root
