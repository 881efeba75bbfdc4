"""What has to hold of a saved model's description, and of what is to go into one."""

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
    """Says of which save an error is; whatever does not fit the format is a `LoadError`."""
    try:
        yield
    except LoadError as error:
        raise LoadError(f"{path}: {error}") from error
    except Exception as error:  # of a description that `save` has not written, or with other code
        raise LoadError(
            f"{path}, saved by {versions}, does not build: {type(error).__name__}: {error}"
        ) from error


def require_types(spec: dict[str, Json]) -> None:
    """Refuses a description that lacks a key, has another, or one of another type."""
    if others := spec.keys() ^ _TYPES.keys():
        raise LoadError(f"the description must have the keys {list(_TYPES)}, not so {others}")
    for name, kind in _TYPES.items():
        if type(spec[name]) is not kind:
            raise LoadError(f"{name} must be {kind.__name__}, got {type(spec[name]).__name__}")


def require_same(what: str, saved: dict[str, list[int]], found: dict[str, list[int]]) -> None:
    """Refuses shapes by name that are not those saved."""
    for name in saved | found:
        if name not in saved:
            raise LoadError(f"{what} {name} is not saved, and the network expects it")
        if name not in found:
            raise LoadError(f"{what} {name} is saved, and the network has none, only {list(found)}")
        if saved[name] != found[name]:
            raise LoadError(
                f"{what} {name} has shape {saved[name]}, the network expects {found[name]}"
            )


def require_json(where: str, value: Any) -> None:
    """Refuses what has no form in JSON, and says where it is."""
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
