# SPDX-License-Identifier: Apache-2.0
"""Folders of data sets, and file content verified by checksums.

A set is under a root: the argument ``root`` of its reader, else what the environment variable
``PYRO_BBB_DATA`` names, both of which may be read-only; else a cache folder of the user.
"""

import hashlib
import os
from pathlib import Path


def given_root(root: str | os.PathLike[str] | None) -> Path | None:
    """The folder that the user named, by ``root`` or by ``PYRO_BBB_DATA``; None if neither."""
    given = root if root is not None else os.environ.get("PYRO_BBB_DATA") or None
    try:
        return None if given is None else Path(given).expanduser()
    except TypeError as error:
        raise TypeError(f"root must be a str or an os.PathLike of one, got {root!r}") from error


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/pyro_bbb``, or ``~/.cache/pyro_bbb``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyro_bbb"


def is_intact(path: Path, algorithm: str, expected: str) -> bool:
    """Tell whether a file exists and has this checksum."""
    return path.is_file() and _checksum(path.read_bytes(), algorithm) == expected


def read_verified(path: Path, algorithm: str, expected: str) -> bytes:
    """Read a file, and verify its checksum (in hexadecimal digits) by an algorithm of `hashlib`."""
    return verified(path, path.read_bytes(), algorithm, expected)


def verified(path: Path, content: bytes, algorithm: str, expected: str) -> bytes:
    """The content of a file, after a check of its checksum."""
    found = _checksum(content, algorithm)
    if found != expected:
        wanted = f"its {algorithm.upper()} is {found}, expected {expected}"
        raise RuntimeError(f"{path} is damaged: {wanted}; replace it by the original file")
    return content


def _checksum(content: bytes, algorithm: str) -> str:
    return hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
