"""What came of offering mushrooms, in one run or in several with some agents and seeds each."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Found: TypeAlias = dict[str, tuple[Tensor, Tensor]]
"""Regret and realised regret of every interaction, each ``[interactions, seeds]``, by agent."""
WHAT = ("regret", "realised")


@dataclass(frozen=True)
class Outcome:
    """What agents were offered, and what they made of it."""

    recipe: dict[str, Any]
    """Hyper-parameters."""
    device: str
    """Where they learned."""
    seeds: list[int]
    found: Found
    seconds: float = 0.0
    """Of the runs before this one, if it puts such together."""

    @property
    def interactions(self) -> int:
        """Mushrooms offered."""
        return len(next(iter(self.found.values()))[0])


def save(folder: Path, found: Found) -> None:
    """Keeps every interaction's regret so far."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        f"{name}, {what}": table.to(torch.int8).numpy()
        for name, both in found.items()
        for what, table in zip(WHAT, both, strict=True)
    }
    np.savez_compressed(folder / "regret.npz", **arrays)


def joined(folders: Sequence[Path]) -> Outcome:
    """What several runs found, as one.

    Args:
        folders: of their results.

    Raises:
        FileNotFoundError: a folder holds no results.
        ValueError: the runs differ in their recipe or length, two have an agent with the same seed,
            or an agent lacks a seed that others have.
    """
    pieces = [_read(folder) for folder in folders]
    first, columns = pieces[0], dict[str, dict[int, list[Tensor]]]()
    for folder, piece in zip(folders, pieces, strict=True):
        if (piece.recipe, piece.interactions) != (first.recipe, first.interactions):
            raise ValueError(f"pieces must have one recipe and length, {folder} has another")
        for name, both in piece.found.items():
            mine = columns.setdefault(name, {})
            if again := sorted(mine.keys() & set(piece.seeds)):
                raise ValueError(f"pieces must not overlap, {folder} has {name} again with {again}")
            mine |= dict(
                zip(piece.seeds, zip(*(x.unbind(1) for x in both), strict=True), strict=True)
            )
    seeds = {name: sorted(mine) for name, mine in columns.items()}
    if len(set(map(tuple, seeds.values()))) > 1:
        raise ValueError(f"pieces must have the same seeds of each agent, got {seeds}")
    (common, *_), device = seeds.values(), ", ".join(dict.fromkeys(p.device for p in pieces))
    found = {
        name: tuple(torch.stack(tables, 1) for tables in zip(*map(mine.get, common), strict=True))
        for name, mine in columns.items()
    }
    return Outcome(first.recipe, device, common, found, sum(piece.seconds for piece in pieces))


def _read(folder: Path) -> Outcome:
    """What one run wrote."""
    record = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    with np.load(folder / "regret.npz", allow_pickle=False) as arrays:
        tables = {key: torch.from_numpy(arrays[key]).double() for key in arrays}
    names = dict.fromkeys(key.rpartition(", ")[0] for key in tables)
    found: Any = {name: tuple(tables[f"{name}, {what}"] for what in WHAT) for name in names}
    seeds = [int(seed) for seed in record["seeds"]]
    return Outcome(record["recipe"], record["device"], seeds, found, record["seconds"])
