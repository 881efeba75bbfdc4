# SPDX-License-Identifier: Apache-2.0
"""Runs with several seeds, and mean and standard deviation of their figures.

Seeds run one after the other, or wherever `joblib.parallel_config` says: on more cores, or by the
backends "ray" and "dask" on a cluster. Finished ones are cached, and not run again.
"""

import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import joblib

from _helpers.run import Table, cached

Column: TypeAlias = tuple[str, str, float, int] | tuple[str, Callable[[dict[str, Any]], str]]


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
    others, saved = range(seed + 1, seed + repeats), partial(_cached, one, folder)
    if parallel.n_jobs == 1:
        records = [one(seed), *map(saved, others)]
    else:  # elsewhere first: what is sent there must not hold what the first leaves here
        found = parallel(joblib.delayed(saved)(other) for other in others)
        records = [one(seed), *found]
    runs = {str(s): record for s, record in zip(range(seed, seed + repeats), records, strict=True)}
    return {"seeds": runs} | over_seeds(records)


def _cached(one: Callable[[int], dict[str, Any]], folder: Path | None, seed: int) -> dict[str, Any]:
    """The figures of a seed, from its file if it has one."""
    return one(seed) if folder is None else cached(folder / f"{seed}.json", partial(one, seed))


def shown(summary: dict[str, Any], *keys: str, factor: float = 100, digits: int = 2) -> str:
    """A figure of `repeat`'s summary for a table, as ``"97.80 ± 0.11"``: mean and, if known, sd.

    The keys lead to it through the nested dicts; it is multiplied by ``factor``.
    """
    return " ± ".join(f"{factor * figure:.{digits}f}" for figure in at(summary, *keys).values())


def at(summary: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Return the summary of the figures below some keys."""
    found = {kind: summary[kind] for kind in ("mean", "sd") if kind in summary}
    for key in keys:
        found = {kind: figures[key] for kind, figures in found.items()}
    return found


def cell(summary: dict[str, Any], path: str, factor: float = 100, digits: int = 2) -> str:
    """Format the figure to which keys joined by dots lead (``~`` for a dot), or a dash."""
    try:
        keys = (key.replace("~", ".") for key in path.split("."))
        return shown(summary, *keys, factor=factor, digits=digits)
    except KeyError:
        return "–"


def resumed(
    folder: Path, seeds: Iterable[int], one: Callable[[int], dict[str, Any]], what: str
) -> dict[str, Any]:
    """Return the figures of several seeds, each cached in a file, and their means and sd.

    Prints a line on each seed, of ``what`` and the figures that are numbers.
    """
    records = []
    for seed in seeds:
        records.append(cached(folder / f"{seed}.json", partial(one, seed)))
        numbers = {k: v for k, v in records[-1].items() if isinstance(v, float)}
        words = ", ".join(f"{name} {value:.4f}" for name, value in numbers.items())
        print(f"{what}, seed {seed}: {words}", flush=True)
    return {"seeds": records} | over_seeds(records)


def table(
    heading: str,
    summaries: Mapping[str, dict[str, Any]],
    columns: Sequence[Column],
    others: Mapping[str, Sequence[str]] | None = None,
) -> Table:
    """Tabulate figures of summaries, a row for each by its label.

    Args:
        heading: of the first column.
        summaries: results of `repeat` or `over_seeds`, by label.
        columns: heading, keys that lead to the figure, joined by dots (``~`` for a dot), factor
            and decimals; a dash where a summary lacks the figure. Or heading and a function of
            the summary that returns the cell.
        others: further rows, such as published figures, by label.
    """
    rows = [
        (
            label,
            *(x(summary) if callable(x) else cell(summary, x, *form) for _, x, *form in columns),
        )
        for label, summary in summaries.items()
    ]
    rows += [(label, *cells) for label, cells in (others or {}).items()]
    return Table((heading, *(column[0] for column in columns)), rows)


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
