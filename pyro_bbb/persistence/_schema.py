# SPDX-License-Identifier: Apache-2.0
"""Checks of a saved model's description, and of metadata to be saved."""

from __future__ import annotations

import math
from typing import Any

from pyro_bbb._utils.files import LoadError

FORM: dict[str, Any] = {  # types of a description's fields
    "versions": dict[str, str],
    "num_data": int,
    **dict.fromkeys(("network", "likelihood", "guide"), dict[str, Any]),
    **dict.fromkeys(("sites", "latents"), dict[str, list[int]]),
    **dict.fromkeys(("evaluating", "frozen"), list[str]),
    "aliases": dict[str, str],
    "metadata": dict[str, Any],
}


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
