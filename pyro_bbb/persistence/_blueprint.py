# SPDX-License-Identifier: Apache-2.0
"""Networks and likelihoods as plain data (`describe`), and built from such data (`build`).

A blueprint has a node for each module by its path, submodules first: the name of its class, the
constructor's arguments, and the paths of its submodules. A shared module has one node. A name
leads only to a class that `saveable` registered, or to one of torch's layers in `LAYERS`.
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any, TypeAlias, get_type_hints

from pyro.nn import PyroModule
from pyro.nn.module import _Context
from torch import Tensor, nn
from torch.distributions import Distribution

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
from pyro_bbb.priors.declaration import declare, declared_shapes

Blueprint: TypeAlias = dict[str, dict[str, Any]]
FOREIGN = Distribution | FunctionType  # of a `PyroSample` that no prior of this library declared

# --- torch's layers ---

_CONTAINERS = ["Sequential", "ModuleList", "ModuleDict"]
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
_RECURRENT = {"RNN": ["nonlinearity"], "GRU": [], "LSTM": ["proj_size"]}  # their own arguments
_OF_RECURRENT = "input_size hidden_size num_layers bias batch_first dropout bidirectional".split()
_LEFT_OUT = "self args kwargs device dtype min_value max_value".split()  # the last: deprecated


def _layer(name: str) -> SavedClass:
    """Return how a layer of torch is read and built, by its constructor's signature."""
    cls: type[nn.Module] = getattr(nn, name)
    parameters = {
        key: parameter
        for key, parameter in inspect.signature(cls.__init__).parameters.items()
        if key[0] != "_" and key not in _LEFT_OUT
    }
    names = [] if name in _CONTAINERS else list(parameters)
    required = [key for key in names if parameters[key].default is inspect.Parameter.empty]
    if name in _RECURRENT:  # whose signature is (*args, **kwargs)
        names, required = _OF_RECURRENT + _RECURRENT[name], _OF_RECURRENT[:2]

    def build(kind: Any, arguments: Arguments, modules: Modules) -> nn.Module:
        """Return a layer, of torch's class or Pyro's."""
        if not set(required) <= arguments.keys() <= set(names):
            raise ValueError(f"{name} must have the arguments {names}, got {list(arguments)}")
        hints = get_type_hints(cls.__init__)
        for key, value in arguments.items():  # torch's constructors do not check them
            require_form(value, hints.get(key, Any), key)
        layer: nn.Module = kind([]) if issubclass(kind, nn.ModuleList) else kind(**arguments)
        layer._modules.update(modules)
        return layer

    return SavedClass(cls, attributes(*names), children, build)


LAYERS = {
    name: _layer(name)
    for name in [
        *_CONTAINERS,
        *_RECURRENT,
        *_OTHERS.split(),
        *(f"{layer}{dimensions}d" for layer in _BY_DIMENSION.split() for dimensions in (1, 2, 3)),
    ]
}


# --- to a blueprint ---


def describe(root: nn.Module, path: str, tensors: dict[str, Tensor]) -> Blueprint:
    """Return the blueprint of a network or a likelihood, and add its constants to ``tensors``."""
    blueprint: Blueprint = {}
    paths: dict[nn.Module, str] = {}
    constants: dict[str, Tensor] = {}

    def add(module: nn.Module, path: str) -> str:
        """Add a module and its submodules; return the first path of the module."""
        if module in paths:
            return paths[module]
        paths[module] = path
        name, saved, form = _saved_class(module, path)
        try:
            arguments, inside = saved.arguments(module), saved.modules(module)
        except (KeyError, AttributeError) as error:
            lacks = f"lacks an argument of its constructor: {error}"
            raise CannotDescribe(f"{path}, a {name}, {lacks}") from error
        own, random = vars(module), declared_shapes(module)
        if any(hooks for key, hooks in own.items() if key.endswith("_hooks")):
            raise CannotDescribe(f"{path} has hooks")
        foreign = [x for x in own.get("_pyro_samples", {}).values() if isinstance(x, FOREIGN)]
        if "forward" in own or foreign:
            raise CannotDescribe(f"{path} has its own forward, or random weights without a Prior")
        node: dict[str, Any] = {"kind": name, **form}
        node["arguments"] = {
            key: encode(value, f"constants.{path}.{key}", constants)
            for key, value in arguments.items()
        }
        node["inside"] = {key: add(child, f"{path}.{key}") for key, child in inside.items()}
        if name in LAYERS and random:
            node["random"] = random
        if tied := own.get("_pyro_bbb_tied"):
            node["tied"] = {key: [paths[owner], theirs] for key, (owner, theirs) in tied.items()}
        blueprint[path] = node
        return path

    add(root, path)
    tensors.update(constants)
    return blueprint


def _saved_class(module: nn.Module, path: str) -> tuple[str, SavedClass, dict[str, bool]]:
    """Return a module's registered class with its name, and how Pyro was mixed in."""
    converted = isinstance(module, Converted)
    cls: Any = type(module).plain_class if converted else type(module)  # type: ignore[attr-defined]
    form = {"converted": True} if converted else {}
    for name, saved in (LAYERS | SAVED_CLASSES).items():
        if saved.cls is cls:
            return name, saved, form
        if name in LAYERS and saved.cls in cls.__bases__ and PyroModule[saved.cls] is cls:
            return name, saved, {"pyro": True, **form}
    raise CannotDescribe(f"{path} is a {cls.__module__}.{cls.__qualname__}")


# --- from a blueprint ---


def build(blueprint: Blueprint, path: str, tensors: dict[str, Tensor]) -> nn.Module:
    """Return the module at a path of a blueprint; constants are removed from ``tensors``."""
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
    """Return the module of one node, from the modules of the nodes before it."""
    children = {key: modules[path] for key, path in inside.items()}
    values = {key: decode(value, tensors) for key, value in arguments.items()}
    prior: Any = children.pop("prior") if random else None
    saved = (LAYERS | SAVED_CLASSES)[kind]
    module = saved.build(PyroModule[saved.cls] if pyro else saved.cls, values, children)
    if converted:
        mix_in(module, _Context())
    if random:
        declare(module, prior, **random)  # type: ignore[arg-type]
    return module
