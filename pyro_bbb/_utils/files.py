# SPDX-License-Identifier: Apache-2.0
"""Files that appear complete or not at all, and descriptions in JSON that are checked when read.

A description contains the SHA-256 of its text, computed with zeros for it.
"""

import dataclasses
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import Size

_ZEROS = "0" * 64
HASH = re.compile("[0-9a-f]{64}")
_LARGEST = 2**26  # bytes of a description


class LoadError(ValueError):
    """The files are damaged, of a newer format, or of another model."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file in the same folder, renamed at the end unless an error is raised."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_file(path: Path, data: bytes) -> None:
    """Write or replace a file atomically, and flush it to the disk."""
    with replacing(path) as temporary, temporary.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if os.name == "posix":  # elsewhere a folder cannot be opened
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_file(path: Path, size: int | None = None) -> bytes:
    """Read a regular file of a known size, or a description of at most 64 MiB; else LoadError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise LoadError(f"{path} must be a regular file, not a folder, a pipe or a device")
    if size is None and status.st_size > _LARGEST:
        raise LoadError(f"{path} has {status.st_size} bytes, more than a description may have")
    if size is not None and status.st_size != size:
        raise LoadError(f"{path} is truncated or altered: it has {status.st_size} bytes of {size}")
    return path.read_bytes()


def seal(content: dict[str, Any], kind: str, version: int) -> bytes:
    """Return the content as JSON that begins with the format, its version and the text's hash."""
    head = {"format": kind, "version": version, "sha256": _ZEROS}
    text = json.dumps({**head, **content}, indent=1, allow_nan=False).encode() + b"\n"
    if len(text) > _LARGEST:
        raise ValueError(f"a description must have at most {_LARGEST} bytes, got {len(text)}")
    return text.replace(_ZEROS.encode(), sha256(text).hexdigest().encode(), 1)


def unseal(text: bytes, path: Path, kind: str, newest: int) -> dict[str, Any]:
    """Return the content that `seal` wrote, up to version ``newest``; LoadError for other text."""
    try:
        content = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} is truncated or altered, and no longer JSON: {error}") from error
    if not isinstance(content, dict) or content.pop("format", None) != kind:
        raise LoadError(f"{path} is of something else: its 'format' must be {kind!r}")
    version = content.pop("version", None)
    if type(version) is not int or version < 1:
        raise LoadError(f"{path} is altered: its 'version' must be a positive integer")
    if version > newest:
        raise LoadError(
            f"{path} has format version {version}, this pyro_bbb reads up to {newest}: use the "
            f"newer pyro_bbb that wrote it, {content.get('versions')}"
        )
    stated = str(content.pop("sha256", None))
    zeroed = text.replace(stated.encode(), _ZEROS.encode(), 1)
    if not HASH.fullmatch(stated) or sha256(zeroed).hexdigest() != stated:
        raise LoadError(f"{path} is altered: it does not have the sha256 that it states")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("duplicate key")
    return content


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not a JSON number")


@contextmanager
def loading(path: str | os.PathLike[str], versions: Any = None) -> Iterator[None]:
    """Turn every error inside into a `LoadError` that names the file."""
    try:
        yield
    except LoadError as error:
        raise LoadError(f"{path}: {error}") from error
    except Exception as error:  # the description is altered, or of other code
        by = "" if versions is None else f", saved by {versions},"
        raise LoadError(f"{path}{by} does not build: {type(error).__name__}: {error}") from error


def require_form(value: Any, hint: Any, where: str = "the description") -> None:
    """Raise LoadError, which names the field, unless a value from JSON has a type.

    ``hint`` is a type as in an annotation, a dataclass, or a dict with the type of each key.
    """
    if misfit := _misfit(value, hint, where):
        raise LoadError(misfit)


def _misfit(value: Any, hint: Any, where: str) -> str | None:
    """Return where and how a value differs from a type; None if it fits."""
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    items: list[tuple[Any, Any, str]] = []
    fits = True
    if dataclasses.is_dataclass(hint) or isinstance(hint, Mapping):
        hints, optional = _fields(hint)
        names = value.keys() if isinstance(value, dict) else set()
        if not isinstance(value, dict) or not hints.keys() - optional <= names <= hints.keys():
            return f"{where} must have the keys {list(hints)}, got {list(names) or value!r:.200}"
        items = [(value[name], hints[name], f"{where}.{name}") for name in names]
    elif origin in (list, tuple, Sequence, Size) and isinstance(value, list | tuple):
        fixed = origin is tuple and bool(arguments) and ... not in arguments
        hints_of_items = arguments if fixed else [(*arguments, Any)[0]] * len(value)
        if len(hints_of_items) != len(value):
            return f"{where} must have {len(hints_of_items)} items, got {value!r:.200}"
        items = [(x, hints_of_items[i], f"{where}[{i}]") for i, x in enumerate(value)]
    elif origin in (dict, Mapping) and isinstance(value, dict):
        items = [(x, (*arguments, Any, Any)[1], f"{where}.{key}") for key, x in value.items()]
    elif origin in (Union, UnionType):
        fits = any(_misfit(value, hinted, "") is None for hinted in arguments)
    elif origin is Literal:
        fits = value in arguments
    elif hint in (float, int, bool, str):
        fits = type(value) in ((int, float) if hint is float else (hint,))
    elif isinstance(origin, type) and origin not in (Any, Callable):
        fits = isinstance(value, origin)
    if not fits:
        words = hint.__name__ if isinstance(hint, type) and not arguments else hint
        return f"{where} must be {words}, got {value!r:.200}"
    return next(filter(None, (_misfit(*item) for item in items)), None)


def _fields(hint: Any) -> tuple[Mapping[str, Any], set[str]]:
    """Return the types of a record's fields, and the names of those with a default."""
    if isinstance(hint, Mapping):
        return hint, set()
    missing = dataclasses.MISSING
    fields = dataclasses.fields(hint)
    return get_type_hints(hint), {
        x.name for x in fields if not x.default is x.default_factory is missing
    }


def as_path(path: Any) -> Path:
    """Return the path, if it names a file."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be a path, got {path!r}")
    if not Path(path).name:
        raise ValueError(f"path must name a file, got {path!r}")
    return Path(path)
