# SPDX-License-Identifier: Apache-2.0
"""CSV files of any common format: separator, decimal sign and encoding are recognised."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import polars as pl
from charset_normalizer import from_bytes

from pyro_bbb.cli.errors import BadInput

MISSING = ["", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "None", "?"]
SEPARATORS = ",;\t|"
_SAMPLE = 1000  # rows by which the format is recognised
# of equally likely ones, the first
_ENCODINGS = ["utf_8", "utf_16", "utf_32", "cp1252", "cp1250", "cp1251", "shift_jis", "gb18030"]
_COMMA, _POINT = re.compile(r"\s*[+-]?\d*,\d+\s*"), re.compile(r"\s*[+-]?\d*\.\d+\s*")


@dataclass(frozen=True)
class Format:
    """Separator, decimal sign and encoding of a file."""

    separator: str = ","
    decimal: str = "."
    encoding: str = "utf-8"

    def __str__(self) -> str:
        return f"separator {self.separator!r}, decimal {self.decimal!r}, encoding {self.encoding}"


def read_csv(path: Path, separator: str | None, say: Callable[[str], None]) -> pl.DataFrame:
    """Read a table with a header, and say the format where it is not the usual one."""
    text, encoding = _decode(path)
    separator = separator or _separator(text)
    found = Format(separator, _decimal(text, separator), encoding)
    if found != Format():
        say(f"{path}: {found}")
    _require_even_rows(path, text, separator)
    table = pl.read_csv(
        text.encode(),
        separator=separator,
        decimal_comma=found.decimal == ",",
        infer_schema_length=None,
        null_values=MISSING,
    )
    twice = [name for name in table.columns if "_duplicated_" in name]
    if twice:
        name = twice[0].rpartition("_duplicated_")[0]
        raise BadInput(f"{path} has two columns with the name {name!r}")
    return table


def _decode(path: Path) -> tuple[str, str]:
    """Return the text of a file and its encoding: UTF-8, else what charset_normalizer finds."""
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig"), "utf-8"
    except UnicodeDecodeError:
        matches = list(from_bytes(data, cp_isolation=_ENCODINGS))
    if not matches or "\0" in str(matches[0]):
        raise BadInput(f"{path} cannot be read as CSV: it is no text in an encoding that is known")
    best = min(matches, key=lambda m: (m.chaos, -m.coherence, _ENCODINGS.index(m.encoding)))
    return str(best), best.encoding


def _rows(text: str, separator: str) -> Iterator[list[str]]:
    return (row for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator) if row)


def _separator(text: str) -> str:
    """Return the separator under which most rows have as many values as the header, two or more."""

    def even_rows(separator: str) -> tuple[int, int]:
        header, *rows = [len(row) for row in islice(_rows(text, separator), 1 + _SAMPLE)] or [0]
        return (1 + rows.count(header), header) if header > 1 else (0, 0)

    return max(SEPARATORS, key=even_rows)


def _decimal(text: str, separator: str) -> str:
    """Return a comma if values such as 1,5 occur, and none such as 1.5."""
    rows = islice(_rows(text, separator), 1, 1 + _SAMPLE)
    values = [value for row in rows for value in row]
    comma = any(map(_COMMA.fullmatch, values)) and not any(map(_POINT.fullmatch, values))
    return "," if comma and separator != "," else "."


def _require_even_rows(path: Path, text: str, separator: str) -> None:
    rows = _rows(text, separator)
    names = next(rows, [])
    for number, row in enumerate(rows, start=1):
        if len(row) != len(names):
            raise BadInput(
                f"{path} has {len(row)} values in row {number}, but {len(names)} columns: does a "
                f"value without quotes hold {separator!r}, or is --separator another one?"
            )
