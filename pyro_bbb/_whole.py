"""Tensors side by side in one vector."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from pyro_bbb._memory import blank


class Whole:
    """A vector of tensors that lie side by side, and those as its parts."""

    def __init__(self, vector: Tensor, like: Sequence[Tensor]) -> None:
        self.vector, self._like = vector, like

    @functools.cached_property
    def parts(self) -> list[Tensor]:
        """The vector's parts, of the tensors' shapes; found once, as that takes its time."""
        return list(_unflatten_dense_tensors(self.vector, self._like))

    def part(self, number: int) -> Tensor:
        """One of them."""
        return self.parts[number]

    def blank(self) -> Whole:
        """Another one, of any content."""
        return Whole(blank(self.vector), self._like)


def over_parts(
    operation: Callable[..., Tensor], out: Whole, tensors: Sequence[Tensor], *others: Whole
) -> Whole:
    """An elementwise operation of tensors side by side, and of vectors, into a vector.

    On a GPU, where each launch costs, the tensors are joined first; elsewhere, where each pass
    over memory costs, each is worked on where it lies.
    """
    if out.vector.is_cuda:
        joined = torch.cat([x.flatten() for x in tensors])
        operation(joined, *(other.vector for other in others), out=out.vector)
    else:
        columns = (whole.parts for whole in (*others, out))
        for x, *rest, part in zip(tensors, *columns, strict=True):
            operation(x, *rest, out=part)
    return out
