# SPDX-License-Identifier: Apache-2.0
"""Folder with tensors and their JSON description: replaced atomically, verified when read.

``spec.json`` names the file of tensors by its hash and is replaced last: a reader, also after a
crash, finds the old pair or the new one. Models, checkpoints and chains are saved in this form.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

from safetensors import SafetensorError
from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from torch import Tensor

from pyro_bbb._utils.files import (
    HASH,
    LoadError,
    loading,
    read_file,
    require_form,
    seal,
    unseal,
    write_file,
)

Json: TypeAlias = Any
FORMAT, VERSION = "pyro_bbb", 2  # 1 had no deflated tensors
READERS = {  # of each kind of saved folder
    "model": "bbb.load",
    "wide network": "BayesianRegressor.load",
    "detector": "Detector.load",
    "fit": "fit(checkpoint=...)",
    "sample": "sample(checkpoint=...)",
    "run_sgmcmc": "run_sgmcmc(checkpoint=...)",
}
_SPEC = "spec.json"
_MOST = 8  # differences that an error lists
_TENSORS = r"tensors-[0-9a-f]{16}\.safetensors(\.zlib)?"
_LEFT_BEHIND = re.compile(rf"{_TENSORS}|\.({_TENSORS}|spec\.json)\.[0-9a-f]{{8}}(\.\w+)?")


@dataclass(frozen=True)
class _Identity:
    """Hash and sizes of the file of tensors, as its description states them."""

    sha256: str
    bytes: int
    inflated: int = 0  # bytes of the content of a deflated file


def write(
    folder: Path,
    kind: str,
    spec: Mapping[str, Json],
    tensors: Mapping[str, Tensor],
    *,
    deflated: bool = False,
) -> None:
    """Write or replace a folder of one of the kinds in `READERS`, with contiguous CPU tensors."""
    data = serialise(dict(tensors))
    identity: dict[str, Json] = {"inflated": len(data)} if deflated else {}
    data = zlib.compress(data, level=9) if deflated else data
    identity |= {"sha256": sha256(data).hexdigest(), "bytes": len(data)}
    content = {"tensors": identity, "kind": kind, **spec}
    text = seal(content, FORMAT, VERSION if deflated else 1)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, wait=True):
        before, now = _present_tensors(folder), _tensors_name(identity)
        write_file(folder / now, data)
        write_file(folder / _SPEC, text)
        if before not in (None, now):
            (folder / str(before)).unlink(missing_ok=True)


def kind_of(folder: Path) -> str:
    """Return the kind of a saved folder."""
    return str(_read_spec(folder)[1].get("kind", "model"))


def read(folder: Path, kind: str) -> tuple[dict[str, Json], dict[str, Tensor]]:
    """Return description and tensors of a folder; LoadError if damaged or of another kind."""
    while True:
        text, spec = _read_spec(folder)
        if (saved := str(spec.pop("kind", "model"))) != kind:
            reader = READERS.get(saved, "no function of this version")
            raise LoadError(f"{folder} holds a {saved}, which {reader} reads, not a {kind}")
        file = folder / _tensors_name(spec["tensors"])
        try:
            data = read_file(file, spec["tensors"]["bytes"])
        except FileNotFoundError as error:
            if read_file(folder / _SPEC) != text:
                continue  # another process has just replaced both
            raise LoadError(f"{file} is missing, which {_SPEC} describes") from error
        identity = spec.pop("tensors")
        if sha256(data).hexdigest() != identity["sha256"]:
            raise LoadError(f"{file} is altered: it does not have the sha256 that {_SPEC} states")
        try:
            if size := identity.get("inflated"):
                data = zlib.decompressobj().decompress(data, size)
            return spec, parse(data)
        except (SafetensorError, zlib.error, ValueError, OverflowError) as error:
            raise LoadError(f"{file} holds no tensors: {error}") from error


def tidy(folder: Path) -> None:
    """Remove the files of processes that were killed while writing, unless one is writing now."""
    with _locked(folder, wait=False) as alone:
        present = _present_tensors(folder)
        for path in folder.iterdir() if alone else ():
            if _LEFT_BEHIND.fullmatch(path.name) and path.name != present:
                path.unlink(missing_ok=True)


def differences(saved: Mapping[str, Json], now: Mapping[str, Json]) -> list[str]:
    """Return the entries in which two descriptions differ, in words."""
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    return [f"{name}: {saved.get(name)} there, {now.get(name)} here" for name in names]


def require_run(folder: Path, saved: Json, run: Mapping[str, Json]) -> None:
    """Raise unless a checkpoint was written in a run of this configuration."""
    require_form(saved, dict[str, Any], f"run of {folder}")
    if differing := differences(saved, run):
        remark = f"; and {len(differing) - _MOST} more" if len(differing) > _MOST else ""
        raise ValueError(
            f"checkpoint {folder} was written by a different configuration: "
            f"{'; '.join(differing[:_MOST])}{remark}. Give the same arguments, or another folder"
        )


def _read_spec(folder: Path) -> tuple[bytes, dict[str, Json]]:
    """Return the text of a description, and its content."""
    path = folder / _SPEC
    spec = unseal(text := read_file(path), path, FORMAT, VERSION)
    with loading(path):
        require_form(spec.get("tensors"), _Identity, "tensors")
    if not HASH.fullmatch(spec["tensors"]["sha256"]):
        raise LoadError(f"{path} must give the file of tensors a sha256")
    return text, spec


def _present_tensors(folder: Path) -> str | None:
    """Return the name of the file of tensors in a folder's present description."""
    try:
        return _tensors_name(_read_spec(folder)[1]["tensors"])
    except (FileNotFoundError, LoadError):
        return None


def _tensors_name(identity: dict[str, Json]) -> str:
    suffix = ".zlib" if "inflated" in identity else ""
    return f"tensors-{identity['sha256'][:16]}.safetensors{suffix}"


@contextmanager
def _locked(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Lock a folder against other writers, and yield whether the system could lock it."""
    if os.name != "posix":
        yield False
        return
    import fcntl

    descriptor, alone = os.open(folder, os.O_RDONLY), False
    try:
        with suppress(OSError):  # another process has the lock, or the drive has none
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            alone = True
        yield alone
    finally:
        if alone:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked process may have the descriptor too
        os.close(descriptor)
