# SPDX-License-Identifier: Apache-2.0
"""Runs with several seeds, and mean and standard deviation of their figures.

Seeds run one after the other, or wherever `joblib.parallel_config` says: on more cores, or by the
backends "ray" and "dask" on a cluster. Finished ones are cached, and not run again.
"""

import json
import math
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import joblib

from _helpers.run import write_json


def repeat(
    one: Callable[[int], dict[str, Any]], seed: int, repeats: int, folder: Path | None = None
) -> dict[str, Any]:
    """Runs ``one(seed)`` for consecutive seeds; the first in this process, for its pictures.

    Args:
        one: makes figures that JSON can represent, for later seeds possibly in another process.
        seed: the first.
        repeats: how many.
        folder: cache of the figures of all seeds but the first, for runs of one configuration
            in one process.

    Returns:
        ``seeds``: the figures by seed; ``mean`` and, of two or more, ``sd``: of every number, in
        the same nested dicts.
    """
    parallel, launched = joblib.Parallel(), os.environ.get("WORLD_SIZE", "1") != "1"
    if launched and parallel.n_jobs != 1:
        raise ValueError("seeds can be spread by joblib, or each over processes, but not both")
    folder = None if launched else folder  # the processes of torchrun must do the same
    others, cached = range(seed + 1, seed + repeats), partial(_cached, one, folder)
    if parallel.n_jobs == 1:
        records = [one(seed), *map(cached, others)]
    else:  # elsewhere first: what is sent there must not hold what the first leaves here
        found = parallel(joblib.delayed(cached)(other) for other in others)
        records = [one(seed), *found]
    runs = {str(s): record for s, record in zip(range(seed, seed + repeats), records, strict=True)}
    return {"seeds": runs} | over_seeds(records)


def _cached(one: Callable[[int], dict[str, Any]], folder: Path | None, seed: int) -> dict[str, Any]:
    """The figures of a seed, from its file if it has one."""
    if folder is None:
        return one(seed)
    path = folder / f"{seed}.json"
    if not path.exists():
        write_json(path, one(seed))
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return figures


def shown(summary: dict[str, Any], *keys: str, factor: float = 100, digits: int = 2) -> str:
    """A figure of `repeat`'s summary for a table, as ``"97.80 ± 0.11"``: mean and, if known, sd.

    The keys lead to it through the nested dicts; it is multiplied by ``factor``.
    """
    figures = [summary[kind] for kind in ("mean", "sd") if kind in summary]
    for key in keys:
        figures = [figure[key] for figure in figures]
    return " ± ".join(f"{factor * figure:.{digits}f}" for figure in figures)


def over_splits(values: list[float]) -> dict[str, float | None]:
    """Mean and standard error, sd / sqrt(n) with the sd that divides by n - 1."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "standard_error": error}


def over_seeds(records: list[Any]) -> dict[str, Any]:
    """``mean`` and, of two or more, ``sd`` of every number in records of one structure."""
    kinds = {"mean": statistics.fmean} | ({"sd": statistics.stdev} if len(records) > 1 else {})
    return {kind: over(function, records) for kind, function in kinds.items()}


def over(function: Callable[[list[float]], float], records: list[Any]) -> Any:
    """A function of each number's values in records of one structure; other entries are dropped."""
    first = records[0]
    if isinstance(first, dict):
        parts = {key: over(function, [record[key] for record in records]) for key in first}
        return {key: part for key, part in parts.items() if part is not None}
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return function([float(record) for record in records])
    return None
