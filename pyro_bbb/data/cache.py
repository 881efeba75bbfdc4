# SPDX-License-Identifier: Apache-2.0
"""Folders of data sets, downloads into them, and checksums of their files.

A set is under a root: the argument ``root`` of its reader, else the folder that the environment
variable ``PYRO_BBB_DATA`` names, both of which may be read-only; else a cache folder of the user,
which downloads fill. A file appears there complete and verified, or not at all.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

from pyro_bbb._utils.files import replacing

_SECONDS = 30  # without an answer


def data_folder(root: str | os.PathLike[str] | None) -> tuple[Path, bool]:
    """Return the folder of all sets, and whether it is the cache, which downloads may fill."""
    given = root if root is not None else os.environ.get("PYRO_BBB_DATA") or None
    try:
        return (cache_folder() if given is None else Path(given).expanduser()), given is None
    except TypeError as error:
        raise TypeError(f"root must be a str or an os.PathLike of one, got {root!r}") from error


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/pyro_bbb``, or ``~/.cache/pyro_bbb``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyro_bbb"


def fetch(*urls: str) -> bytes:
    """Return the content of the first address that answers."""
    failure: Exception = OSError("there is no address to download from")
    for url in urls:
        try:
            with urlopen(url, timeout=_SECONDS) as response:
                content: bytes = response.read()
                return content
        except (OSError, HTTPException) as error:
            failure = error
    raise failure


def fill_cache(
    path: Path, base: Path, download: Callable[[], bytes], check: Callable[[bytes], object]
) -> None:
    """Write a downloaded file to the cache, after a check of its content."""
    with _explained(path, base):
        content = download()
    check(content)
    with _explained(path, base):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_bytes(content)


@contextmanager
def _explained(path: Path, base: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, HTTPException, ValueError) as error:
        where = f"{path.name} to {path.parent}"
        remedy = f"without a network, {_remedy(path, base)}"
        raise RuntimeError(f"could not download {where}: {remedy}") from error


def is_intact(path: Path, algorithm: str, expected: str) -> bool:
    """Return whether a file exists and has a checksum."""
    return path.is_file() and _checksum(path.read_bytes(), algorithm) == expected


def verified(path: Path, content: bytes, algorithm: str, expected: str) -> bytes:
    """Return a file's content, if it has a checksum (hexadecimal, by an algorithm of `hashlib`)."""
    if (actual := _checksum(content, algorithm)) != expected:
        raise RuntimeError(
            f"{path} is damaged: its {algorithm.upper()} is {actual}, expected {expected}; replace "
            "it by the original file"
        )
    return content


def require_file(path: Path, base: Path, others: str = "") -> None:
    """Raise FileNotFoundError where a file does not exist."""
    if not path.is_file():
        raise FileNotFoundError(f"no {path}; {_remedy(path, base)}{others}")


def _remedy(path: Path, base: Path) -> str:
    return (
        "pass root=ROOT (to an experiment, --data-root ROOT) or set PYRO_BBB_DATA=ROOT to a folder "
        f"that holds ROOT/{path.relative_to(base).as_posix()}"
    )


def _checksum(content: bytes, algorithm: str) -> str:
    return hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
