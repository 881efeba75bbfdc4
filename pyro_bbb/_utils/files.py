# SPDX-License-Identifier: Apache-2.0
"""Files that appear complete or not at all."""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Path of a temporary file in the same folder, renamed at the end unless an error is raised."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}{path.suffix}")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: str | os.PathLike[str], kind: str, content: dict[str, Any]) -> None:
    """Write a small record of a kind, atomically."""
    text = json.dumps({"format": kind, "version": 1, **content}, allow_nan=False, indent=1)
    with replacing(as_path(path)) as part:
        part.write_text(text + "\n", encoding="utf-8")


def read_json(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """Read what `write_json` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it does not hold a record of that kind and version.
        TypeError: the path is of another type.
    """
    try:
        content = json.loads(as_path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"path must lead to JSON of {kind}, but {path} is none: {error}"
        ) from error
    found = content if isinstance(content, dict) else {}
    if found.get("format") != kind:
        raise ValueError(f"path must lead to a file of format {kind!r}, but {path} has another")
    if found.get("version") != 1:
        raise ValueError(f"{path} must have version 1, got {found.get('version')!r}")
    return found


@contextmanager
def reading_json(path: str | os.PathLike[str], kind: str) -> Iterator[dict[str, Any]]:
    """Gives what `read_json` reads; where its content is no valid one, a ValueError says so."""
    content = read_json(path, kind)
    try:
        yield content
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"path leads to {path}, which is altered: {error!r}") from error


def as_path(path: Any) -> Path:
    """The path, if it is one of a file."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be a path, got {path!r}")
    if not Path(path).name:
        raise ValueError(f"path must name a file, got {path!r}")
    return Path(path)
