# SPDX-License-Identifier: Apache-2.0
"""Tensors that lie consecutively in memory, so that their vector is a view."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

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


def joined(vectors: Sequence[Tensor]) -> Tensor:
    """Concatenate vectors ``[n_i]``: a view if they are consecutive in memory already."""
    memories = {x.untyped_storage().data_ptr() for x in vectors}
    follow = (a.data_ptr() + a.nbytes == b.data_ptr() for a, b in pairwise(vectors))
    if len(memories) == 1 and all(x.stride() == (1,) for x in vectors) and all(follow):
        return vectors[0].as_strided((sum(map(len, vectors)),), (1,))
    return torch.cat(list(vectors))
