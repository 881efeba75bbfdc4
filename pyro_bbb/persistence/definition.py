# SPDX-License-Identifier: Apache-2.0
"""Modules as text, by which a checkpoint distinguishes the models that it may belong to.

A class that can be saved counts by the arguments of its constructor, any other one by its public
attributes. Code is not compared: functions count by their names.
"""

from __future__ import annotations

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
from torch import Tensor, nn
from torch.distributions import Distribution, Transform

from pyro_bbb._utils.saving import SAVED_CLASSES
from pyro_bbb.guides import Guide
from pyro_bbb.networks import Converted
from pyro_bbb.persistence._blueprint import FOREIGN, LAYERS
from pyro_bbb.persistence.state import digest

_NUMBERS = Number | str | Enum | torch.dtype | torch.device | None
_PLAIN = _NUMBERS | Distribution | FunctionType
_LONGEST = 200  # characters of an attribute; beyond, its hash


def definition(root: nn.Module, path: str) -> dict[str, str]:
    """Return for each module, by its path, its class and what defines it."""
    return {name: _line(module) for name, module in root.named_modules(prefix=path)}


def _line(module: nn.Module) -> str:
    """Return the name of a module's class, and its arguments or attributes, as text."""
    own, cls = vars(module), module.plain_class if isinstance(module, Converted) else type(module)
    saved = next((x for x in (LAYERS | SAVED_CLASSES).values() if x.cls is cls), None)
    public = {k: x for k, x in own.items() if k[0] != "_" and k != "training" and _is_plain(x)}
    values = module.options if isinstance(module, Guide) else public
    if saved:
        with suppress(AttributeError, KeyError):  # it may have been changed
            values = saved.arguments(module)
    sites = {k: x for k, x in own.get("_pyro_samples", {}).items() if isinstance(x, FOREIGN)}
    library = cls.__module__.split(".")[0] in ("torch", "pyro", "pyro_bbb")
    name = cls.__name__ if library else name_of(cls)
    return _joined(name, {**values, "initial": own.get("_initial"), **sites})


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def in_words(value: Any) -> str:
    """Return a text that is the same in every process."""
    if isinstance(value, np.ndarray):
        value = torch.as_tensor(value)
    if isinstance(value, Tensor):
        if value.numel() == 1 and value.dtype != torch.bfloat16:
            return str(value.numpy(force=True).reshape(())[()])
        return f"{value.dtype} {list(value.shape)} {digest([value])[:16]}"
    if isinstance(value, Mapping):
        return _joined("", {str(key): item for key, item in value.items()})
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(in_words, value))}]"
    if isinstance(value, partial):
        return f"{name_of(value.func)}{in_words(value.args)}{in_words(value.keywords)}"
    if isinstance(value, Distribution | Transform):
        parameters: dict[str, Any] = {}
        with suppress(NotImplementedError):  # it may consist of others
            names = getattr(value, "arg_constraints", ())
            parameters = {key: getattr(value, key, None) for key in names}
        public = {key: x for key, x in vars(value).items() if key[0] != "_"}
        return _joined(type(value).__name__, parameters or public)
    return repr(value) if isinstance(value, _NUMBERS) else name_of(value)


def name_of(function: Any) -> str:
    """Return the full name of a function or a class, or of the class of another object."""
    definition = function if hasattr(function, "__qualname__") else type(function)
    return f"{definition.__module__}.{definition.__qualname__}"


def _joined(name: str, values: Mapping[str, Any]) -> str:
    texts = {key: in_words(value) for key, value in values.items() if value is not None}
    for key, text in texts.items():
        if len(text) > _LONGEST:
            texts[key] = f"{text[:_LONGEST]}... {sha256(text.encode()).hexdigest()[:16]}"
    return f"{name}({', '.join(f'{key}={text}' for key, text in texts.items())})"
