"""Sums of the logarithms of very many numbers, by logarithms of their products.

On a CPU a logarithm costs ten times a product, and only the sum of the logarithms is asked for.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_bbb._event import total

FEW = 2**15  # below that many, logarithms are no work
MOST = 16  # factors of one product
ROWS = 64  # of products, so that every thread finds its factors where it wrote them


def sum_log(x: Tensor, room: Tensor) -> Tensor:
    r"""$\sum\ln x$ over all entries, of any positive numbers.

    Args:
        x: the numbers.
        room: where logarithms may be written, of their shape.
    """
    bounds = -math.inf, math.inf
    if x.device.type == "cpu" and x.numel() >= FEW:
        least, most = torch.stack(x.aminmax()).log().tolist()
        bounds = least, most
    return total_log(x, bounds, x.dim(), room)


def total_log(x: Tensor, bounds: tuple[float, float], dims: int, room: Tensor) -> Tensor:
    """The sum of the logarithms over the last ``dims`` dimensions.

    Args:
        x: positive numbers.
        bounds: the logarithms are not below and not above these.
        dims: number of dimensions.
        room: where logarithms may be written, of the numbers' shape; may be ``x`` itself.
    """
    count = math.prod(x.shape[x.dim() - dims :])
    factors = _factors(bounds, x.dtype)
    if x.device.type != "cpu" or count < FEW or factors < 2:
        return total(torch.log(x, out=room), dims)
    x = x.flatten(-dims)
    length = count // (ROWS * factors)
    several, rest = x.split([ROWS * factors * length, count - ROWS * factors * length], -1)
    products = several.unflatten(-1, (ROWS, factors, length)).prod(-2)
    return total(products.log_(), 2).add_(total(rest.log(), 1))


def _factors(bounds: tuple[float, float], dtype: torch.dtype) -> int:
    """How many factors no product overflows with, and none is subnormal."""
    numbers, (least, most) = torch.finfo(dtype), bounds
    below = math.log(numbers.tiny) / least if least < 0 else math.inf
    above = math.log(numbers.max) / most if most > 0 else math.inf
    return int(min(MOST, below, above))
