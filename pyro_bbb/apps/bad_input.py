# SPDX-License-Identifier: Apache-2.0
"""The error of bad files, values and options, and helpers that name rows and columns in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl

_FEW = 5  # names that an error lists


class BadInput(ValueError):
    """Unusable input; the message names the place and the remedy."""


def listed(names: Sequence[str]) -> str:
    """Return the first few names, quoted, and the number of the others."""
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return ", ".join(map(repr, names[:_FEW])) + more


def first_row(mask: pl.Series) -> int:
    """Return the first row where a series of bool is true, counted from 1 below the header."""
    return 1 + (mask.arg_max() or 0)


def column(table: pl.DataFrame, name: str, option: str) -> pl.Series:
    """Return a column that an option names, or raise `BadInput`."""
    if name not in table.columns:
        raise BadInput(f"{option}: there is no column {name!r}, only {listed(table.columns)}")
    return table[name]
