# SPDX-License-Identifier: Apache-2.0
"""Modules as text, by which a checkpoint distinguishes the models that it may belong to.

Unlike a blueprint (``_blueprint.py``) it exists for every class. Code is not compared: functions
count by their names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from hashlib import sha256
from numbers import Number
from types import FunctionType
from typing import Any

import numpy as np
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.distributions import Distribution, Transform

from pyro_bbb.guides import Guide
from pyro_bbb.likelihoods import Likelihood
from pyro_bbb.networks import Converted
from pyro_bbb.persistence._blueprint import FOREIGN
from pyro_bbb.persistence.state import digest
from pyro_bbb.priors import Prior
from pyro_bbb.priors.declaration import declared_shapes

_PLAIN = Number | str | Enum | torch.dtype | torch.device
_CONTAINERS = (nn.Module, PyroModule)  # without attributes
_LIBRARIES = ("torch", "pyro", "pyro_bbb", "builtins")
_INTERNAL = vars(nn.Module()).keys()
_METHODS = (FunctionType, classmethod, property)
_LONGEST = 200  # characters of an attribute; beyond, its hash


def definition(root: nn.Module, path: str) -> dict[str, str]:
    """Return for each module, by its path, its class and the attributes that define it."""
    modules = {x: name for name, x in root.named_modules(prefix=path) if type(x) not in _CONTAINERS}
    if isinstance(root, AutoGuide):  # its parts follow from its options
        modules = {
            x: name
            for x, name in modules.items()
            if isinstance(x, AutoGuide) or not _is_of_library(type(x))
        }
    return {name: _line(module) for module, name in modules.items()}


def in_words(value: Any) -> str | None:
    """Return a text that is the same in every process; None for a value that has none."""
    if isinstance(value, np.ndarray):
        value = torch.as_tensor(value)
    if isinstance(value, nn.Parameter):
        return None
    if isinstance(value, Tensor):
        if value.numel() == 1 and value.dtype != torch.bfloat16:
            return str(value.numpy(force=True).reshape(())[()])
        return f"{value.dtype} {list(value.shape)} {digest([value])[:16]}"
    if isinstance(value, _PLAIN):
        return repr(value) if isinstance(value, str) else str(value)
    if isinstance(value, Mapping):
        return _joined("", {str(key): item for key, item in value.items()})
    if isinstance(value, tuple | list | set | frozenset):
        texts = [text for item in value if (text := in_words(item)) is not None]
        return f"[{', '.join(sorted(texts) if isinstance(value, set | frozenset) else texts)}]"
    if isinstance(value, partial):
        return f"{name_of(value.func)}{in_words(value.args)}{in_words(value.keywords)}"
    if isinstance(value, Distribution):
        with suppress(NotImplementedError):  # it may consist of other distributions
            values = {key: getattr(value, key, None) for key in value.arg_constraints}
            return _joined(type(value).__name__, values or _chosen(vars(value)))
        return _joined(type(value).__name__, _chosen(vars(value)))
    is_record = isinstance(value, Transform) or dataclasses.is_dataclass(value)
    if is_record and not isinstance(value, nn.Module | type):
        return _joined(name_of(value), _chosen(vars(value)))
    return name_of(value) if callable(value) else None


def name_of(function: Any) -> str:
    """Return the full name of a function or a class, or of the class of another object."""
    definition = function if hasattr(function, "__qualname__") else type(function)
    return f"{definition.__module__}.{definition.__qualname__}"


def _line(module: nn.Module) -> str:
    """Return the name of a module's class, and its attributes, as text."""
    own, declared = vars(module), declared_shapes(module)
    if isinstance(module, Guide):
        initialise: Any = module.initialise
        if isinstance(initialise, partial):  # tensors, which may be random, count by name
            numbers = [x for x in initialise.args if isinstance(x, Number)]
            initialise = numbers or initialise.func
        name, values = type(module).__name__, {**module.options, "init_loc": initialise}
    else:
        cls = module.plain_class if isinstance(module, Converted) else type(module)
        name = cls.__name__ if _is_of_library(cls) else name_of(cls)
        values = _attributes(module)
    sites = {k: x for k, x in own.get("_pyro_samples", {}).items() if isinstance(x, FOREIGN)}
    # learned quantities are trained from their initial values
    further = {"initial": own.get("_initial"), "random": list(declared) or None}
    return _joined(name, {**values, **further, **sites})


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return what a module and its class have besides parameters and submodules."""
    values: dict[str, Any] = {}
    for cls in reversed(type(module).__mro__):
        if not _is_of_library(cls):
            values.update({k: x for k, x in vars(cls).items() if not isinstance(x, _METHODS)})
    if isinstance(module, Prior | Likelihood):
        values.update(module.named_buffers(recurse=False))
    values.update({key: x for key, x in vars(module).items() if key not in _INTERNAL})
    return _chosen({key: x for key, x in values.items() if not _is_record(x)})


def _is_record(value: Any) -> bool:
    """Return whether a value is a container that is empty or holds tensors, as activations."""
    if not isinstance(value, Mapping | list | tuple | set):
        return False
    items = value.values() if isinstance(value, Mapping) else value
    return not value or any(isinstance(item, Tensor) or _is_record(item) for item in items)


def _chosen(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return public attributes, and plain private ones; others may be caches."""
    return {
        key: x
        for key, x in values.items()
        if key[0] != "_"
        or (isinstance(x, _PLAIN | Distribution) and not key.startswith(("__", "_pyro", "_cache")))
    }


def _is_of_library(cls: type) -> bool:
    return cls.__module__.split(".")[0] in _LIBRARIES


def _joined(name: str, values: Mapping[str, Any]) -> str:
    words = []
    for key, text in ((key, in_words(value)) for key, value in values.items()):
        if text and len(text) > _LONGEST:
            text = f"{text[:_LONGEST]}... {sha256(text.encode()).hexdigest()[:16]}"
        words += [f"{key}={text}"] if text else []
    return f"{name}({', '.join(words)})"
