# SPDX-License-Identifier: Apache-2.0
"""Summaries of several seeds, and tables of their figures."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Scores: TypeAlias = dict[str, Any]
Summary: TypeAlias = dict[str, Any]  # ``mean`` and, of two or more seeds, ``sd``
Summaries: TypeAlias = dict[str, Summary]  # by method
Column: TypeAlias = tuple[str, str, float, int] | tuple[str, Callable[[Summary], str]]


@dataclass(frozen=True)
class Table:
    """Rows of text under a row of headings; the first column is the rows' names."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        """Format as aligned Markdown."""
        lines = [self.columns, *self.rows]
        first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
        cells = [[name.ljust(first), *map(str.rjust, figures, widths)] for name, *figures in lines]
        cells.insert(1, ["-" * first, *("-" * (width - 1) + ":" for width in widths)])
        return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def over(function: Callable[[list[float]], float], records: list[Any]) -> Any:
    """Apply a function to the values of each number in records of one structure."""
    first = records[0]
    if isinstance(first, dict):
        summaries = {key: over(function, [record[key] for record in records]) for key in first}
        return {key: summary for key, summary in summaries.items() if summary is not None}
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return function([float(record) for record in records])
    return None


def over_seeds(records: list[Any]) -> Summary:
    """``mean`` and, of two or more, ``sd`` of every number in records of one structure."""
    functions = {"mean": statistics.fmean} | ({"sd": statistics.stdev} if len(records) > 1 else {})
    return {name: over(function, records) for name, function in functions.items()}


def over_splits(values: list[float]) -> dict[str, float | None]:
    """Mean and standard error, sd / sqrt(n) with the sd that divides by n - 1."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "standard_error": error}


def at(summary: Summary, *keys: str) -> Summary:
    """Return the summary of the figures below some keys."""
    result = {name: summary[name] for name in ("mean", "sd") if name in summary}
    for key in keys:
        result = {name: figures[key] for name, figures in result.items()}
    return result


def shown(summary: Summary, *keys: str, factor: float = 100, digits: int = 2) -> str:
    """Format a figure as ``"97.80 ± 0.11"``: mean and, if known, sd, multiplied by ``factor``.

    The keys lead to it through the nested dicts.
    """
    return " ± ".join(f"{factor * figure:.{digits}f}" for figure in at(summary, *keys).values())


def cell(summary: Summary, path: str, factor: float = 100, digits: int = 2) -> str:
    """Format the figure to which keys joined by dots lead (``~`` for a dot), or a dash."""
    try:
        keys = (key.replace("~", ".") for key in path.split("."))
        return shown(summary, *keys, factor=factor, digits=digits)
    except KeyError:
        return "–"


def table(
    heading: str,
    summaries: Mapping[str, Summary],
    columns: Sequence[Column],
    others: Mapping[str, Sequence[str]] | None = None,
) -> Table:
    """Tabulate figures of summaries, a row for each by its label, and further rows.

    A column is a heading with path, factor and decimals of `cell`, or with a function from the
    summary to the cell.
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
