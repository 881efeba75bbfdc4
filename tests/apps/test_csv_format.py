# SPDX-License-Identifier: Apache-2.0
"""CSV files as other programs write them."""

import csv

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal
from sklearn.datasets import load_diabetes

from pyro_bbb.apps.command_line import BadInput, Evaluate
from pyro_bbb.apps.csv_format import read_table

RNG = np.random.default_rng(0)
CITIES = ["München", "Köln", "Zürich", "Genève", "Málaga", "Århus", "Gøteborg, Sverige"]
PLACES = pl.DataFrame(
    {
        "größe": RNG.uniform(-3, 3, 40).round(3),
        "Zähler": RNG.integers(0, 9, 40),
        "Stadt": RNG.choice(CITIES, 40),
    }
)
ROWS = {  # as text: decimals, missing values, commas inside of values
    "places": PLACES,
    "gaps": PLACES.with_columns(
        größe=pl.when(pl.int_range(pl.len()) % 7 != 3).then(pl.col("größe"))
    ),
    "whole numbers": PLACES.drop("größe"),
}
FORMATS = [  # separator, decimal sign, encoding
    (",", ".", "utf-8-sig"),
    (";", ",", "utf-8"),
    (";", ".", "latin-1"),
    ("\t", ",", "utf-16"),
    ("|", ".", "cp1252"),
]


def write(table, path, separator, decimal, encoding):
    """Write by the standard library, numbers with the decimal sign given."""
    with path.open("w", encoding=encoding, newline="") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(table.columns)
        for row in table.iter_rows():
            writer.writerow(
                str(v).replace(".", decimal) if isinstance(v, float) else v for v in row
            )


def said(capsys, path):
    table, _ = read_table(Evaluate(model=path, data=path), {}, "feature")
    return table, capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("separator", "decimal", "encoding"), FORMATS)
def test_every_format_gives_the_same_table(capsys, tmp_path, rows, separator, decimal, encoding):
    table, path = ROWS[rows], tmp_path / "t.csv"
    write(table, path, separator, decimal, encoding)
    actual, lines = said(capsys, path)
    assert_frame_equal(actual, table)
    usual = (separator, encoding[:5]) == (",", "utf-8")
    formats = [line for line in lines if "separator" in line]
    assert len(formats) == (not usual)
    assert usual or f"separator {separator!r}" in formats[0]


def test_a_real_table_in_another_format(capsys, tmp_path):
    """All 442 rows of the diabetes table are read back to the last digit."""
    numbers = pl.DataFrame(load_diabetes().data)
    write(numbers, tmp_path / "n.csv", ";", ",", "cp1252")
    assert_frame_equal(said(capsys, tmp_path / "n.csv")[0].cast(pl.Float64), numbers)


def test_one_column_has_no_separator(capsys, tmp_path):
    (tmp_path / "t.csv").write_text("name\na\nb\n")
    assert said(capsys, tmp_path / "t.csv")[0]["name"].to_list() == ["a", "b"]


def test_decimals_of_both_signs_are_refused(capsys, tmp_path):
    (tmp_path / "t.csv").write_text("a;b\n1,5;2.5\n")
    with pytest.raises(BadInput, match="column 'a' has '1,5' in row 1, not a number with .* '.'"):
        said(capsys, tmp_path / "t.csv")


@pytest.mark.parametrize("row", ["1,5;2;3", "1,5"])
def test_a_ragged_row_is_named(capsys, tmp_path, row):
    (tmp_path / "t.csv").write_text("a;b\n1,5;2\n3,5;4\n" + row + "\n5,5;6\n")
    count = row.count(";") + 1
    with pytest.raises(BadInput, match=rf"has {count} values in line 4, but 2 columns.*';'"):
        said(capsys, tmp_path / "t.csv")


def test_what_is_no_text_is_refused(capsys, tmp_path):
    (tmp_path / "t.csv").write_bytes(bytes(range(256)) * 4)
    with pytest.raises(BadInput, match="cannot be read as CSV"):
        said(capsys, tmp_path / "t.csv")
