# SPDX-License-Identifier: Apache-2.0
"""Registry of the classes that a saved model may name, each taken to plain data and back.

A class is registered where it is defined, by `saveable`. Loading builds these and torch's layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from torch import nn

Arguments: TypeAlias = dict[str, Any]
Modules: TypeAlias = dict[str, nn.Module]
C = TypeVar("C", bound=type[nn.Module])


@dataclass(frozen=True)
class SavedClass:
    """A class; how its arguments and undetermined submodules are read, and an instance is built."""

    cls: type[nn.Module]
    arguments: Callable[[Any], Arguments]
    modules: Callable[[Any], Modules]
    build: Callable[[Any, Arguments, Modules], nn.Module]


SAVED_CLASSES: dict[str, SavedClass] = {}


def attributes(*names: str) -> Callable[[Any], Arguments]:
    """Return a reader of attributes; ``bias``: whether the module has such a parameter."""
    return lambda module: {
        name: _has_bias(module) if name == "bias" else getattr(module, name) for name in names
    }


def children(module: nn.Module) -> Modules:
    """Return a module's submodules by name."""
    return {name: child for name, child in module._modules.items() if child is not None}


def _no_entries(module: nn.Module) -> dict[str, Any]:
    return {}


def _construct(cls: Any, arguments: Arguments, modules: Modules) -> nn.Module:
    instance: nn.Module = cls(**arguments, **modules)
    return instance


def saveable(
    arguments: Callable[[Any], Arguments] = _no_entries,
    *,
    modules: Callable[[Any], Modules] = _no_entries,
    build: Callable[[Any, Arguments, Modules], nn.Module] = _construct,
) -> Callable[[C], C]:
    """Register a class under its own name; the arguments are the fields of `SavedClass`."""

    def register(cls: C) -> C:
        SAVED_CLASSES[cls.__name__] = SavedClass(cls, arguments, modules, build)
        return cls

    return register


def _has_bias(module: nn.Module) -> bool:
    """Return whether a layer has a bias: by its flag, a parameter, a random or a tied one."""
    own = vars(module)
    elsewhere = (*own.get("_pyro_samples", ()), *own.get("_pyro_bbb_tied", ()))
    return bool(own.get("bias", "bias" in elsewhere or module._parameters.get("bias") is not None))
