# SPDX-License-Identifier: Apache-2.0
"""A single tensor operation (of aten) with its arguments and result, and what is known of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_SHAPE_ONLY = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.new_full.default,
    aten.new_empty.default,
}
_EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
}
_NEUTRAL: dict[Any, int] = {
    aten.add.Tensor: 0,
    aten.sub.Tensor: 0,
    aten.mul.Tensor: 1,
    aten.div.Tensor: 1,
    aten.pow.Tensor_Scalar: 1,
}


@dataclass(frozen=True)
class TensorRef:
    """A tensor's memory and shape; the memory stays, the tensor need not."""

    memory: int
    offset: int  # in numbers
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage: torch.UntypedStorage = field(compare=False, repr=False)

    @classmethod
    def of(cls, x: Tensor) -> TensorRef:
        """Refer to a tensor without keeping it: autograd copies gradients that others have."""
        storage = x.untyped_storage()
        where = storage.data_ptr(), int(x.storage_offset()), x.shape, x.stride(), x.dtype
        return cls(*where, storage)

    def tensor(self) -> Tensor:
        """The tensor itself, or another there."""
        new = torch.empty(0, dtype=self.dtype, device=self.storage.device)
        return new.set_(self.storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True, eq=False)
class Operation:
    """One call of an operation, with references in place of tensors."""

    target: Any  # of `torch.ops.aten`
    args: list[Any]
    kwargs: Mapping[str, Any]
    result: Any

    @property
    def inputs(self) -> list[TensorRef]:
        """All tensors among the arguments."""
        return _refs([*self.args, *self.kwargs.values()])

    @property
    def outputs(self) -> list[TensorRef]:
        """The tensors in the result."""
        return _refs([self.result])

    @property
    def changed(self) -> list[TensorRef]:
        """The arguments that it changes in place."""
        schema = self.target._schema
        given = dict(zip((each.name for each in schema.arguments), self.args, strict=False))
        given.update(self.kwargs)
        return _refs([given.get(each.name) for each in schema.arguments if each.is_write])

    @property
    def is_random(self) -> bool:
        """Return whether it draws random numbers."""
        return torch.Tag.nondeterministic_seeded in self.target.tags

    @property
    def makes_empty(self) -> bool:
        """Return whether the result is a new tensor of any content."""
        return self.target in _EMPTY

    @property
    def depends_on_values(self) -> bool:
        """Return whether what is in the arguments matters, and not their shapes only."""
        return self.target not in _SHAPE_ONLY and self.target not in _EMPTY

    @property
    def reads(self) -> bool:
        """Return whether it gives the host a number."""
        return isinstance(self.result, bool | int | float | complex)

    @property
    def repeats_input(self) -> bool:
        """Return whether the result is the first argument, as of the sum with 0."""
        first = self.args[0] if self.args else None
        if not isinstance(first, TensorRef) or not isinstance(self.result, TensorRef):
            return False
        if first.shape != self.result.shape or first.dtype != self.result.dtype:
            return False
        number = self.args[1] if self.target in _NEUTRAL else None
        neutral = isinstance(number, int | float) and number == _NEUTRAL[self.target]
        return neutral or self.target is aten.sum.default  # of a single number


class Tracer(TorchDispatchMode):
    """Notes the operations inside in their order, and keeps their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        named = {
            name: mapped(TensorRef.of, value, Tensor) for name, value in (kwargs or {}).items()
        }
        given, made = (mapped(TensorRef.of, value, Tensor) for value in (list(args), result))
        self.operations.append(Operation(func, given, named, made))
        return result


def mapped(function: Callable[[Any], Any], value: Any, kind: type) -> Any:
    """A value, or nested lists, with the function of everything of one kind in place of it."""
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return [mapped(function, each, kind) for each in value]
    return function(value) if isinstance(value, kind) else value


def _refs(values: Any) -> list[TensorRef]:
    """The references in nested lists."""
    found: list[TensorRef] = []
    mapped(found.append, values, TensorRef)
    return found
