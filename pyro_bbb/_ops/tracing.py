# SPDX-License-Identifier: Apache-2.0
"""A training step as the plain list of its tensor operations.

For a network of some thousand weights the arithmetic of a step takes microseconds, and finding out
in Python what to compute takes milliseconds. Tensors that a step works on in place stay where they
are, so its operations can be traced once and then run by themselves: what `torch.cuda.graphs`
does for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from inspect import isbuiltin
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from pyro_bbb._ops.operations import Operation, TensorRef, Tracer, mapped

aten = torch.ops.aten
_NUMBERS = {
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
_VIEWS = {aten.view.default, aten.expand.default}  # methods, which take sizes one by one


def trace(step: Callable[[], None], given: Sequence[Tensor] = ()) -> Callable[[], None]:
    """The operations of a step, as a function that does the same to the same tensors.

    Args:
        step: changes tensors in place, in the same way whatever is in them; it is run once.
        given: tensors that others change between its runs. All that it reads besides, and does
            not change itself, is taken to be constant.

    Returns:
        The function. It draws random numbers as the step does, and runs in inference mode, in which
        an operation takes less time to call.

    Raises:
        RuntimeError: the step reads a number on the host.
    """
    with Tracer() as tracer:
        step()
    return _Program(tracer.operations, map(TensorRef.of, given)).compiled()


class _Program:
    """The operations of a step that must be repeated, and the tensors that stay in place."""

    def __init__(self, operations: Sequence[Operation], given: Iterable[TensorRef]) -> None:
        self.unstable = {ref.memory for each in operations for ref in each.changed}
        self.unstable.update(ref.memory for ref in given)
        self.fixed: set[TensorRef] = set()  # there before a run, whatever is in them
        self.changing: set[TensorRef] = set()  # of another content in each run
        self.same_as: dict[TensorRef, TensorRef] = {}
        self._made: set[int] = set()  # memory that is new in each run
        self._seen: dict[str, TensorRef] = {}
        self.repeated = [each for each in operations if self._must_repeat(each)]

    def first(self, ref: TensorRef) -> TensorRef:
        """The first tensor of the same content."""
        return self.same_as.get(ref, ref)

    def _must_repeat(self, operation: Operation) -> bool:
        for ref in operation.inputs:
            self._meet(ref)
        depends = operation.depends_on_values and any(
            self.first(x) in self.changing for x in operation.inputs
        )
        if operation.reads and depends:
            raise RuntimeError(f"{operation.target} reads a number on the host")
        if operation.changed or operation.reads:
            return bool(operation.changed)
        new = [x for x in operation.outputs if not self._is_known(x)]
        if not new or self._need_not_repeat(operation, new, depends):
            return False
        self._made.update(ref.memory for ref in new)
        self.changing.update(new)
        return True

    def _need_not_repeat(self, operation: Operation, new: list[TensorRef], depends: bool) -> bool:
        if operation.is_random:
            return False
        shown = {ref.memory for ref in operation.inputs}
        if any(ref.memory in shown for ref in new):  # views
            is_fixed = self.first(operation.inputs[0]) in self.fixed
        else:
            stable = not any(ref.memory in self.unstable for ref in new)
            is_fixed = operation.makes_empty or (stable and not depends)
        if is_fixed:
            self._fix(new)
        return is_fixed or self._find_twin(operation)

    def _meet(self, ref: TensorRef) -> None:
        """An argument that no operation made was there before."""
        if not self._is_known(ref):
            if ref.memory in self._made:
                raise RuntimeError("a view was made in a way that is not traced")
            self._fix([ref])

    def _fix(self, refs: Iterable[TensorRef]) -> None:
        for ref in refs:
            self.fixed.add(ref)
            if ref.memory in self.unstable:
                self.changing.add(ref)

    def _is_known(self, ref: TensorRef) -> bool:
        first = self.first(ref)
        return first in self.fixed or first in self.changing

    def _find_twin(self, operation: Operation) -> bool:
        """Return whether an earlier tensor has the result already; it is used instead."""
        refs = [*operation.outputs, *operation.inputs]
        if len(operation.outputs) != 1 or any(x.memory in self.unstable for x in refs):
            return False
        (result,) = operation.outputs
        if operation.repeats_input:
            self.same_as[result] = self.first(operation.inputs[0])
            return True
        arguments = mapped(self.first, [operation.args, *operation.kwargs.items()], TensorRef)
        twin = self._seen.setdefault(f"{operation.target} {arguments}", result)
        if twin != result:
            self.same_as[result] = twin
        return twin != result

    def _needed(self) -> list[Operation]:
        """Without operations whose result nobody uses."""
        used: set[TensorRef] = set()
        found = []
        for each in reversed(self.repeated):
            results = map(self.first, each.outputs)
            if each.changed or each.is_random or not used.isdisjoint(results):
                found.append(each)
                used.update(map(self.first, each.inputs))
        return found[::-1]

    def compiled(self) -> Callable[[], None]:
        """The operations as a function, to which all fixed tensors are given."""
        graph, fixed = fx.Graph(), list[Tensor]()
        nodes: dict[TensorRef, fx.Node] = {}

        def fix(tensor: Tensor) -> fx.Node:
            fixed.insert(0, tensor)
            with graph.inserting_before():  # everything else
                return graph.placeholder(f"fixed{len(fixed)}")

        def node_of(ref: TensorRef) -> fx.Node:
            ref = self.first(ref)
            if ref not in nodes:
                nodes[ref] = fix(ref.tensor())
            return nodes[ref]

        for each in self._needed():
            args = mapped(node_of, each.args, TensorRef)
            kwargs = {name: mapped(node_of, x, TensorRef) for name, x in each.kwargs.items()}
            node = graph.create_node(*_cheaper(each, args, kwargs, fix))
            several = isinstance(each.result, list)
            for number, ref in enumerate(each.result if several else [each.result]):
                if isinstance(ref, TensorRef) and not each.changed:  # a result may lack a gradient
                    part = graph.call_function(getitem, (node, number)) if several else node
                    nodes[self.first(ref)] = part
        graph.output(())
        return torch.inference_mode()(partial(fx.GraphModule({}, graph).forward, *fixed))


def _cheaper(
    operation: Operation, args: list[Any], kwargs: dict[str, Any], fix: Callable[[Tensor], fx.Node]
) -> tuple[str, Any, tuple[Any, ...], dict[str, Any]]:
    """The same operation by torch's own function for Python, which takes half the time to call.

    A number becomes a tensor once, in place of each time.
    """
    target, first = operation.target, operation.args[0] if operation.args else None
    if isinstance(first, TensorRef) and first.dtype.is_floating_point and len(args) > 1:
        if target in _SQUARES and args[1] == 2:
            return "call_function", torch.mul, (args[0], args[0]), kwargs
        if target in _NUMBERS and isinstance(args[1], int | float):
            args[1] = fix(torch.tensor(args[1], dtype=first.dtype, device=first.storage.device))
    if target is aten._to_copy.default and [*kwargs] == ["dtype"]:
        return "call_method", "to", tuple(args), kwargs
    name = target._schema.name.removeprefix("aten::")
    if target in _VIEWS and args[1]:
        return "call_method", name, (args[0], *args[1]), kwargs
    if name.endswith("_") and hasattr(Tensor, name):
        return "call_method", name, tuple(args), kwargs
    function = getattr(torch, name, target)
    return "call_function", function if isbuiltin(function) else target, tuple(args), kwargs
