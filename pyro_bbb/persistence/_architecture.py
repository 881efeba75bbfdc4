"""Networks and likelihoods as plain data, from which `build` makes them once more.

A blueprint has a node for each module, by its path, those inside before those that hold them: the
name of a class, constructor arguments, and the paths of the modules inside. What stands in several
places has one node. Names lead to classes through the fixed tables of `_layers` and `_kinds` only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from pyro.nn import PyroModule
from pyro.nn.module import _Context
from torch import Tensor, nn

from pyro_bbb.networks import Converted, mix_in
from pyro_bbb.persistence._registry import (
    KINDS,
    LAYERS,
    Arguments,
    Modules,
    layer_arguments,
    random_shapes,
    require_arguments,
)
from pyro_bbb.persistence.json_codec import CannotDescribe, decode, encode
from pyro_bbb.priors import Prior, declare

Node: TypeAlias = dict[str, Any]


Blueprint: TypeAlias = dict[str, Node]


_OURS = {cls.__name__: cls for cls in KINDS}


_NAMES = {cls: name for name, cls in (LAYERS | _OURS).items()}


def describe(root: nn.Module, path: str, tensors: dict[str, Tensor]) -> Blueprint:
    """The blueprint of a network or a likelihood.

    Args:
        root: the module.
        path: its path.
        tensors: gets the constants that are tensors, by names that begin with ``constants.``.

    Raises:
        CannotDescribe: a part is of a class that the format does not know, or was changed in a
            way that its constructor's arguments do not tell.
    """
    blueprint: Blueprint = {}
    constants: dict[str, Tensor] = {}
    _describe(root, path, blueprint, {}, constants)
    try:
        twin = build(blueprint, path, dict(constants))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CannotDescribe(f"{path} was changed after its construction: {error}") from error
    if difference := _difference(root, twin, path):
        raise CannotDescribe(difference)
    tensors.update(constants)
    return blueprint


def build(blueprint: Blueprint, path: str, tensors: dict[str, Tensor]) -> nn.Module:
    """The module of a blueprint; parameters and buffers of torch's layers have no memory yet.

    Args:
        blueprint: as `describe` gave it.
        path: that of the module to return.
        tensors: the constants, which are taken out.

    Raises:
        KeyError: a name, path or argument is unknown or lacking.
    """
    modules: Modules = {}
    for place, node in blueprint.items():
        modules[place] = _build(modules, tensors, **node)
    for place, node in blueprint.items():
        for name, (owner, owner_name) in node.get("tied", {}).items():
            converted: Any = modules[place]
            del converted._parameters[name]
            converted._pyro_bbb_tied[name] = modules[owner], owner_name
    return modules[path]


def _describe(
    module: nn.Module,
    path: str,
    blueprint: Blueprint,
    paths: dict[nn.Module, str],
    tensors: dict[str, Tensor],
) -> str:
    """Adds a module and what is in it; the path where it stands first."""
    if module in paths:
        return paths[module]
    paths[module] = path
    name, form = _class_of(module, path)
    arguments, inside = _take_apart(name, module, path)
    node: Node = {"kind": name, **form}
    node["arguments"] = {
        key: encode(value, f"constants.{path}.{key}", tensors) for key, value in arguments.items()
    }
    node["inside"] = {
        key: _describe(part, f"{path}.{key}", blueprint, paths, tensors)
        for key, part in inside.items()
    }
    if name in LAYERS and (random := random_shapes(module)):
        node["random"] = random
    if tied := vars(module).get("_pyro_bbb_tied"):
        node["tied"] = {key: [paths[owner], theirs] for key, (owner, theirs) in tied.items()}
    blueprint[path] = node
    return path


def _build(
    modules: Modules,
    tensors: dict[str, Tensor],
    *,
    kind: str,
    arguments: Arguments,
    inside: dict[str, str],
    pyro: bool = False,
    converted: bool = False,
    random: dict[str, list[int]] | None = None,
    tied: Any = None,
) -> nn.Module:
    parts = {key: modules[place] for key, place in inside.items()}
    values = {key: decode(value, tensors) for key, value in arguments.items()}
    prior: Any = parts.pop("prior") if random else None
    if kind in LAYERS:
        require_arguments(kind, values)
        module = _make_layer(PyroModule[LAYERS[kind]] if pyro else LAYERS[kind], values, parts)
    else:
        module = KINDS[_OURS[kind]].make(values, parts)
    if converted:
        mix_in(module, _Context())
    if random:
        declare(module, prior, **random)  # type: ignore[arg-type]
    return module


def _make_layer(cls: Any, arguments: Arguments, parts: Modules) -> nn.Module:
    """A layer of torch without memory for its parameters."""
    with torch.device("meta"):
        layer: nn.Module = cls([]) if issubclass(cls, nn.ModuleList) else cls(**arguments)
    layer._modules.update(parts)
    return layer


def _class_of(module: nn.Module, path: str) -> tuple[str, dict[str, bool]]:
    """Name of a module's class in the tables, and how Pyro has come into it."""
    converted = isinstance(module, Converted)
    cls: Any = type(module).plain_class if converted else type(module)  # type: ignore[attr-defined]
    form = {"converted": True} if converted else {}
    if cls in _NAMES:
        return _NAMES[cls], form
    base = cls.__bases__[0]
    if base in LAYERS.values() and cls is PyroModule[base]:
        return _NAMES[base], {"pyro": True, **form}
    raise CannotDescribe(f"{path} is a {cls.__module__}.{cls.__qualname__}")


def _take_apart(name: str, module: nn.Module, path: str) -> tuple[Arguments, Modules]:
    """Constructor's arguments, and the modules inside."""
    elsewhere: Iterable[str] = (*random_shapes(module), *vars(module).get("_pyro_bbb_tied", ()))
    try:
        if name in LAYERS:
            parts: Any = dict(module._modules)
            return layer_arguments(name, module, elsewhere), parts
        kind = KINDS[_OURS[name]]
        return kind.arguments(module), kind.inside(module)
    except (KeyError, AttributeError) as error:
        raise CannotDescribe(f"{path}, a {name}, was changed, it lacks {error}") from error


# --- whether a blueprint says everything ---


def _difference(root: nn.Module, twin: nn.Module, path: str) -> str | None:
    """What of a module its twin from the blueprint has otherwise, if anything."""
    ours, twins = (dict(x.named_modules(prefix=path)) for x in (root, twin))
    if others := ours.keys() ^ twins.keys():
        return f"{path} was changed after its construction: {sorted(others)}"
    for place, module in ours.items():
        if any(hooks for name, hooks in vars(module).items() if name.endswith("_hooks")):
            return f"{place} has hooks"
        own, made = _visible(module), _visible(twins[place])
        for name in own | made:
            if own.get(name) != made.get(name):
                return (
                    f"{place} was changed after its construction: {name} is {own.get(name)!r}, "
                    f"not {made.get(name)!r}"
                )
    return None


def _visible(module: nn.Module) -> dict[str, Any]:
    """What a module's behaviour can depend on, without the values of tensors."""
    own = vars(module)
    attributes = {} if isinstance(module, Prior) else own
    tensors = module._parameters | module._buffers
    return {
        **{k: _comparable(v) for k, v in attributes.items() if k[0] != "_" and k != "training"},
        "its class": type(module),
        "its tensors": {k: None if x is None else tuple(x.shape) for k, x in tensors.items()},
        "its random weights": {
            name: (type(site), _comparable(getattr(site, "__dict__", None)))
            for name, site in own.get("_pyro_samples", {}).items()
        },
        "its learned quantities": list(own.get("_pyro_params", ())),
        "its tied weights": list(own.get("_pyro_bbb_tied", ())),
    }


def _comparable(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _comparable(value) for key, value in x.items()}
    return tuple(map(_comparable, x)) if isinstance(x, (list, tuple)) else x
