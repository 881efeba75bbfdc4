# SPDX-License-Identifier: Apache-2.0
"""Networks and likelihoods as plain data (`describe`), and built from such data (`build`).

A blueprint has a node for each module by its path, submodules first: the name of its class, the
constructor's arguments, and the paths of its submodules. A shared module has one node. A name
leads only to a class that `saveable` registered, or to one of torch's layers in `LAYERS`.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, TypeAlias, get_type_hints

import torch
from pyro.nn import PyroModule
from pyro.nn.module import _Context
from torch import Tensor, nn

from pyro_bbb._utils.files import loading, require_form
from pyro_bbb._utils.saving import (
    SAVED_CLASSES,
    Arguments,
    Modules,
    SavedClass,
    attributes,
    children,
)
from pyro_bbb.networks import Converted, mix_in
from pyro_bbb.persistence.json_codec import CannotDescribe, decode, encode
from pyro_bbb.priors import Prior
from pyro_bbb.priors.declaration import declare, declared_shapes

Node: TypeAlias = dict[str, Any]
Blueprint: TypeAlias = dict[str, Node]

# --- torch's layers ---

_CONTAINERS = "Sequential ModuleList ModuleDict"
_RECURRENT = "RNN GRU LSTM"
_BY_DIMENSION = (
    "Conv ConvTranspose BatchNorm InstanceNorm MaxPool AvgPool AdaptiveAvgPool AdaptiveMaxPool "
    "ZeroPad ReflectionPad ReplicationPad CircularPad Dropout"
)
_OTHERS = (
    "Linear Embedding EmbeddingBag LayerNorm GroupNorm RMSNorm LocalResponseNorm Flatten Unflatten "
    "Upsample PixelShuffle PixelUnshuffle Dropout AlphaDropout FeatureAlphaDropout ReLU ReLU6 SELU "
    "SiLU Mish Hardswish Hardsigmoid Identity Tanh Sigmoid LogSigmoid Softsign Tanhshrink ELU CELU "
    "Softmax LogSoftmax Softmin GLU Hardshrink Softshrink GELU LeakyReLU RReLU PReLU Softplus "
    "Hardtanh Threshold"
)
_NAMES = [
    *f"{_CONTAINERS} {_RECURRENT} {_OTHERS}".split(),
    *(f"{name}{dimensions}d" for name in _BY_DIMENSION.split() for dimensions in (1, 2, 3)),
]
_LEFT_OUT = ("self", "device", "dtype", "min_value", "max_value")  # the last two are deprecated
_OF_RECURRENT = "input_size hidden_size num_layers bias batch_first dropout bidirectional".split()
_FURTHER = {"RNN": ["nonlinearity"], "GRU": [], "LSTM": ["proj_size"]}


def _layer(name: str) -> SavedClass:
    """Return how a layer of torch is read and built, by its constructor's signature."""
    cls: type[nn.Module] = getattr(nn, name)
    parameters = inspect.signature(cls.__init__).parameters
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [
        key
        for key, parameter in parameters.items()
        if parameter.kind not in variadic and key[0] != "_" and key not in _LEFT_OUT
    ]
    required = [key for key in names if parameters[key].default is inspect.Parameter.empty]
    if name in _CONTAINERS.split():
        names = required = []
    if name in _FURTHER:  # whose signature is (*args, **kwargs)
        names, required = _OF_RECURRENT + _FURTHER[name], _OF_RECURRENT[:2]
    return SavedClass(
        cls, attributes(*names), children, partial(_build_layer, cls, names, required)
    )


def _build_layer(
    plain: type[nn.Module],
    names: list[str],
    required: list[str],
    cls: Any,
    arguments: Arguments,
    modules: Modules,
) -> nn.Module:
    """Return a layer, of the plain class or Pyro's, without memory for its parameters."""
    if not set(required) <= arguments.keys() <= set(names):
        raise ValueError(f"{plain.__name__} must have the arguments {names}, got {list(arguments)}")
    hints = get_type_hints(plain.__init__)
    for key, value in arguments.items():  # torch's constructors do not check them
        require_form(value, hints.get(key, Any), key)
    with torch.device("meta"):
        layer: nn.Module = cls([]) if issubclass(cls, nn.ModuleList) else cls(**arguments)
    layer._modules.update(modules)
    return layer


LAYERS = {name: _layer(name) for name in _NAMES}


def _saved_class(name: str) -> SavedClass:
    return LAYERS[name] if name in LAYERS else SAVED_CLASSES[name]


# --- to a blueprint ---


def describe(root: nn.Module, path: str, tensors: dict[str, Tensor]) -> Blueprint:
    """Return the blueprint of a network or a likelihood at a path.

    ``tensors`` gets the constants that are tensors, by names that begin with ``constants.``. The
    error is CannotDescribe where the format does not know a class, or a module was changed in a
    way that its constructor's arguments do not show.
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


def _describe(
    module: nn.Module,
    path: str,
    blueprint: Blueprint,
    paths: dict[nn.Module, str],
    tensors: dict[str, Tensor],
) -> str:
    """Add a module and its submodules to a blueprint; return the first path of the module."""
    if module in paths:
        return paths[module]
    paths[module] = path
    name, form = class_of(module, path)
    arguments, inside = read_arguments(name, module, path)
    node: Node = {"kind": name, **form}
    node["arguments"] = {
        key: encode(value, f"constants.{path}.{key}", tensors) for key, value in arguments.items()
    }
    node["inside"] = {
        key: _describe(part, f"{path}.{key}", blueprint, paths, tensors)
        for key, part in inside.items()
    }
    if name in LAYERS and (random := declared_shapes(module)):
        node["random"] = random
    if tied := vars(module).get("_pyro_bbb_tied"):
        node["tied"] = {key: [paths[owner], theirs] for key, (owner, theirs) in tied.items()}
    blueprint[path] = node
    return path


def class_of(module: nn.Module, path: str) -> tuple[str, dict[str, bool]]:
    """Return the registered name of a module's class, and how Pyro was mixed in."""
    converted = isinstance(module, Converted)
    cls: Any = type(module).plain_class if converted else type(module)  # type: ignore[attr-defined]
    form = {"converted": True} if converted else {}
    for name, saved in (LAYERS | SAVED_CLASSES).items():
        if saved.cls is cls:
            return name, form
        if name in LAYERS and saved.cls in cls.__bases__ and PyroModule[saved.cls] is cls:
            return name, {"pyro": True, **form}
    raise CannotDescribe(f"{path} is a {cls.__module__}.{cls.__qualname__}")


def read_arguments(name: str, module: nn.Module, path: str) -> tuple[Arguments, Modules]:
    """Return the constructor's arguments, and the submodules that it does not make."""
    saved = _saved_class(name)
    try:
        return saved.arguments(module), saved.modules(module)
    except (KeyError, AttributeError) as error:
        raise CannotDescribe(
            f"{path}, a {name}, lacks an argument of its constructor: {error}"
        ) from error


# --- from a blueprint ---


def build(blueprint: Blueprint, path: str, tensors: dict[str, Tensor]) -> nn.Module:
    """Return the module at a path of a blueprint; tensors of torch's layers are on the meta device.

    Constants that it uses are removed from ``tensors``.
    """
    modules: Modules = {}
    for node_path, node in blueprint.items():
        with loading(node_path):
            modules[node_path] = _build(modules, tensors, **node)
    for node_path, node in blueprint.items():
        for name, (owner, owner_name) in node.get("tied", {}).items():
            converted: Any = modules[node_path]
            del converted._parameters[name]
            converted._pyro_bbb_tied[name] = modules[owner], owner_name
    return modules[path]


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
    parts = {key: modules[path] for key, path in inside.items()}
    values = {key: decode(value, tensors) for key, value in arguments.items()}
    prior: Any = parts.pop("prior") if random else None
    saved = _saved_class(kind)
    cls = PyroModule[saved.cls] if pyro else saved.cls
    module = saved.build(cls, values, parts)
    if converted:
        mix_in(module, _Context())
    if random:
        declare(module, prior, **random)  # type: ignore[arg-type]
    return module


# --- check of a blueprint ---


def _difference(root: nn.Module, twin: nn.Module, path: str) -> str | None:
    """Return a difference between a module and its twin built from the blueprint, if any."""
    ours, twins = (dict(x.named_modules(prefix=path)) for x in (root, twin))
    if others := ours.keys() ^ twins.keys():
        return f"{path} was changed after its construction: {sorted(others)}"
    for name, module in ours.items():
        if any(hooks for key, hooks in vars(module).items() if key.endswith("_hooks")):
            return f"{name} has hooks"
        own, built = _visible(module), _visible(twins[name])
        for key in own | built:
            if own.get(key) != built.get(key):
                change = f"{key} is {own.get(key)!r}, not {built.get(key)!r}"
                return f"{name} was changed after its construction: {change}"
    return None


def _visible(module: nn.Module) -> dict[str, Any]:
    """Return everything but the values of tensors on which a module's behaviour depends."""
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
