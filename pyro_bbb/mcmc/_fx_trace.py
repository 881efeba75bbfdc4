# SPDX-License-Identifier: Apache-2.0
"""A function of a vector, its value and gradient, as the plain list of its tensor operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

ValueAndGradient: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
aten = torch.ops.aten
_SHAPE_ONLY = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}
_REVIEWS = {aten.view.default, aten.expand.default, aten.alias.default, aten.detach.default}


def record(function: ValueAndGradient, z: Tensor, *data: Tensor) -> ValueAndGradient:
    """The operations of a function at ``z`` of finite value, as a function of its own.

    ``z`` is a vector ``[d]``, or several ``[chains, d]``; data are further arguments. Where the
    function's path depends on values, or the record does not repeat what it does (at ``z`` and
    nearby), it is the function itself.
    """
    try:
        # a method's arguments would be counted
        graph = make_fx(lambda *arguments: function(*arguments))(z, *data)
    except RuntimeError:  # a branch on a value cannot be recorded
        return function
    short = _simplify(graph, z, *data)
    with torch.random.fork_rng():
        near = (z, z + 0.1 * torch.randn_like(z), z)
    for point in near:
        if not all(map(_agree, short(point, *data), function(point, *data))):
            return function
    return short


def _agree(found: Tensor, expected: Tensor) -> bool:
    rounding = 1e3 * torch.finfo(expected.dtype).eps
    atol = rounding * (1 + expected.abs().max().item())
    return torch.allclose(found, expected, rtol=0, atol=atol, equal_nan=True)


def _simplify(graph: fx.GraphModule, *arguments: Tensor) -> fx.GraphModule:
    """The record without what depends on no argument, and without operations that do nothing."""
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    moving = {node for node in graph.graph.nodes if node.op == "placeholder"}
    for node in calls:
        if node.target not in _SHAPE_ONLY and moving.intersection(node.all_input_nodes):
            moving.add(node)
    if any(_is_random(node) or not moving.issuperset(_written(node)) for node in calls):
        return graph  # what looks constant is not
    run = fx.Interpreter(graph, garbage_collect_values=False)
    with torch.no_grad():
        run.run(*arguments)
    for number, node in enumerate(calls):
        value = run.env[node]
        if node in moving:
            if _does_nothing(node, run.env):
                node.replace_all_uses_with(node.args[0])
        elif isinstance(value, Tensor):
            graph.register_buffer(f"_constant{number}", value)
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.get_attr(f"_constant{number}"))
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _written(node: fx.Node) -> list[Any]:
    """The arguments that an operation changes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = dict(zip((each.name for each in schema.arguments), node.args, strict=False))
    given.update(node.kwargs)
    changed = (each.name for each in schema.arguments if each.is_write)
    return [given[name] for name in changed if name in given]


def _does_nothing(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    if node.target is aten.pow.Tensor_Scalar:
        return bool(node.args[1] == 1)
    if node.target not in _REVIEWS:
        return False
    before, after = values[node.all_input_nodes[0]], values[node]
    return before.shape == after.shape and before.stride() == after.stride()
