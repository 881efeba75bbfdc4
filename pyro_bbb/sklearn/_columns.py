# SPDX-License-Identifier: Apache-2.0
"""Columns of a table as the numbers that a network takes: categories and missing values.

| column | becomes |
|---|---|
| numbers, bool | themselves; missing ones the training median, marked in a further 0/1 column |
| categories | a 0/1 column for each, and one for missing values if some were missing in training |

First `as_codes` turns a table into an array of as many columns: numbers, or indices of categories,
NaN where a value is missing or a category unknown. `ColumnEncoding` fills, marks and expands it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Categories: TypeAlias = list[list[str] | None]  # of each column, as text; None of numbers
_CATEGORICAL = ("category", "Categorical", "Enum")  # dtypes of pandas and polars begin so
_REMEDY = "convert the column, name it in categorical_features, or leave it out"


@dataclass(frozen=True)
class ColumnEncoding:
    """Encoding of a table's columns as numbers, learned from training rows."""

    categories: Categories
    medians: list[float]  # of each column, for missing numbers
    gaps: list[bool]  # whether values were missing in training, which are then marked

    @classmethod
    def learn(cls, codes: NDArray[np.float64], categories: Categories) -> ColumnEncoding:
        """Return the encoding of training rows, from the result of `as_codes`."""
        missing = np.isnan(codes)
        known, median = ~missing.all(0), np.nanmedian if missing.any() else np.median
        medians = np.zeros(codes.shape[1])
        medians[known] = 2 * median(codes[:, known] / 2, axis=0)  # two halves do not overflow
        categories = categories or [None] * len(medians)
        return cls(categories, medians.tolist(), np.any(missing, axis=0).tolist())

    @property
    def is_number(self) -> NDArray[np.bool_]:
        """Return whether each encoded column ``[columns]`` holds numbers, not marks 0 and 1."""
        kinds: list[bool] = []
        for names, gap in zip(self.categories, self.gaps, strict=True):
            kinds += [True] if names is None else [False] * len(names)
            kinds += [False] * gap
        return np.array(kinds, dtype=bool)

    def __call__(self, codes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return encoded rows, ``[n, columns]``."""
        filled = np.where(np.isnan(codes), self.medians, codes)
        if self.is_number.all():
            return filled
        blocks: list[NDArray[Any]] = []
        for i, (names, gap) in enumerate(zip(self.categories, self.gaps, strict=True)):
            column = codes[:, i : i + 1]
            blocks.append(filled[:, i : i + 1] if names is None else column == range(len(names)))
            blocks += [np.isnan(column)] * gap
        return np.concatenate(blocks, axis=1, dtype=np.float64)


def find_categories(X: Any, categorical_features: Any, rows: Any = slice(None)) -> Categories:
    """Return the categories of each column in some rows; an empty list for an array without."""
    by_dtype = isinstance(categorical_features, str) and categorical_features == "from_dtype"
    if not _is_frame(X) and (by_dtype or categorical_features is None):
        return []
    columns = _columns(X)
    if by_dtype:
        chosen = {i for i, (_, x) in enumerate(columns) if str(x.dtype).startswith(_CATEGORICAL)}
    else:
        chosen = _positions(categorical_features, [name for name, _ in columns])
    return [
        sorted({*np.array(_texts(column), dtype=object)[rows]} - {None}) if i in chosen else None
        for i, (_, column) in enumerate(columns)
    ]


def as_codes(X: Any, categories: Categories) -> Any:
    """Return a table as ``[n, columns]``: numbers or indices of categories, NaN where missing.

    An array or a list of numbers is returned as it is, to be checked.
    """
    of_objects = isinstance(X, np.ndarray) and X.ndim == 2 and X.dtype.kind in "OUS"
    if not (_is_frame(X) or of_objects or any(names is not None for names in categories)):
        return X
    columns = _columns(X)
    codes = np.full((len(X), len(columns)), np.nan)
    for i, (name, column) in enumerate(columns):
        names = categories[i] if i < len(categories) else None  # more columns are refused later
        index: dict[Any, int] = {category: i for i, category in enumerate(names or ())}
        codes[:, i] = _numbers(name, column) if names is None else [*map(index.get, _texts(column))]
    return codes


def _is_frame(X: Any) -> bool:
    """Return whether a table is a data frame of polars or pandas."""
    return hasattr(X, "get_columns") or (hasattr(X, "iloc") and X.ndim == 2)


def _columns(X: Any) -> list[tuple[Any, Any]]:
    """Return name or index and values of each column of a table."""
    if hasattr(X, "get_columns"):
        return [(column.name, column) for column in X.get_columns()]
    if _is_frame(X):
        return [*X.items()]
    array = X if isinstance(X, np.ndarray) else np.array(X, dtype=object)
    return [*enumerate(array.T)] if array.ndim == 2 else []


def _positions(choice: Any, names: list[Any]) -> set[int]:
    """Return the indices of columns that are chosen by a mask, names or indices."""
    items = [] if choice is None else np.ravel(np.array(choice, dtype=object)).tolist()
    if items and len(items) == len(names) and all(isinstance(x, bool) for x in items):
        return {i for i, chosen in enumerate(items) if chosen}
    positions: dict[Any, int] = {i: i for i in range(len(names))}
    positions |= {name: i for i, name in enumerate(names) if isinstance(name, str)}
    if unknown := [x for x in items if isinstance(x, bool) or x not in positions]:
        raise ValueError(
            "categorical_features must be 'from_dtype', None, a mask of all columns, or names or "
            f"indices of columns, got {unknown[0]!r} for {len(names)} columns"
        )
    return {positions[x] for x in items}


def _is_missing(value: Any) -> bool:
    not_a_number = isinstance(value, float | np.floating) and value != value
    return value is None or not_a_number or type(value).__name__ in ("NAType", "NaTType")


def _texts(column: Any) -> list[str | None]:
    """Return values as text, None for missing ones; 1 and 1.0 have one text."""
    whole = (int(x) if isinstance(x, float) and x.is_integer() else x for x in column)
    return [None if _is_missing(value) else str(value) for value in whole]


def _numbers(name: Any, column: Any) -> NDArray[np.float64]:
    """Return a column's numbers as floats, NaN where one is missing."""
    array = column.to_numpy() if hasattr(column, "to_numpy") else column
    if array.dtype.kind in "biuf":
        return np.asarray(array, dtype=np.float64)
    numbers = np.full(len(column), np.nan)
    for row, value in enumerate(column):
        try:
            if isinstance(value, str | bytes):
                raise ValueError("not a number")
            numbers[row] = np.nan if _is_missing(value) else float(value)
        except (ValueError, TypeError, OverflowError) as error:
            where = f"column {name!r} has {value!r} in row {row}"
            raise type(error)(f"{where}, {error}: {_REMEDY}") from error
    return numbers
