# SPDX-License-Identifier: Apache-2.0
"""Folders of data sets, downloads into them, and checksums of their files.

A file appears in the cache complete and verified, or not at all.
"""

import hashlib
import os
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from pyro_bbb._utils.files import replacing

_SECONDS = 30  # without an answer


def data_folder(root: str | os.PathLike[str] | None) -> tuple[Path, bool]:
    """Return the folder of all sets, and whether it is the cache, which downloads may fill."""
    folder = root if root is not None else os.environ.get("PYRO_BBB_DATA") or None
    try:
        return (cache_folder() if folder is None else Path(folder).expanduser()), folder is None
    except TypeError as error:
        raise TypeError(f"root must be a str or an os.PathLike of one, got {root!r}") from error


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/pyro_bbb``, or ``~/.cache/pyro_bbb``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyro_bbb"


def read(
    path: Path,
    base: Path,
    check: Callable[[bytes], Any],
    download: Callable[[], bytes] | None = None,
    others: str = "",
) -> Any:
    """Return what ``check`` makes of a file's content; it raises RuntimeError for a damaged file.

    ``download`` replaces a file of the cache that is absent or damaged, ``base`` is the folder of
    all sets, and ``others`` ends the message that the file is absent.
    """
    remedy = (
        "pass root=ROOT (to an experiment, --data-root ROOT) or set PYRO_BBB_DATA=ROOT to a folder "
        f"that holds ROOT/{path.relative_to(base).as_posix()}"
    )
    if path.is_file():
        try:
            return check(path.read_bytes())
        except RuntimeError:
            if download is None:
                raise
    elif download is None:
        raise FileNotFoundError(f"no {path}; {remedy}{others}")
    try:
        checked = check(content := download())
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(content)
    except (OSError, HTTPException, ValueError) as error:
        where = f"{path.name} to {path.parent}"
        raise RuntimeError(f"could not download {where}: without a network, {remedy}") from error
    return checked


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


def verified(path: Path, algorithm: str, expected: str, content: bytes) -> bytes:
    """Return a file's content, if it has a checksum (hexadecimal, by an algorithm of `hashlib`)."""
    actual = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
    if actual != expected:
        raise RuntimeError(
            f"{path} is damaged: its {algorithm.upper()} is {actual}, expected {expected}; replace "
            "it by the original file"
        )
    return content
