# SPDX-License-Identifier: Apache-2.0
"""Tensors flattened into one vector, and its parts as views."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Size, Tensor
from torch._utils import _unflatten_dense_tensors
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyro_bbb._ops.buffers import empty_from_pool
from pyro_bbb._ops.tuning import SMALL


class FlatTensors:
    """A vector ``[..., n]`` of tensors that lie side by side, and these as its parts.

    The tensors ``like``, of n numbers in all, have the parts' shapes.
    """

    def __init__(self, vector: Tensor, like: Sequence[Tensor]) -> None:
        self.vector, self.like = vector, like

    @functools.cached_property
    def parts(self) -> list[Tensor]:
        """The vector's parts, of the tensors' shapes; found once, as that takes its time."""
        if self.vector.requires_grad and torch.is_grad_enabled():
            return list(Split.apply(self.vector, self.like))
        if self.vector.dim() == 1:
            return list(_unflatten_dense_tensors(self.vector, self.like))
        columns = self.vector.split([x.numel() for x in self.like], -1)
        return [y.view(*y.shape[:-1], *x.shape) for y, x in zip(columns, self.like, strict=True)]

    def part(self, number: int) -> Tensor:
        """One of them."""
        return self.parts[number]

    def empty_like(self) -> FlatTensors:
        """Another one, of any content."""
        return FlatTensors(empty_from_pool(self.vector), self.like)


class Split(Function):
    """The parts of a vector; their gradients are put side by side once.

    Autograd by itself fills a vector with zeros for each part, and adds these up.
    """

    @staticmethod
    def forward(vector: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(FlatTensors(vector, like).parts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        vector, ctx.like = inputs
        ctx.save_for_backward(vector)
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_parts: Tensor | None) -> tuple[Tensor, None]:
        (vector,) = ctx.saved_tensors
        return flatten(of_parts, vector, ctx.like).vector, None


def over_parts(
    operation: Callable[..., Tensor],
    out: FlatTensors,
    tensors: Sequence[Tensor],
    *others: FlatTensors,
) -> FlatTensors:
    """An elementwise operation of tensors side by side, and of vectors, into a vector.

    On a GPU, and with few numbers, each operation costs: the tensors are joined first. Elsewhere
    each pass over memory costs: each tensor is worked on where it lies.
    """
    if out.vector.is_cuda or (out.vector.numel() < SMALL and len(tensors) > 1):
        pairs = zip(tensors, out.like, strict=True)
        vectors = [x.reshape(*x.shape[: x.dim() - y.dim()], -1) for x, y in pairs]
        operation(joined(vectors), *(other.vector for other in others), out=out.vector)
    else:
        columns = (each.parts for each in (*others, out))
        for x, *rest, part in zip(tensors, *columns, strict=True):
            operation(x, *rest, out=part)
    return out


def joined(vectors: Sequence[Tensor]) -> Tensor:
    """Vectors ``[..., n_i]`` as one, ``[..., n]``: a view where they lie so in memory already.

    They need no gradient; `joined_rows` is differentiable.
    """
    if _adjacent(vectors):
        return vectors[0].as_strided((sum(map(len, vectors)),), (1,))
    first, count = vectors[0], sum(x.shape[-1] for x in vectors)
    out = empty_from_pool(first, first.shape[:-1] + (count,))
    return torch.cat(list(vectors), -1, out=out)


def _adjacent(vectors: Sequence[Tensor]) -> bool:
    """Return whether these are vectors ``[n_i]``, each of which begins where the last one ends."""
    if any(x.dim() != 1 or x.stride() != (1,) for x in vectors):
        return False
    memories = {x.untyped_storage().data_ptr() for x in vectors}
    follow = (one.data_ptr() + one.nbytes == x.data_ptr() for one, x in pairwise(vectors))
    return len(memories) == 1 and all(follow)


def joined_rows(rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """The matrix whose rows are tensors side by side, ``[rows, n]``; differentiable."""
    matrix: Tensor = JoinRows.apply(len(rows), *(x for row in rows for x in row))
    return matrix


class JoinRows(Function):
    """`joined_rows`."""

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> Tensor:
        return joined([x.reshape(-1) for x in tensors]).view(count, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.like = [x.detach() for x in inputs[1:]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_unflatten_dense_tensors(grad.reshape(-1), ctx.like)


def flatten(
    tensors: Sequence[Tensor | None], vector: Tensor, like: Sequence[Tensor]
) -> FlatTensors:
    """Tensors, or zeros where there is none, copied into a new vector like another one."""
    out = FlatTensors(empty_from_pool(vector), like)
    return over_parts(_copied, out, or_zeros(tensors, out.parts))


def or_zeros(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors, or zeros of the others' shapes where there is none, which take no memory."""
    pairs = zip(tensors, like, strict=True)
    return [y.new_zeros(()).expand_as(y) if x is None else x for x, y in pairs]


def _copied(tensor: Tensor, *, out: Tensor) -> Tensor:
    return out.copy_(tensor)


def gathered(tensors: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
    """The entries of tensors at these indices, side by side, ``[k]``."""
    entries: Tensor = Gather.apply(tuple(indices), *tensors)
    return entries


def spread(vector: Tensor, indices: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors ``[..., *shape]`` that hold ``[..., k]`` numbers at these indices, else 0."""
    return list(Spread.apply(vector, tuple(indices), tuple(x.shape for x in like)))


class Gather(Function):
    """`gathered`."""

    @staticmethod
    def forward(indices: tuple[Tensor, ...], *tensors: Tensor) -> Tensor:
        return _entries(tensors, indices, Size())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.indices, *tensors = inputs
        ctx.shapes = tuple(x.shape for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_tensors(grad, ctx.indices, ctx.shapes)


class Spread(Function):
    """`spread`."""

    @staticmethod
    def forward(
        vector: Tensor, indices: tuple[Tensor, ...], shapes: tuple[Size, ...]
    ) -> tuple[Tensor, ...]:
        return tuple(_tensors(vector, indices, shapes))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        vector, ctx.indices, _ = inputs
        ctx.lead = vector.shape[:-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _entries(grads, ctx.indices, ctx.lead), None, None


def _entries(tensors: Sequence[Tensor], indices: Sequence[Tensor], lead: Size) -> Tensor:
    """Entries of tensors ``[*lead, *shape]``, each vector of ``lead`` by itself: that is faster."""
    count = sum(len(index) for index in indices)
    out = FlatTensors(empty_from_pool(tensors[0], lead + (count,)), indices)
    for x, index, part in zip(tensors, indices, out.parts, strict=True):
        for vector, slot in zip(_vectors(x, lead), _vectors(part, lead), strict=True):
            torch.index_select(vector, 0, index, out=slot)
    return out.vector


def _tensors(vector: Tensor, indices: Sequence[Tensor], shapes: Sequence[Size]) -> list[Tensor]:
    lead, parts = vector.shape[:-1], FlatTensors(vector, indices).parts
    tensors = [empty_from_pool(vector, lead + shape).zero_() for shape in shapes]
    for x, index, part in zip(tensors, indices, parts, strict=True):
        for slot, entries in zip(_vectors(x, lead), _vectors(part, lead), strict=True):
            slot.scatter_(0, index, entries)
    return tensors


def _vectors(x: Tensor, lead: Size) -> Sequence[Tensor]:
    return x.reshape(lead.numel(), -1).unbind()
