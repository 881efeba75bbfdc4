# SPDX-License-Identifier: Apache-2.0
"""Regret of bandit runs: records, merging, tables and figures."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from _helpers.repeats import over
from _helpers.run import Picture, Run, Table

Found: TypeAlias = dict[str, tuple[Tensor, Tensor]]
"""Regret and realised regret of every interaction, each ``[interactions, seeds]``, by agent."""
WHAT = ("regret", "realised")


@dataclass(frozen=True)
class Outcome:
    """Regret by agent, and the settings of its run."""

    recipe: dict[str, Any]
    device: str
    seeds: list[int]
    found: Found
    seconds: float = 0.0
    """Run time of merged runs."""

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
    """Merge the results in the folders of several runs.

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
    """Read the results of one run."""
    record = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    with np.load(folder / "regret.npz", allow_pickle=False) as arrays:
        tables = {key: torch.from_numpy(arrays[key]).double() for key in arrays}
    names = dict.fromkeys(key.rpartition(", ")[0] for key in tables)
    found: Any = {name: tuple(tables[f"{name}, {what}"] for what in WHAT) for name in names}
    seeds = [int(seed) for seed in record["seeds"]]
    return Outcome(record["recipe"], record["device"], seeds, found, record["seconds"])


BBB = "Bayes by Backprop"
GREEDY = {"greedy": 0.0, "1 % greedy": 0.01, "5 % greedy": 0.05}
AGENTS = dict(zip(("bbb", "greedy", "greedy1", "greedy5"), (BBB, *GREEDY), strict=True))
MARKS = (1_000, 5_000, 20_000, 50_000)


def score(regret: Tensor, realised: Tensor) -> dict[str, float]:
    """One agent's figures, from its regret in each interaction."""
    total, last = regret.double().cumsum(0), regret[-max(1, len(regret) // 10) :]
    at = {f"regret at {n:,}": float(total[n - 1]) for n in MARKS if n <= len(total)}
    return at | {
        "regret": float(total[-1]),
        "realised regret": float(realised.double().sum()),
        "regret per interaction at the end": float(last.double().mean()),
        "poisonous eaten": int((regret == 15).sum()),
        "edible passed": int((regret == 5).sum()),
    }


def summarise(outcome: Outcome) -> dict[str, Any]:
    """Figures by seed, and over the seeds their mean, sd, median, least and largest."""
    records = {
        str(seed): {
            name: score(regret[:, column], realised[:, column])
            for name, (regret, realised) in outcome.found.items()
        }
        for column, seed in enumerate(outcome.seeds)
    }
    kinds = {"mean": statistics.fmean, "median": statistics.median, "min": min, "max": max}
    if len(records) > 1:
        kinds["sd"] = statistics.stdev
    over_seeds = {name: over(kind, list(records.values())) for name, kind in kinds.items()}
    return {"seeds": records} | over_seeds


def regret_table(summary: dict[str, Any]) -> Table:
    """One row per agent: cumulative regret on the way, and what became of the mushrooms."""
    first = next(iter(summary["median"].values()))
    marks = [name for name in first if name.startswith("regret at")]
    rows = []
    for name, median in summary["median"].items():
        least, most = (summary[kind][name]["regret"] for kind in ("min", "max"))
        rows.append(
            (
                name,
                *(f"{median[mark]:,.0f}" for mark in marks),
                f"{median['regret']:,.0f} ({least:,.0f} to {most:,.0f})",
                f"{median['regret per interaction at the end']:.3f}",
                f"{median['poisonous eaten']:,.0f}",
                f"{median['edible passed']:,.0f}",
            )
        )
    end = ("at the end (range)", "per interaction in the last tenth")
    return Table(("agent", *marks, *end, "poisonous eaten", "edible passed"), rows)


def draw_regret(run: Run, found: Found) -> Picture:
    """Cumulative regret, as figure 6 of the paper has it."""
    lines = {}
    for name, (regret, _) in found.items():
        total = regret.double().cumsum(0).clamp(min=1)  # a logarithm needs something to show
        at = np.unique(np.geomspace(10, len(total), 400).astype(int)) - 1
        middle, low, high = total.median(1).values, total.min(1).values, total.max(1).values
        lines[name] = at + 1, middle[at], low[at], high[at]
    caption = "Median and range over the seeds; regret is of expected rewards."
    axes = {"xlabel": "interactions", "ylabel": "cumulative regret"}
    return run.curves("regret", caption, {"": lines}, xscale="log", yscale="log", **axes)
