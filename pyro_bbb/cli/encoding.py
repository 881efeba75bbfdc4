# SPDX-License-Identifier: Apache-2.0
"""From columns of a table to the numbers that a network takes, the same way at every time.

| column | becomes |
|---|---|
| numbers, bool | themselves; missing ones the training median, with a second column that says so |
| text of few different values | one column of 0 and 1 for each; missing is a value of its own |

Columns of one value only say nothing and are left out. What else cannot be used is an error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray
from polars import selectors as cs

from pyro_bbb.cli.errors import BadInput
from pyro_bbb.cli.options import Missing
from pyro_bbb.cli.table_io import first_row, listed

MOST_VALUES = 50  # of a text column; with more it is a name or free text
_MOSTLY = 0.5  # fraction of numbers from which a text is thought to be a slip among them


@dataclass(frozen=True)
class Column:
    """Encoding of one column of the table as columns of numbers."""

    name: str
    values: list[str] | None  # the different texts of a text column; None of numbers
    median: float  # stands for a missing number
    gaps: bool  # values were missing in training

    @property
    def width(self) -> int:
        """Columns that it becomes."""
        return (1 if self.values is None else len(self.values)) + self.gaps

    def encode(self, series: pl.Series, missing: Missing) -> NDArray[np.float64]:
        """The columns of numbers, ``[n, width]``; a text must have been there in training."""
        if missing == "refuse":
            require_all(series)
        if series.dtype.is_float():
            series = series.fill_nan(None)
        gaps = series.is_null()
        if self.values is None:
            filled = _numbers(series).fill_null(self.median).to_numpy()
            parts = [filled.astype(np.float64)[:, None]]
        else:
            text = _text(series)
            known = text.is_in(self.values)
            if missing == "refuse" and not known.all():
                row = first_row(~known)
                raise BadInput(
                    f"column {self.name!r} has {text[row - 1]!r} in row {row}, which was not in "
                    f"training: {listed(self.values)}"
                )
            parts = [(text == value).fill_null(False).to_numpy()[:, None] for value in self.values]
            gaps = gaps | ~known.fill_null(True)
        if self.gaps:
            parts.append(gaps.to_numpy()[:, None])
        return np.concatenate(parts, axis=1, dtype=np.float64)


def learn(table: pl.DataFrame, missing: Missing) -> tuple[list[Column], list[str]]:
    """Encodings of the columns of a training table, and the names of constant columns."""
    columns, constant = [], []
    for series in table.with_columns(cs.float().fill_nan(None)):
        if missing == "refuse":
            require_all(series)
        if series.drop_nulls().n_unique() + bool(series.null_count()) < 2:
            constant.append(series.name)
        else:
            columns.append(_learn(series))
    if not columns:
        raise BadInput("there is no column to learn from beside the target")
    return columns, constant


def encode(columns: list[Column], table: pl.DataFrame, missing: Missing) -> NDArray[np.float64]:
    """All columns as numbers, ``[n, features]``."""
    absent = [column.name for column in columns if column.name not in table.columns]
    if absent:
        raise BadInput(f"the table has no column {listed(absent)}, which the model was trained on")
    return np.concatenate([c.encode(table[c.name], missing) for c in columns], axis=1)


def unseen(columns: list[Column], table: pl.DataFrame) -> list[str]:
    """Say for each text column the values not seen in training, and the number of rows."""
    lines = []
    for column in columns:
        if column.values is None:
            continue
        text = _text(table[column.name]).drop_nulls()
        if new := text.filter(~text.is_in(column.values)).to_list():
            names = listed(sorted(set(new)))
            lines.append(
                f"column {column.name!r} has {names} in {len(new)} rows, not seen in training: "
                "taken as missing"
            )
    return lines


FILL = "fill in the value, leave the column out by --drop, or train with --missing fill"


def require_all(series: pl.Series, advice: str = FILL) -> None:
    """Raise BadInput, which names row and column, if a value is missing."""
    if series.dtype.is_float():
        series = series.fill_nan(None)
    if series.null_count():
        row, more = first_row(series.is_null()), series.null_count() - 1
        others = f" (and {more} more)" if more else ""
        raise BadInput(f"column {series.name!r} has no value in row {row}{others}: {advice}")


def is_number(series: pl.Series) -> bool:
    """Return whether a column holds numbers, or truth values."""
    return series.dtype.is_numeric() or series.dtype == pl.Boolean


def require_finite(series: pl.Series) -> None:
    """Raise BadInput, which names row and column, if a number is infinite."""
    if series.dtype.is_float() and (infinite := series.is_infinite().fill_null(False)).any():
        row = first_row(infinite)
        raise BadInput(f"column {series.name!r} has {series[row - 1]} in row {row}: not finite")


def _learn(series: pl.Series) -> Column:
    if is_number(series):
        numbers = _numbers(series)
        middle = float(numbers.median())  # type: ignore[arg-type]
        return Column(series.name, None, middle, bool(numbers.null_count()))
    values = sorted(_text(series).drop_nulls().unique().to_list())
    if len(values) > MOST_VALUES:
        _refuse_many(series, len(values))
    return Column(series.name, values, 0.0, bool(series.null_count()))


def _refuse_many(series: pl.Series, count: int) -> None:
    """Says why a text column of many values cannot be used."""
    text = _text(series)
    wrong = text.cast(pl.Float64, strict=False).is_null() & text.is_not_null()
    if wrong.sum() < _MOSTLY * (len(text) - text.null_count()):
        row = first_row(wrong)
        raise BadInput(f"column {series.name!r} has {text[row - 1]!r} in row {row}, not a number")
    raise BadInput(
        f"column {series.name!r} has {count} different texts, more than {MOST_VALUES}: leave it "
        f"out by --drop {series.name}"
    )


def _numbers(series: pl.Series) -> pl.Series:
    """The column as floats, not a number counting as missing."""
    if not is_number(series):
        text = _text(series)
        wrong = text.cast(pl.Float64, strict=False).is_null() & text.is_not_null()
        if not wrong.any():  # a column without any value is read as text
            return text.cast(pl.Float64)
        row = first_row(wrong)
        raise BadInput(f"column {series.name!r} has {text[row - 1]!r} in row {row}, not a number")
    require_finite(series)
    return series.cast(pl.Float64)


def _text(series: pl.Series) -> pl.Series:
    kind = series.dtype
    if kind.is_temporal() or kind.is_nested() or kind in (pl.Binary, pl.Object):
        raise BadInput(
            f"column {series.name!r} is of type {kind}, not numbers or text: convert it, or leave "
            f"it out by --drop {series.name}"
        )
    return series.cast(pl.String)
