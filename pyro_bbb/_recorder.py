# SPDX-License-Identifier: Apache-2.0
"""Record the tensor operations of a function once, and replay them.

For a network of some thousand weights the arithmetic of a step takes microseconds, and deciding in
Python what to compute takes milliseconds. A function whose operations do not depend on the values
of its tensors is run once under a dispatch mode that notes each operation of aten and the memory
that it reads and writes. An operation is replayed if it writes to a tensor, draws random numbers,
or depends on an argument or on anything that is written; the results of all others are constants.
A small result is written to the memory that it had when recorded, so that its views are constants,
too. `torch.cuda.graphs` does the same for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import isbuiltin
from operator import getitem
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

Function: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
aten = torch.ops.aten
_EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
}
_SHAPE_ONLY = _EMPTY | {  # operations that do not depend on values
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_full.default,
}
_WITH_NUMBER = {  # the second argument may be a number, which becomes a tensor once
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.sub.out,
    aten.sub_.Tensor,
    aten.mul_.Tensor,
    aten.mul.Scalar,
    aten.ne.Scalar,
}
_SQUARES = {aten.pow.Tensor_Scalar, aten.pow.Tensor_Scalar_out}
_SIZES = {aten.view.default, aten.expand.default}  # methods that take sizes one by one
_SMALL = 2**15  # numbers; memory of larger results is left to torch between their uses


def record_step(
    step: Callable[[], None], inputs: Sequence[Tensor], state: Sequence[Tensor]
) -> Callable[[], None]:
    """Record a step that works in place, and return a function that does the same.

    Args:
        step: the step; it is run, and then again without effect.
        inputs: tensors that others change between steps.
        state: tensors that the step changes. All others that it reads are taken to be constant.

    Returns:
        The function. It draws random numbers as the step does, and runs in inference mode, in which
        calls of operations take less time.

    Raises:
        RuntimeError: the step reads a number on the host, or the record does not repeat it.
    """
    with _Tracer() as tracer:
        step()
    replay: Callable[[], None] = torch.inference_mode()(
        _compiled(tracer.operations, (), inputs, ())
    )
    outcomes = [_outcome(run, inputs, state) for run in (replay, step)]
    for x, y in zip(*outcomes, strict=True):
        if not torch.allclose(x, y, rtol=1e-3, equal_nan=True):
            raise RuntimeError("its traced operations do other than the step itself")
    return replay


def record(function: Function, z: Tensor, *data: Tensor) -> Function:
    """Record a function of tensors that changes none, and return a function that does the same.

    Args:
        function: returns two tensors, such as an energy and its gradient.
        z: point of finite value at which it is recorded, ``[d]``, or several ``[chains, d]``.
        data: its further arguments.

    Returns:
        The record; or ``function`` where its path depends on values, or where the record differs
        from it at ``z`` or nearby.
    """
    try:
        with _Tracer() as tracer:
            results = function(z, *data)
        replay = torch.no_grad()(_compiled(tracer.operations, (z, *data), (), results))
    except RuntimeError:  # a branch on a value cannot be recorded
        return function
    with torch.random.fork_rng():
        points = z, z + 0.1 * torch.randn_like(z), z
    for point in points:
        if not all(map(_agree, replay(point, *data), function(point, *data))):
            return function
    return replay


def _agree(actual: Tensor, expected: Tensor) -> bool:
    rounding = 1e3 * torch.finfo(expected.dtype).eps
    atol = rounding * (1 + expected.abs().max().item())
    return torch.allclose(actual, expected, rtol=0, atol=atol, equal_nan=True)


def _outcome(
    run: Callable[[], None], inputs: Sequence[Tensor], state: Sequence[Tensor]
) -> list[Tensor]:
    """Return the state after a run with other inputs; leave everything as it was."""
    touched = *inputs, *state
    before = [tensor.detach().clone() for tensor in touched]
    with torch.random.fork_rng([]):
        try:
            _copy(inputs, map(_another, inputs))
            run()
            return [tensor.detach().clone() for tensor in state]
        finally:
            _copy(touched, before)


def _another(x: Tensor) -> Tensor:
    """Return other values of an input that are as likely."""
    rolled = x.roll(1, 0) if x.dim() else x
    return 0.9 * rolled if x.is_floating_point() else rolled.clone()


@torch.no_grad()
def _copy(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


@dataclass(frozen=True)
class _Ref:
    """A tensor's memory and shape, without the tensor: autograd copies gradients that are kept."""

    memory: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage: torch.UntypedStorage = field(compare=False, repr=False)

    @classmethod
    def of(cls, x: Tensor) -> _Ref:
        storage = x.untyped_storage()
        where = storage.data_ptr(), int(x.storage_offset()), x.shape, x.stride(), x.dtype
        return cls(*where, storage)

    def meta(self) -> Tensor:
        """Return a tensor of that shape without memory."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    def tensor(self) -> Tensor:
        """Return a tensor in that memory."""
        new = torch.empty(0, dtype=self.dtype, device=self.storage.device)
        return new.set_(self.storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True, eq=False)
class _Operation:
    """One call of an operation, with references in place of tensors."""

    target: Any  # of `torch.ops.aten`
    args: list[Any]
    kwargs: Mapping[str, Any]
    result: Any

    @property
    def name(self) -> str:
        return str(self.target._schema.name.removeprefix("aten::"))

    @property
    def inputs(self) -> list[_Ref]:
        return list(_refs([self.args, *self.kwargs.values()]))

    @property
    def outputs(self) -> list[_Ref]:
        return list(_refs(self.result))

    @property
    def written(self) -> list[_Ref]:
        """The arguments that it changes in place."""
        schema = self.target._schema.arguments
        values = dict(zip((x.name for x in schema), self.args, strict=False)) | dict(self.kwargs)
        return list(_refs([values.get(x.name) for x in schema if x.is_write]))

    @property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.target.tags


class _Tracer(TorchDispatchMode):
    """Notes the operations inside in their order, and keeps their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        noted = [
            _mapped(_Ref.of, x, Tensor) for x in (list(args), *(kwargs or {}).values(), result)
        ]
        named = dict(zip(kwargs or {}, noted[1:-1], strict=True))
        self.operations.append(_Operation(func, noted[0], named, noted[-1]))
        return result


def _mapped(function: Callable[[Any], Any], value: Any, kind: type) -> Any:
    """Apply a function to everything of a type in nested lists."""
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return [_mapped(function, x, kind) for x in value]
    return function(value) if isinstance(value, kind) else value


def _refs(value: Any) -> Iterator[_Ref]:
    """Yield the references in nested lists."""
    if isinstance(value, _Ref):
        yield value
    elif isinstance(value, list):
        for x in value:
            yield from _refs(x)


def _repeated(
    operations: Sequence[_Operation], changing: set[int], new: set[int], returned: set[int]
) -> list[_Operation]:
    """Select the operations to replay; ``changing`` and ``new`` grow to all such memory."""
    written = {ref.memory for x in operations for ref in x.written}
    changing |= written
    repeated = []
    for x in operations:
        shown = {ref.memory for ref in x.inputs}
        depends = x.target not in _SHAPE_ONLY and not shown.isdisjoint(changing)
        made = {ref.memory for ref in x.outputs} - shown
        overwritten = x.target not in _EMPTY and made & written
        if isinstance(x.result, bool | int | float | complex):
            if depends:
                raise RuntimeError(f"{x.target} reads a number on the host")
        elif x.written or x.is_random or (made and depends) or overwritten:
            repeated.append(x)
            changing |= made
            if not made.isdisjoint(returned) or not _takes_out(x):
                new |= made
        elif not made and not new.isdisjoint(shown) and not {*x.outputs} <= {*x.inputs}:
            repeated.append(x)  # a view of memory that moves
    return repeated


def _takes_out(x: _Operation) -> bool:
    """Return whether torch's function writes a small result to memory that it is given."""
    function = getattr(torch, x.name, None)
    is_small = isinstance(x.result, _Ref) and math.prod(x.result.shape) <= _SMALL
    if not is_small or x.written or x.is_random or not isbuiltin(function):
        return False
    args, kwargs = _mapped(_Ref.meta, [x.args, [*x.kwargs.values()]], _Ref)
    named = dict(zip(x.kwargs, kwargs, strict=True))
    try:
        function(*args, **named, out=x.result.meta())
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    return True


def _compiled(
    operations: Sequence[_Operation],
    inputs: Sequence[Tensor],
    given: Sequence[Tensor],
    results: Sequence[Tensor],
) -> Callable[..., Any]:
    """Return the operations as a function of the inputs, which returns the results."""
    arguments, outputs = [_Ref.of(x) for x in inputs], [_Ref.of(x) for x in results]
    new = {ref.memory for ref in arguments}
    changing = new | {_Ref.of(x).memory for x in given}
    repeated = _repeated(operations, changing, new, {ref.memory for ref in outputs})
    graph, fixed = fx.Graph(), list[Tensor]()
    nodes = {ref: graph.placeholder(f"input{i}") for i, ref in enumerate(arguments)}

    def fix(tensor: Tensor) -> fx.Node:
        fixed.insert(0, tensor)
        with graph.inserting_before():  # everything else
            return graph.placeholder(f"fixed{len(fixed)}")

    def node_of(ref: _Ref) -> fx.Node:
        if ref not in nodes:
            if ref.memory in new:
                raise RuntimeError("a view was made in a way that is not traced")
            nodes[ref] = fix(ref.tensor())
        return nodes[ref]

    for x in _used(repeated, outputs):
        args = _mapped(node_of, x.args, _Ref)
        kwargs = {name: _mapped(node_of, value, _Ref) for name, value in x.kwargs.items()}
        if isinstance(x.result, _Ref) and not x.written and x.result.memory not in new:
            kwargs["out"] = node_of(x.result)
        node = graph.create_node(*_cheaper(x, args, kwargs, fix))
        several = isinstance(x.result, list)
        for number, ref in enumerate(x.result if several else [x.result]):
            if isinstance(ref, _Ref) and ref not in nodes and ref.memory in new:
                nodes[ref] = graph.call_function(getitem, (node, number)) if several else node
    graph.output(tuple(map(node_of, outputs)))
    return partial(fx.GraphModule({}, graph).forward, *fixed)


def _used(operations: Sequence[_Operation], results: Sequence[_Ref]) -> list[_Operation]:
    """Leave out the operations whose result nobody uses."""
    used, memory, needed = set(results), {ref.memory for ref in results}, []
    for x in reversed(operations):
        made = {ref.memory for ref in x.outputs} - {ref.memory for ref in x.inputs}
        is_used = not (memory.isdisjoint(made) if made else used.isdisjoint(x.outputs))
        if x.written or x.is_random or is_used:
            needed.append(x)
            used.update(x.inputs)
            memory |= {ref.memory for ref in x.inputs}
    return needed[::-1]


def _cheaper(
    operation: _Operation, args: list[Any], kwargs: dict[str, Any], fix: Callable[[Tensor], fx.Node]
) -> tuple[str, Any, tuple[Any, ...], dict[str, Any]]:
    """Call the operation by torch's own function for Python, which takes half the time to call."""
    target, first = operation.target, operation.args[0] if operation.args else None
    if isinstance(first, _Ref) and first.dtype.is_floating_point and len(args) > 1:
        if target in _SQUARES and args[1] == 2:
            return "call_function", torch.mul, (args[0], args[0]), kwargs
        if target in _WITH_NUMBER and isinstance(args[1], int | float):
            args[1] = fix(torch.tensor(args[1], dtype=first.dtype, device=first.storage.device))
    if target is aten._to_copy.default and [*kwargs] == ["dtype"]:
        return "call_method", "to", tuple(args), kwargs
    name = operation.name
    if target in _SIZES and args[1]:
        return "call_method", name, (args[0], *args[1]), kwargs
    if name.endswith("_") and hasattr(Tensor, name):
        return "call_method", name, tuple(args), kwargs
    function = getattr(torch, name, target)
    return "call_function", function if isbuiltin(function) else target, tuple(args), kwargs
