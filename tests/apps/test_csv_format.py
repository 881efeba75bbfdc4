# SPDX-License-Identifier: Apache-2.0
"""CSV files as other programs write them."""

import csv

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal
from sklearn.datasets import load_diabetes

from pyro_bbb.apps import main
from pyro_bbb.apps.bad_input import BadInput
from pyro_bbb.apps.csv_format import read_csv, typed

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
    (",", ".", "utf-8"),
    (",", ".", "utf-8-sig"),
    (";", ",", "utf-8"),
    (";", ",", "cp1252"),
    (";", ".", "latin-1"),
    ("\t", ",", "utf-16"),
    ("\t", ".", "cp1252"),
    ("|", ".", "utf-8"),
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


def said(path, separator=None):
    lines = []
    table, decimal = read_csv(path, separator, lines.append)
    columns = [typed(text, "feature", decimal or ".", (), print) for text in table]
    return pl.DataFrame(columns), lines


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("separator", "decimal", "encoding"), FORMATS)
def test_every_format_gives_the_same_table(tmp_path, rows, separator, decimal, encoding):
    table, path = ROWS[rows], tmp_path / "t.csv"
    write(table, path, separator, decimal, encoding)
    found, lines = said(path)
    assert_frame_equal(found, table)
    usual = (separator, encoding[:5]) == (",", "utf-8")
    assert len(lines) == (not usual)
    assert usual or f"separator {separator!r}" in lines[0]


def test_a_real_table_in_another_format(tmp_path):
    """All 442 rows of the diabetes table are read back to the last digit."""
    numbers = pl.DataFrame(load_diabetes().data)
    write(numbers, tmp_path / "n.csv", ";", ",", "cp1252")
    assert_frame_equal(said(tmp_path / "n.csv")[0].cast(pl.Float64), numbers)


def test_one_column_has_no_separator(tmp_path):
    (tmp_path / "t.csv").write_text("name\na\nb\n")
    assert said(tmp_path / "t.csv")[0]["name"].to_list() == ["a", "b"]


def test_decimals_of_both_signs_are_refused(tmp_path):
    (tmp_path / "t.csv").write_text("a;b\n1,5;2.5\n")
    with pytest.raises(BadInput, match="column 'a' has '1,5' in row 1, not a number with .* '.'"):
        said(tmp_path / "t.csv")


@pytest.mark.parametrize("row", ["1,5;2;3", "1,5"])
def test_a_ragged_row_is_named(tmp_path, row):
    (tmp_path / "t.csv").write_text("a;b\n1,5;2\n3,5;4\n" + row + "\n5,5;6\n")
    count = row.count(";") + 1
    with pytest.raises(BadInput, match=rf"has {count} values in row 3, but 2 columns.*';'"):
        said(tmp_path / "t.csv")


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "t.csv").write_bytes(bytes(range(256)) * 4)
    with pytest.raises(BadInput, match="cannot be read as CSV"):
        said(tmp_path / "t.csv")


def test_values_not_seen_in_training_are_said(tmp_path, capsys):
    train, new = tmp_path / "train.csv", tmp_path / "new.csv"
    table = PLACES.drop("Zähler").filter(pl.col("Stadt") != "Köln").rename({"Stadt": "town"})
    table.write_csv(train)
    words = ["--target", "größe", "--missing", "fill", "--epochs", "1", "--out"]
    assert main(["train", str(train), *words, str(tmp_path / "m")]) == 0
    table.with_columns(town=pl.Series(["Bonn", "Ulm", *table["town"][2:]])).write_csv(new)
    out = tmp_path / "p.csv"
    assert main(["predict", str(tmp_path / "m"), str(new), "--out", str(out)]) == 0
    line = "column 'town' has 'Bonn', 'Ulm' in 2 rows, not seen in training: taken as missing"
    assert line in capsys.readouterr().out
    assert main(["predict", str(tmp_path / "m"), str(train), "--out", str(out), "--force"]) == 0
    assert "not seen" not in capsys.readouterr().out
