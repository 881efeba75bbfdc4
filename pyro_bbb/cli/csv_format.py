# SPDX-License-Identifier: Apache-2.0
"""CSV files of any common format: separator, decimal sign and encoding are recognised.

A value that fits one decimal sign only, such as 1,5 or 1,234,567, decides on the sign of the file.
1,234 fits both. It is 1234 where the column has numbers below 1,000 without a sign, and none above;
otherwise it is refused.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import polars as pl
from charset_normalizer import from_bytes

from pyro_bbb.cli.errors import BadInput

MISSING = ["", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "None", "?"]
SEPARATORS = ",;\t|"
_MARKS = ["-", "--", "–", ".", "#N/A", "#NA", "#VALUE!", "#DIV/0!", "#REF!", "#NUM!", "<NA>", "NaT"]
_SAMPLE = 1000  # rows by which the separator is recognised
_CHUNK = 10_000  # rows converted at once
_OTHER = {".": ",", ",": "."}  # sign between thousands, of each decimal sign
_SLIPS = 0.1  # fraction of texts among numbers up to which they are slips, not categories
_CODE = r"^(0\d+|\d{19,})$"  # of digits, but more than a number
_SPACES = " \u00a0\u2009\u202f'’"  # between thousands
# of equally likely ones, the first
_ENCODINGS = ["utf_8", "utf_16", "utf_32", "cp1252", "cp1250", "cp1251", "shift_jis", "gb18030"]


@dataclass(frozen=True)
class Format:
    """Separator, decimal sign and encoding of a file."""

    separator: str = ","
    decimal: str = "."
    encoding: str = "utf-8"

    def __str__(self) -> str:
        return f"separator {self.separator!r}, decimal {self.decimal!r}, encoding {self.encoding}"


def read_csv(
    path: Path,
    separator: str | None,
    say: Callable[[str], None],
    decimal: str | None = None,
    usual: str | None = None,
) -> tuple[pl.DataFrame, str | None]:
    """Read a table of texts and the decimal sign, None where no value has one.

    Prints the format where it is not the usual one; ``usual`` is the sign of values that fit both.
    """
    text, encoding = _decode(path)
    separator = separator or _separator(text)
    table = _table(path, text, separator)
    decimal = decimal or _decimal(table, separator, usual)
    found = Format(separator, decimal or ".", encoding)
    if found != Format():
        say(f"{path}: {found}")
    return table, decimal


def typed(
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
    first, number, others = repr(raw.filter(odd).first()), odd.arg_max() or 0, odd.sum() - 1
    if kind == "number" or (few and numbers.count() + swapped.sum() >= present / 2):
        label = "--task classification" if kind == "target" else f"--keep {raw.name}"
        raise BadInput(
            f"column {raw.name!r} has {first} in row {number + 1}, not a number with the decimal "
            f"sign {decimal!r} ({others} rows more): correct it; if it means a missing value, "
            f"train with --missing-values {first}, or if it is a label, with {label}"
        )
    if numbers.count():
        say(f"column {raw.name!r} holds numbers and {first}: it is taken as text")
    return plain


def _stripped(raw: pl.Series) -> pl.Series:
    return raw.str.strip_chars().str.replace("−", "-", literal=True)


def _pattern(decimal: str) -> str:
    """Pattern of the numbers with this decimal sign, also with separators of thousands."""
    thousands = rf"(([{_OTHER[decimal]}]\d{{3}})+|([{_SPACES}]\d{{3}})+)"
    grouped = rf"[1-9]\d{{0,2}}{thousands}([{decimal}]\d+)?"
    return rf"^[+-]?(\d*([{decimal}]\d*)?([eE][+-]?\d+)?|{grouped}|(?i:inf|infinity))$"


def _numbers(text: pl.Series, decimal: str) -> pl.Series:
    """The texts as integers, floats or truth values; null where one is not a number."""
    lower = text.str.to_lowercase()
    if lower.is_in(["true", "false"]).all():
        return lower == "true"
    plain = text.set(~text.str.contains(_pattern(decimal)), None)
    plain = plain.str.replace_all(f"[{_OTHER[decimal]}{_SPACES}]", "")
    plain = plain.str.replace(",", ".", literal=True)
    floats = plain.cast(pl.Float64, strict=False)
    integers = (plain.str.contains(r"^[+-]?\d+$") | floats.is_null()).all()
    return plain.cast(pl.Int64, strict=False) if integers else floats


def _decimal(table: pl.DataFrame, separator: str, usual: str | None) -> str | None:
    """Return the decimal sign that most numbers need, else that of training, else a point."""
    needed: dict[str, Any] = {".": 0, ",": 0}
    unclear = []
    for raw in table:
        text = _stripped(raw)
        point, comma = (text.str.contains(_pattern(sign)) for sign in ".,")
        if 2 * (point | comma).sum() < (~text.is_in(MISSING)).sum():
            continue  # text, which may hold a version or a date
        needed["."] += (point & ~comma).sum()
        needed[","] += (comma & ~point).sum()
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
            raise BadInput(
                f"column {text.name!r} has {value!r} in row {1 + (both.arg_max() or 0)}, in which "
                f"{value[-4]!r} may be a decimal sign or part thousands: add --decimal , or "
                "--decimal ."
            )
    return "." if unclear else None


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
    return csv.reader(io.StringIO(text, newline=""), delimiter=separator)


def _separator(text: str) -> str:
    """Return the separator under which most rows have as many values as the header, two or more."""

    def even_rows(separator: str) -> tuple[int, int]:
        rows = islice(filter(None, _rows(text, separator)), 1 + _SAMPLE)
        header, *others = [len(row) for row in rows] or [0]
        return (1 + others.count(header), header) if header > 1 else (0, 0)

    return max(SEPARATORS, key=even_rows)


def _table(path: Path, text: str, separator: str) -> pl.DataFrame:
    rows = _rows(text, separator)
    if not (names := next(filter(None, rows), [])):
        raise BadInput(f"{path} cannot be read as CSV: it is empty")
    rows = (row or [""] for row in rows if row or len(names) == 1)  # a line may be a missing value
    for name in names:
        if names.count(name) > 1:
            raise BadInput(f"{path} has two columns with the name {name!r}")
    chunks = [pl.DataFrame(schema=dict.fromkeys(names, pl.String))]
    while chunk := list(islice(rows, _CHUNK)):
        for number, row in enumerate(chunk, start=1 + _CHUNK * (len(chunks) - 1)):
            if len(row) != len(names):
                raise BadInput(
                    f"{path} has {len(row)} values in row {number}, but {len(names)} columns: does "
                    f"a value without quotes hold {separator!r}, or is --separator another one?"
                )
        chunks.append(pl.DataFrame(dict(zip(names, zip(*chunk, strict=True), strict=True))))
    return pl.concat(chunks)
