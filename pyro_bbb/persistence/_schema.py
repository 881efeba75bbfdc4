# SPDX-License-Identifier: Apache-2.0
"""Checks of a saved model's description, and of metadata to be saved."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

from pyro_bbb.persistence.archive import Json, LoadError

_TYPES: dict[str, type] = {
    "versions": dict,
    "num_data": int,
    **dict.fromkeys(("network", "likelihood", "guide", "sites", "latents"), dict),
    **dict.fromkeys(("evaluating", "frozen"), list),
    "aliases": dict,
    "metadata": dict,
}


@contextmanager
def about(path: str | PathLike[str], versions: Json) -> Iterator[None]:
    """Turn every error inside into a `LoadError` that names the save."""
    try:
        yield
    except LoadError as error:
        raise LoadError(f"{path}: {error}") from error
    except Exception as error:  # the description is altered, or of other code
        raise LoadError(
            f"{path}, saved by {versions}, does not build: {type(error).__name__}: {error}"
        ) from error


def require_types(spec: dict[str, Json]) -> None:
    """Raise LoadError if keys of a description are missing, unexpected or of another type."""
    if others := spec.keys() ^ _TYPES.keys():
        raise LoadError(f"the description has missing or unexpected keys: {sorted(others)}")
    for name, kind in _TYPES.items():
        if type(spec[name]) is not kind:
            raise LoadError(f"{name} must be {kind.__name__}, got {type(spec[name]).__name__}")


def require_same(kind: str, saved: dict[str, list[int]], found: dict[str, list[int]]) -> None:
    """Raise LoadError if shapes by name differ from the saved ones."""
    for name in saved | found:
        if name not in saved:
            raise LoadError(f"{kind} {name} is not saved, and the network expects it")
        if name not in found:
            raise LoadError(f"{kind} {name} is saved, and the network has none, only {list(found)}")
        if saved[name] != found[name]:
            raise LoadError(
                f"{kind} {name} has shape {saved[name]}, the network expects {found[name]}"
            )


def require_json(where: str, value: Any) -> None:
    """Raise an error that names the first value without a form in JSON."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} must have strings as keys, got {key!r}")
            require_json(f"{where}[{key!r}]", item)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            require_json(f"{where}[{i}]", item)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} must be finite, got {value}")
    elif not (value is None or isinstance(value, (bool, int, str))):
        raise TypeError(f"{where} must be of JSON's types, got {type(value).__name__}")
