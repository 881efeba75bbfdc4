# SPDX-License-Identifier: Apache-2.0
"""Tables as files: CSV and Parquet, read with errors that name file, row and column.

Rows are counted from 1, a header not counted.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import polars as pl

from pyro_bbb._utils.files import replacing
from pyro_bbb.cli.csv_format import read_csv, typed
from pyro_bbb.cli.errors import BadInput
from pyro_bbb.cli.options import PARQUET, ReadingCommand

_FEW = 5  # names that an error lists


def read(
    path: Path,
    options: ReadingCommand,
    say: Callable[[str], None],
    kinds: Mapping[str, str],
    default: str = "any",
    usual: str | None = None,
    missing: Sequence[str] = (),
) -> tuple[pl.DataFrame, str | None]:
    """Read a table, Parquet by its ending, else CSV with a header; and its decimal sign.

    The columns of a CSV file have their ``kinds``, or the default one, as `typed` takes them; a
    decimal sign that the file leaves open is the ``usual`` one.
    """
    kind = "Parquet" if path.suffix in PARQUET else "CSV"
    try:
        if kind == "Parquet":
            table, decimal = pl.read_parquet(path), None
        else:
            raw, decimal = read_csv(path, options.separator, say, options.decimal, usual)
            table = raw.with_columns(
                typed(text, kinds.get(text.name, default), decimal or ".", missing, say)
                for text in raw
            )
    except (pl.exceptions.PolarsError, OSError, csv.Error) as error:
        reason = str(error).splitlines()[0]
        raise BadInput(f"{path} cannot be read as {kind}: {reason}") from error
    if table.height == 0:
        raise BadInput(f"{path} has no rows")
    return table, decimal


def write(table: pl.DataFrame, path: Path) -> None:
    """Write a table, complete from the moment that the file has its name."""
    save = table.write_parquet if path.suffix in PARQUET else table.write_csv
    with replacing(path) as part:
        save(part)


def column(table: pl.DataFrame, name: str, option: str) -> pl.Series:
    """The column that an option names."""
    if name not in table.columns:
        raise BadInput(f"{option}: there is no column {name!r}, only {listed(table.columns)}")
    return table[name]


def listed(names: list[str]) -> str:
    """Some names for an error."""
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return ", ".join(map(repr, names[:_FEW])) + more


def first_row(series: pl.Series) -> int:
    """The number of the first row where a series of bool is true, from 1."""
    index = series.arg_max()
    return 1 + (index or 0)
