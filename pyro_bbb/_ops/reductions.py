# SPDX-License-Identifier: Apache-2.0
"""Several vectors at once, as many at a time as a processor's cache holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_bbb._ops.tuning import BLOCK as FITS


@dataclass(frozen=True)
class Blocks:
    """Blocks of several vectors, small enough for the cache."""

    dims: int  # before those of one vector
    count: int  # vectors at a time

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


def concatenated(found: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Join the results of all blocks, ``[...]``."""
    return torch.cat([x.reshape(-1) for x in found]).view(*shape) if shape else found[0]


def over_block(x: Tensor) -> Tensor:
    """The sum of a block's vectors, ``[n]``."""
    return x.sum(0) if x.dim() > 1 else x


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
