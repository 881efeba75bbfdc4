# SPDX-License-Identifier: Apache-2.0
"""Adam on small tensors moved side by side: one operation for all in place of one for each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors
from torch.optim import Adam

SMALL = 2**15  # numbers; below, an operation costs more than its pass over memory


def joined(vectors: Sequence[Tensor]) -> Tensor:
    """Concatenate vectors ``[n_i]``: as a view where they are adjacent in memory already."""
    memories = {x.untyped_storage().data_ptr() for x in vectors}
    follow = (a.data_ptr() + a.nbytes == b.data_ptr() for a, b in pairwise(vectors))
    if all(x.stride() == (1,) for x in vectors) and len(memories) == 1 and all(follow):
        return vectors[0].as_strided((sum(map(len, vectors)),), (1,))
    return torch.cat(list(vectors))


class FlatMemory:
    """A vector in which tensors lie side by side until it is closed.

    Args:
        tensors: moved to the vector.
        keep: whether their own memory is kept until then; else they get new memory.
    """

    def __init__(self, tensors: Sequence[Tensor], *, keep: bool = True) -> None:
        self.vector = torch.cat([x.detach().reshape(-1) for x in tensors])
        self._own = [(x, x.data if keep else None) for x in tensors]
        for x, part in zip(tensors, _unflatten_dense_tensors(self.vector, tensors), strict=True):
            x.data = part

    def close(self) -> None:
        """Give every tensor memory of its own again, with what it holds now."""
        for x, own in self._own:
            x.data = x.data.clone() if own is None else own.copy_(x.data)


class FlatAdam:
    """The steps of an Adam or AdamW that has made one, on flat vectors of its small tensors.

    The optimiser given keeps parameters and moments, now parts of the vectors.
    """

    def __init__(self, optimizer: Adam) -> None:
        self._memory: list[FlatMemory] = []
        self._vectors: list[tuple[nn.Parameter, list[Tensor]]] = []
        states: dict[Tensor, Any] = {}
        groups = []
        for group in optimizer.param_groups:
            moved = [p for p in group["params"] if p in optimizer.state]
            left = [p for p in group["params"] if p not in optimizer.state]
            if _joinable(moved):
                vector = nn.Parameter(self._move(moved))
                self._vectors.append((vector, moved))
                states[vector] = self._moments([optimizer.state[p] for p in moved])
                left.append(vector)
            else:
                left += moved
                states.update({p: optimizer.state[p] for p in moved})
            groups.append({**group, "params": left})
        self.optimizer = type(optimizer)(groups)
        self.optimizer.state.update(states)

    def gather(self) -> list[Tensor]:
        """Move the gradients to the vectors; all there are now."""
        for vector, parameters in self._vectors:
            pieces = [
                p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in parameters
            ]
            vector.grad = joined(pieces)
        found = (p for group in self.optimizer.param_groups for p in group["params"])
        return [p.grad for p in found if p.grad is not None]

    @property
    def tensors(self) -> list[Tensor]:
        """The vectors of parameters and moments."""
        return [*(vector for vector, _ in self._vectors), *(each.vector for each in self._memory)]

    def close(self) -> None:
        """Leave the tensors as they were, at their present values."""
        for memory in reversed(self._memory):
            memory.close()

    def _move(self, tensors: Sequence[Tensor]) -> Tensor:
        self._memory.append(FlatMemory(tensors))
        return self._memory[-1].vector

    def _moments(self, states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The state of a vector: counts of steps are one, of all others the parts lie in one."""
        moments = {
            name: self._move([state[name] for state in states])
            for name in states[0]
            if name != "step"
        }
        shared = states[0]["step"]
        for state in states:
            state["step"] = shared
        return {"step": shared, **moments}


def _joinable(tensors: Sequence[Tensor]) -> bool:
    kinds = {(x.dtype, x.device) for x in tensors}
    few = sum(x.numel() for x in tensors) < SMALL
    return len(kinds) == 1 and len(tensors) > 1 and few and all(x.is_contiguous() for x in tensors)
