"""Nested states, as torch's optimisers have them, as JSON beside named tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pyro_bbb._archive import Json


def pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Json:
    """The value's form in JSON; its tensors are added under names that begin with ``name``.

    Raises:
        TypeError: it holds something else than numbers, strings, tensors, lists and dicts of them.
    """
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        pairs = [[_key(name, key), pack(v, f"{name}.{key}", tensors)] for key, v in value.items()]
        return {"dict": pairs}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [pack(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if not (value is None or isinstance(value, bool | int | float | str)):
        raise TypeError(f"{name} must be of numbers and tensors to be kept, got {value!r}")
    return value


def unpack(packed: Json, tensors: Mapping[str, Tensor]) -> Any:
    """What `pack` was given."""
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float(content)
    if kind == "dict":
        return {key: unpack(value, tensors) for key, value in content}
    values = [unpack(value, tensors) for value in content]
    return tuple(values) if kind == "tuple" else values


def _key(name: str, key: Any) -> Json:
    if not isinstance(key, str | int):
        raise TypeError(f"{name} must have strings or integers as keys, got {key!r}")
    return key
