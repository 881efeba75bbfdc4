"""A folder that the first of several processes writes, and reads for all of them.

The others may be on machines that do not have it. What goes wrong there is raised by all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from torch import Tensor

from pyro_bbb._archive import Json, LoadError, read
from pyro_bbb._processes import Processes

Content: TypeAlias = tuple[dict[str, Json], dict[str, Tensor]]
_OF_RANK = "rank{}."
_ERRORS = {"FileNotFoundError": FileNotFoundError, "LoadError": LoadError, "OSError": OSError}


def read_for_all(folder: Path, processes: Processes) -> Content:
    """The description and the tensors, as `read` gives them.

    Raises:
        FileNotFoundError: there is nothing saved at that path.
        LoadError: a file is damaged or missing, or of a newer format.
        OSError: it cannot be read.
    """
    if processes.size == 1:
        return read(folder)
    found: list[Content] = []
    first_does(processes, lambda: found.append(read(folder)))
    spec, tensors = found[0] if found else ({}, {})
    spec = json.loads(processes.told(json.dumps(spec).encode()))
    return spec, parse(processes.told(serialise(tensors) if processes.first else b""))


def first_does(processes: Processes, what: Callable[[], None]) -> None:
    """The first process does it; an error there is one in all."""
    if processes.size == 1:
        what()
        return
    error: Exception | None = None
    if processes.first:
        try:
            what()
        except (OSError, LoadError) as raised:
            error = raised
    text = "" if error is None else f"{_kind(error)}\n{error}"
    if message := processes.told(text.encode()).decode():
        kind, _, words = message.partition("\n")
        raise error or _ERRORS[kind](words)


def of_all(own: Mapping[str, Tensor], processes: Processes) -> dict[str, Tensor]:
    """Every process's tensors: those of the first by their names, others' behind their rank."""
    if processes.size == 1:
        return dict(own)
    named = map(parse, processes.all_told(serialise(dict(own))))
    return {
        f"{_OF_RANK.format(rank) if rank else ''}{name}": x
        for rank, tensors in enumerate(named)
        for name, x in tensors.items()
    }


def of_one(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The tensors of one process among what `of_all` gave, and those of all."""
    prefix = _OF_RANK.format(rank)
    mine = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
    return {**tensors, **mine}


def _kind(error: Exception) -> str:
    return next(name for name, kind in _ERRORS.items() if isinstance(error, kind))
