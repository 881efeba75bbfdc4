# SPDX-License-Identifier: Apache-2.0
"""Tables as files: Parquet, and CSV whose separator, decimal sign and encoding are recognised.

A value that fits one decimal sign only, such as 1,5 or 1,234,567, decides on the sign of the file.
1,234 fits both. It is 1234 where the column has numbers below 1,000 without a sign, and none above;
otherwise it is refused.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any

import polars as pl
from charset_normalizer import from_bytes

from pyro_bbb.apps.command_line import PARQUET, BadInput, BadRow, Reading

MISSING = ["", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "None", "?"]
_MARKS = ["-", "--", "–", ".", "#N/A", "#NA", "#VALUE!", "#DIV/0!", "#REF!", "#NUM!", "<NA>", "NaT"]
_SAMPLE = 1000  # rows that decide on the separator
_OTHER = {".": ",", ",": "."}  # decimal sign: the sign between thousands
_SLIPS = 0.1  # up to this fraction of the values, texts among numbers are slips, not categories
_CODE = r"^(0\d+|\d{19,})$"  # digits that are a code, not a number
_SPACES = " \u00a0\u2009\u202f'’"  # between thousands
_ENCODINGS = ["utf_8", "utf_16", "utf_32", "cp1252", "cp1250", "cp1251", "shift_jis", "gb18030"]
_FEW = 5  # names that an error lists


def listed(names: Sequence[str]) -> str:
    """Return the first few names, quoted, and the number of the others."""
    remark = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return ", ".join(map(repr, names[:_FEW])) + remark


def refuse(series: pl.Series, wrong: pl.Series, words: str) -> None:
    """Raise `BadInput`, which names column, value and row, where a mask is true."""
    if wrong.any():
        row = wrong.arg_max() or 0
        value = "no value" if series[row] is None else repr(series[row])
        raise BadRow(f"column {series.name!r} has {value}", row, words)


def column(table: pl.DataFrame, name: str, option: str) -> pl.Series:
    """Return a column that an option names, or raise `BadInput`."""
    if name not in table.columns:
        columns = {name.lower(): name for name in table.columns}
        near = [columns[key] for key in get_close_matches(name.lower(), columns, n=1)]
        hint = f"; do you mean {near[0]!r}?" if near else ""
        raise BadInput(f"{option}: there is no column {name!r}, only {listed(table.columns)}{hint}")
    return table[name]


@dataclass(frozen=True)
class TableFile:
    """The rows of a file; those of CSV as texts, with the line where each begins."""

    path: Path
    table: pl.DataFrame
    separator: str = ","
    encoding: str = "utf-8"
    lines: list[int] = field(default_factory=list)  # none of a Parquet file


def read_file(path: Path, separator: str | None) -> TableFile:
    """Read a file; ``separator`` is that of CSV, None to recognise it."""
    file_format = "Parquet" if path.suffix in PARQUET else "CSV"
    try:
        if file_format == "Parquet":
            file = TableFile(path, pl.read_parquet(path))
        else:
            text, encoding = _decode(path)
            file = _texts(path, text, separator or _separator(text), encoding)
    except (pl.exceptions.PolarsError, OSError, csv.Error) as error:
        reason = str(error).splitlines()[0]
        raise BadInput(f"{path} cannot be read as {file_format}: {reason}") from error
    if file.table.height == 0:
        raise BadInput(f"{path} has no rows")
    return file


def read_table(
    options: Reading,
    kinds: Mapping[str, str],
    default: str = "any",
    usual: str | None = None,
    missing: Sequence[str] = (),
) -> tuple[pl.DataFrame, str | None]:
    """Return the table of a command in types, and the decimal sign of its file, None without any.

    ``kinds`` are those of CSV columns, as `_typed` takes them, the others have the ``default``;
    ``usual`` is the decimal sign where all values fit both.
    """
    file: TableFile = options.file
    decimal: str | None = options.decimal
    if not file.lines:
        return file.table, decimal
    decimal = decimal or _decimal(file.table, file.separator, usual)
    sign = decimal or "."
    if (file.separator, sign, file.encoding) != (",", ".", "utf-8"):
        signs = f"separator {file.separator!r}, decimal {sign!r}"
        options.say(f"{file.path}: {signs}, encoding {file.encoding}")
    table = file.table.with_columns(
        _typed(series, kinds.get(series.name, default), sign, missing, options.say)
        for series in file.table
    )
    return table, decimal


# --- what a file holds ---


def _decode(path: Path) -> tuple[str, str]:
    """Return the text of a file and its encoding: UTF-8, else charset_normalizer's best."""
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig"), "utf-8"
    except UnicodeDecodeError:
        matches = list(from_bytes(data, cp_isolation=_ENCODINGS))
    if not matches or "\0" in str(matches[0]):
        raise BadInput(f"{path} cannot be read as CSV: it is not text in a known encoding")
    best = min(matches, key=lambda m: (m.chaos, -m.coherence, _ENCODINGS.index(m.encoding)))
    return str(best), best.encoding


def _rows(text: str, separator: str) -> Any:  # csv's reader
    return csv.reader(io.StringIO(text, newline=""), delimiter=separator)


def _separator(text: str) -> str:
    """Return the separator under which most rows have as many values as the header, two or more."""

    def even_rows(separator: str) -> tuple[int, int]:
        rows = islice(filter(None, _rows(text, separator)), 1 + _SAMPLE)
        header, *widths = [len(row) for row in rows] or [0]
        return (1 + widths.count(header), header) if header > 1 else (0, 0)

    return max(",;\t|", key=even_rows)


def _texts(path: Path, text: str, separator: str, encoding: str) -> TableFile:
    rows, lines = _rows(text, separator), list[int]()
    names: list[str] = next(filter(None, rows), [])
    if not names:
        raise BadInput(f"{path} cannot be read as CSV: it is empty")
    if twice := [name for name in names if names.count(name) > 1]:
        raise BadInput(f"{path} has two columns with the name {twice[0]!r}")

    def even() -> Iterator[list[str]]:
        end = rows.line_num
        for row in rows:
            line, end = end + 1, rows.line_num
            if not row and len(names) > 1:
                continue  # of a single column, an empty line is a missing value
            row = row or [""]
            if len(row) != len(names):
                raise BadInput(
                    f"{path} has {len(row)} values in line {line}, but {len(names)} columns: does "
                    f"a value without quotes hold {separator!r}, or is --separator another one?"
                )
            lines.append(line)
            yield row

    table = pl.DataFrame(even(), dict.fromkeys(names, pl.String), orient="row")
    return TableFile(path, table, separator, encoding, lines)


# --- what a column holds ---


def _stripped(raw: pl.Series) -> pl.Series:
    return raw.str.strip_chars().str.replace("−", "-", literal=True)


def _pattern(decimal: str) -> str:
    """Return the pattern of a number with this decimal sign, thousands grouped or not."""
    thousands = rf"(([{_OTHER[decimal]}]\d{{3}})+|([{_SPACES}]\d{{3}})+)"
    grouped = rf"[1-9]\d{{0,2}}{thousands}([{decimal}]\d+)?"
    return rf"^[+-]?(\d*([{decimal}]\d*)?([eE][+-]?\d+)?|{grouped}|(?i:inf|infinity))$"


def _decimal(table: pl.DataFrame, separator: str, usual: str | None) -> str | None:
    """Return the decimal sign that most numbers need, else the usual one, else a point."""
    needed = {".": 0, ",": 0}
    unclear = []
    for raw in table:
        text = _stripped(raw)
        point, comma = (text.str.contains(_pattern(sign)) for sign in ".,")
        if 2 * (point | comma).sum() < (~text.is_in(MISSING)).sum():
            continue  # text, which may hold a version or a date
        needed["."] += int((point & ~comma).sum())
        needed[","] += int((comma & ~point).sum())
        if (both := point & comma & text.str.contains("[.,]")).any():
            unclear.append((text, both))
    if any(needed.values()):
        return max(needed, key=needed.__getitem__)
    if usual:
        return usual
    for text, both in unclear:
        value = str(text.filter(both)[0])
        small, large = (text.str.contains(rf"^[+-]?\d{{{n}}}$").any() for n in ("1,3", "4,"))
        if separator == ";" or ("," in value and (large or not small)):
            meanings = f"{value[-4]!r} may be a decimal sign or part thousands"
            refuse(text, both, f", in which {meanings}: add --decimal , or --decimal .")
    return "." if unclear else None


def _numbers(text: pl.Series, decimal: str) -> pl.Series:
    """Convert texts to integers, floats or truth values; null where one is not a number."""
    lower = text.str.to_lowercase()
    if lower.is_in(["true", "false"]).all():
        return lower == "true"
    plain = text.set(~text.str.contains(_pattern(decimal)), None)
    plain = plain.str.replace_all(f"[{_OTHER[decimal]}{_SPACES}]", "")
    plain = plain.str.replace(",", ".", literal=True)
    floats = plain.cast(pl.Float64, strict=False)
    integers = (plain.str.contains(r"^[+-]?\d+$") | floats.is_null()).all()
    return plain.cast(pl.Int64, strict=False) if integers else floats


def _typed(
    raw: pl.Series, kind: str, decimal: str, missing: Sequence[str], say: Callable[[str], None]
) -> pl.Series:
    """Convert texts to numbers, truth values, or text; ``missing`` and `MISSING` become null.

    The kind is ``"text"``; ``"number"``, other texts being errors; ``"any"``, numbers if all are;
    ``"feature"`` and ``"target"`` of training, where few texts among numbers are errors.
    """
    text = _stripped(raw)
    gaps = text.is_in([*MISSING, *missing])
    plain, text = raw.set(gaps, None), text.set(gaps, None)
    if kind == "text" or gaps.all():
        return plain
    numbers = _numbers(text, decimal)
    wrong = numbers.is_null() & ~gaps
    digits = text.str.contains(r"^\d+$") | gaps
    if kind != "number" and text.str.contains(_CODE).any() and (digits.all() or wrong.any()):
        return plain
    if kind == "any":
        return plain if wrong.any() else numbers
    odd = wrong & ~text.is_in(_MARKS).fill_null(False)
    if not odd.any() and (kind == "number" or numbers.count()):
        if (lost := raw.filter(numbers.is_null())).len():
            counts = ", ".join(f"{text!r} ({n})" for text, n in lost.value_counts(sort=True).rows())
            say(f"column {raw.name!r} holds numbers, and as missing values {counts}")
        return numbers
    present, swapped = text.count(), odd & _numbers(text, _OTHER[decimal]).is_not_null()
    few = kind == "target" or swapped.any() or odd.sum() <= max(1, _SLIPS * present)
    first = next(iter(raw.filter(odd)), "")
    if kind == "number" or (few and numbers.count() + swapped.sum() >= present / 2):
        label = "--task classification" if kind == "target" else f"--keep {quote(raw.name)}"
        further = f" (and {odd.sum() - 1} more)" if odd.sum() > 1 else ""
        refuse(
            raw,
            odd,
            f", not a number with the decimal sign {decimal!r}{further}: "
            "correct it; if it means a missing value, train with "
            f"--missing-values {quote(first)} (if it is a label, with {label})",
        )
    if numbers.count():
        say(f"column {raw.name!r} holds numbers and {first!r}: it is taken as text")
    return plain
