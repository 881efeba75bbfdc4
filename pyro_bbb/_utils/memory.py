# SPDX-License-Identifier: Apache-2.0
"""Tensors that lie consecutively in memory, and pieces of vectors that fit in a cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors


class FlatMemory:
    """A vector on which tensors lie consecutively until it is closed.

    Args:
        tensors: moved to the vector.
        keep: whether their own memory is kept until then; else they get new memory.
    """

    def __init__(self, tensors: Sequence[Tensor], *, keep: bool = True) -> None:
        self.vector = torch.cat([x.detach().reshape(-1) for x in tensors])
        self._own = [(x, x.data if keep else None) for x in tensors]
        for x, view in zip(tensors, _unflatten_dense_tensors(self.vector, tensors), strict=True):
            x.data = view

    def close(self) -> None:
        """Give every tensor its own memory again, with its present content."""
        for x, own in self._own:
            x.data = x.data.clone() if own is None else own.copy_(x.data)


_IN_CACHE = 2**17  # numbers; about ten vectors of this length fit in a processor's cache


def pieces(*vectors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Return pieces of vectors ``[n]``, together; other tensors, or those of a GPU, as one piece.

    A chain of operations on a piece reads and writes the processor's cache in place of memory.
    """
    first = vectors[0]
    if first.device.type != "cpu" or len(first) <= _IN_CACHE or any(x.dim() > 1 for x in vectors):
        return [vectors]
    return zip(*(x.split(_IN_CACHE) for x in vectors), strict=True)
