"""Several vectors at once, as many at a time as a processor's cache holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FITS = 2**19  # numbers


@dataclass(frozen=True)
class Blocks:
    """How several vectors are taken some at a time.

    Args:
        dims: number of dimensions before those of one vector.
        count: how many at a time.
    """

    dims: int
    count: int

    @classmethod
    def of(cls, x: Tensor, dims: int = 1) -> Blocks:
        """Those for tensors whose last ``dims`` dimensions are one vector's."""
        before = x.dim() - dims
        if before == 0:
            return cls(0, 1)
        fits = FITS if x.device.type == "cpu" else x.numel()
        return cls(before, max(1, fits // max(1, math.prod(x.shape[before:]))))

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """Those of a tensor ``[..., *shape]``: ``[m, *shape]``, or ``[*shape]`` one at a time."""
        if self.dims == 0:
            return (x,)
        rows = x.flatten(0, self.dims - 1)
        return rows.unbind() if self.count == 1 and len(rows) else rows.split(self.count)


def joined(found: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """What was found for each vector of all blocks, ``[...]``."""
    return torch.cat([x.reshape(-1) for x in found]).view(*shape) if shape else found[0]


def over_block(x: Tensor) -> Tensor:
    """The sum of a block's vectors, ``[n]``."""
    return x.sum(0) if x.dim() > 1 else x


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


HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def batches(
    size: int, in_dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]
) -> list[Tensor]:
    """The arguments of a rule of `torch.vmap` with their batch first; all are batches."""
    return [
        x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(tensors, in_dims, strict=False)
    ]


def total(x: Tensor, dims: int) -> Tensor:
    """The sum over the last ``dims`` dimensions."""
    return x.sum(tuple(range(-dims, 0))) if dims else x
