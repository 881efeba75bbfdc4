# SPDX-License-Identifier: Apache-2.0
"""Columns of a file as numbers and texts, which the estimators encode, the same at every time.

Dates become, if wanted, days since 1970, month and weekday. Indices, identifiers and columns of one
value are left out. Anything else is an error. The target's column decides on the task.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from shlex import quote
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from polars import selectors as cs

from pyro_bbb.apps.command_line import BadInput, Missing, Task, Train
from pyro_bbb.apps.csv_format import column, listed, read_table, refuse

FILL = "fill in the value, leave the column out by --drop, or train with --missing fill"
MOST_VALUES = 50  # of a text column; with more it is a name or free text
_ID = re.compile(r"(?i:(.*[^a-z])?(id|idx|index|uuid|guid|key))|.*[a-z](Id|ID)")
_COUNTED = 20  # rows, from which a column that counts them is an index
_INDEX = ["", "Unnamed: 0", "__index_level_0__"]  # names that pandas and R give to row numbers
_DATES = ["%Y-%m-%d", "%Y/%m/%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y"]
_TIMES = [
    f"%Y-%m-%d{between}%H:%M{more}" for between in " T" for more in ("", ":%S%.f", ":%S%.f%#z")
]
_FEW_INTEGERS, _ROWS_PER_CLASS = 20, 5  # different integers that are classes, and rows of each
_FEWEST = 4  # rows to learn from
_LARGEST = 1e150  # number to predict, as variances have to be finite
_MOST_CLASSES = 1000


@dataclass(frozen=True)
class TrainingTable:
    """The inputs and targets that a file and the options of ``train`` make."""

    inputs: pl.DataFrame
    y: NDArray[Any]
    task: Task
    dates: dict[str, str]  # columns of dates, and their form
    decimal: str | None  # sign of the file


def training_table(options: Train) -> TrainingTable:
    """Read the file, choose the task and the columns, and encode them."""
    types = dict.fromkeys((*options.drop, *options.keep), "any")
    target_kinds = {"regression": "number", "classification": "any", None: "target"}
    types[options.target] = target_kinds[options.task]
    named = {"--target": [options.target], "--drop": options.drop, "--keep": options.keep}
    for option, names in named.items():
        for name in names:
            column(options.file.table, name, option)
    table, decimal = read_table(options, types, "feature", missing=options.missing_values)
    y, task = _target(options, table[options.target])
    table, dates = _features(options, table)
    columns, constant = learn(table)
    if constant:
        options.say(f"left out, as they have one value only: {listed(constant)}")
    inputs = select(table, columns, options.missing, options.say)
    if len(y) < _FEWEST:
        raise BadInput(f"{options.data} has {len(y)} rows, fewer than the {_FEWEST} to learn from")
    return TrainingTable(inputs, y, task, dates, decimal)


def _target(options: Train, target: pl.Series) -> tuple[NDArray[Any], Task]:
    task, why = recognise(target)
    if options.task is None:
        options.say(f"{options.target!r} makes this a {task}: {why} (--task says otherwise)")
    task = options.task or task
    y = targets(target, task)
    if task == "classification":
        require_classes(y, options.target)
        if options.noise is not None:
            raise BadInput("--noise is an option of regressions, this is a classification")
    return y, task


def _features(options: Train, table: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, str]]:
    """Return the columns to learn from, dates as numbers, and the forms of the dates."""
    table = table.drop(options.target, *options.drop)
    features = table.drop(options.keep, strict=False)
    dates = {x.name: form for x in features if (form := date_form(x, options.dates))}
    names = [x.name for x in features.drop(dates) if identifies_rows(x)]
    if names:
        takes = f"--keep {quote(names[0])} takes {'it' if len(names) == 1 else 'the first'}"
        options.say(f"left out, as they number or name the rows: {listed(names)} ({takes})")
    table = table.drop(names)
    if dates and not options.dates:
        options.say(f"left out, as they are dates: {listed(list(dates))} (--dates takes them)")
        return table.drop(dates), {}
    return with_dates(table, dates).drop(dates), dates


def learn(table: pl.DataFrame) -> tuple[dict[str, list[str] | None], list[str]]:
    """Return the columns to learn from, with the values of text, and names of constant columns."""
    columns, constant = dict[str, list[str] | None](), []
    for series in table.with_columns(cs.float().fill_nan(None)):
        if series.drop_nulls().n_unique() + series.has_nulls() < 2:
            constant.append(series.name)
            continue
        values = None if is_number(series) else sorted(_text(series).drop_nulls().unique())
        if values and len(values) > MOST_VALUES:
            different = f"{len(values)} different texts, more than {MOST_VALUES}"
            remedy = f"leave it out by --drop {quote(series.name)}"
            raise BadInput(f"column {series.name!r} has {different}: {remedy}")
        columns[series.name] = values
    if not columns:
        raise BadInput("there is no column to learn from beside the target")
    return columns, constant


def select(
    table: pl.DataFrame,
    columns: Mapping[str, list[str] | None],
    missing: Missing,
    say: Callable[[str], None],
) -> pl.DataFrame:
    """Return columns of numbers and of texts; texts that training lacks are missing, or refused."""
    _require_columns(table, list(columns))
    selected = {}
    for name, values in columns.items():
        if missing == "refuse":
            require_all(table[name])
        column = _numbers(table[name]) if values is None else _text(table[name])
        selected[name] = column
        if values is None:
            continue
        unknown = ~column.is_in(values).fill_null(True)
        if missing == "refuse":
            refuse(column, unknown, f", which was not in training: {listed(values)}")
        if unknown.any():
            names = listed(sorted(column.filter(unknown).unique()))
            rows = f"{names} in {unknown.sum()} rows, not seen in training: taken as missing"
            say(f"column {name!r} has {rows}")
    return pl.DataFrame(selected)


def identifies_rows(series: pl.Series) -> bool:
    """Return whether a column is an index or an identifier, which differs in every row.

    Integers are by their name, or if they count 20 rows or more from 0 or 1, in any order.
    """
    if series.dtype.is_integer() and series.name in _INDEX:
        return True
    if series.null_count() or series.n_unique() < len(series):
        return False
    if not series.dtype.is_integer():
        return series.dtype == pl.String
    first, count = series.min(), len(series)
    counts = count >= _COUNTED and first in (0, 1) and series.max() == count - 1 + (first == 1)
    return counts or _ID.fullmatch(series.name) is not None


def date_form(series: pl.Series, require_one: bool) -> str | None:
    """Return the form in which all texts are dates, or None; `require_one` refuses two."""
    if series.dtype in (pl.Date, pl.Datetime):
        return _DATES[0]
    values = series.drop_nulls()
    if series.dtype != pl.String or not values.str.contains(r"\d{4}").any():
        return None
    forms = [form for form in _DATES + _TIMES if not _dates(values, form).has_nulls()]
    if len(forms) > 1 and require_one:
        raise BadInput(
            f"column {series.name!r} has dates such as {values[0]!r}, whose day may be the month: "
            "write them as 2024-12-31"
        )
    return forms[0] if forms else None


def with_dates(table: pl.DataFrame, forms: dict[str, str]) -> pl.DataFrame:
    """Add three columns for each column of dates: days since 1970, month and weekday."""
    _require_columns(table, list(forms))
    for name, form in forms.items():
        dates = _dates(table[name], form)
        refuse(table[name], dates.is_null() & table[name].is_not_null(), f", not a date as {form}")
        table = table.with_columns(
            (dates.to_physical() / 86_400e6).alias(f"{name}: days"),
            dates.dt.month().alias(f"{name}: month"),
            dates.dt.weekday().alias(f"{name}: weekday"),
        )
    return table


def recognise(target: pl.Series) -> tuple[Task, str]:
    """Return the task that a target suggests, and the reason."""
    different = target.drop_nulls().n_unique()
    if not is_number(target) or target.dtype == pl.Boolean:
        values = "truth values" if target.dtype == pl.Boolean else "texts"
        return "classification", f"it holds {different} different {values}"
    integers = target.dtype.is_integer() or (target.drop_nulls() % 1 == 0).all()
    if integers and different <= _FEW_INTEGERS and len(target) >= _ROWS_PER_CLASS * different:
        return "classification", f"it holds {different} different integers"
    return "regression", f"it holds {different} different numbers"


def targets(target: pl.Series, task: Task) -> NDArray[Any]:
    """Return the targets for training or scores: numbers or labels, ``[n]``."""
    require_all(target, "leave out the rows without a target")
    if task == "regression":
        if not is_number(target):
            raise BadInput(f"column {target.name!r} holds {target.dtype}, not numbers to predict")
        numbers = _numbers(target)
        large = ", too large: its square is infinite; divide the column by a constant"
        refuse(target, numbers.abs() > _LARGEST, large)
        return np.array(numbers)
    if is_number(target) and target.dtype.is_float() and (target % 1 == 0).all():
        target = target.cast(pl.Int64)
    labels = target if is_number(target) else target.cast(pl.String)
    return np.array(labels.to_list())


def require_classes(labels: NDArray[Any], name: str) -> None:
    """Raise `BadInput` unless there are two classes or more, up to a thousand."""
    number = len(np.unique(labels))
    if number < 2:
        raise BadInput(f"column {name!r} has one value only, {str(labels[0])!r}: nothing to learn")
    if number > _MOST_CLASSES:
        raise BadInput(f"column {name!r} has {number} classes, more than {_MOST_CLASSES}")


def require_all(series: pl.Series, advice: str = FILL) -> None:
    """Raise `BadInput` if a value is missing."""
    if series.dtype.is_float():
        series = series.fill_nan(None)
    further = series.null_count() - 1
    refuse(series, series.is_null(), f"{f' (and {further} more)' if further > 0 else ''}: {advice}")


def is_number(series: pl.Series) -> bool:
    """Return whether a column holds numbers or truth values."""
    return series.dtype.is_numeric() or series.dtype == pl.Boolean


def _numbers(series: pl.Series) -> pl.Series:
    """Cast a column to finite floats; a column without any value was read as text."""
    if not is_number(series):
        text = _text(series)
        numbers = text.cast(pl.Float64, strict=False)
        refuse(text, numbers.is_null() & text.is_not_null(), ", not a number")
        return numbers
    if series.dtype.is_float():
        refuse(series, series.is_infinite().fill_null(False), ": not finite")
    return series.cast(pl.Float64)


def _text(series: pl.Series) -> pl.Series:
    dtype = series.dtype
    if dtype.is_temporal() or dtype.is_nested() or dtype in (pl.Binary, pl.Object):
        raise BadInput(
            f"column {series.name!r} is of type {dtype}, not numbers or text: convert it, or leave "
            f"it out by --drop {quote(series.name)}"
        )
    return series.cast(pl.String)


def _dates(series: pl.Series, form: str) -> pl.Series:
    if not series.dtype.is_temporal():
        series = series.cast(pl.String).str.strptime(pl.Datetime, form, strict=False)
    return series.cast(pl.Datetime("us"))


def _require_columns(table: pl.DataFrame, names: list[str]) -> None:
    if absent := [name for name in names if name not in table.columns]:
        raise BadInput(f"the table has no column {listed(absent)}, which the model was trained on")
