# SPDX-License-Identifier: Apache-2.0
"""What columns of a file are: numbers, codes, identifiers, dates; in training and afterwards."""

import re
import shlex

import numpy as np
import polars as pl
import pytest

from pyro_bbb.apps import main
from pyro_bbb.apps.command_line import Evaluate
from pyro_bbb.apps.table_model import Model

RNG = np.random.default_rng(0)
ROWS = 40
X = RNG.normal(size=ROWS).round(2)
Y = (3 * X + RNG.normal(size=ROWS)).round(3)


@pytest.fixture(autouse=True)
def unjudged(monkeypatch):
    """Models without a verdict on their posterior, which takes most of a short training."""
    monkeypatch.setattr(Model, "verdict", lambda *_: "")


def write(path, separator=",", line_end="\n", **columns):
    """Write columns as they are, without quotes."""
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    text = "".join(separator.join(map(str, row)) + line_end for row in rows)
    path.write_bytes(text.encode())
    return path


def run(capsys, *words):
    """Exit code, output and errors of a command."""
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def train(capsys, tmp_path, *words, target="y", **columns):
    """Train for one epoch; the output with errors, and the model if there is one."""
    return train_file(capsys, write(tmp_path / "t.csv", **columns), *words, target=target)


def train_file(capsys, path, *words, target="y"):
    out = path.parent / "m"
    words = ("train", path, "--target", target, "--epochs", 1, "--out", out, "--force", *words)
    code, output, errors = run(capsys, *words)
    return output + errors, Model.load(out) if code == 0 else None


def predict(capsys, path, *words):
    """Exit code and errors of predictions for a file, by the model in its folder."""
    out = path.parent / "p.csv"
    code, _, errors = run(
        capsys, "predict", path.parent / "m", path, "--out", out, "--force", *words
    )
    return code, errors


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A folder with a model of one column of numbers."""
    folder = tmp_path_factory.mktemp("plain")
    words = ["--target", "y", "--epochs", "1", "--quiet", "--out", str(folder / "m")]
    assert main(["train", str(write(folder / "t.csv", x=X, y=Y)), *words]) == 0
    return folder


def taken(model):
    return list(model.columns)


def inputs(model, path):
    """Numbers that the network takes for a file."""
    return model.estimator.encode(
        model.inputs(model.read(Evaluate(model=path, data=path), truth=False), print)
    )


# --- thousands ---

SMALL = ["194", "12", "7", "999"] * 10
THOUSANDS = {  # first value, and what it is
    "comma": ("2,288", 2288, "\t", {}),
    "two commas": ("1,002,288", 1002288, "\t", {}),
    "comma and point": ("2,288.5", 2288.5, "\t", {}),
    "point, by another column": ("2.849", 2849, ";", {"z": ["-0,5"] * 20 + ["1,5"] * 20}),
    "comma, by another column": ("2,288", 2288, "\t", {"z": ["0.5"] * 20 + ["1.5"] * 20}),
    "quoted": ('"2,288"', 2288, ",", {}),
    "space": ("2 288,5", 2288.5, ";", {}),
    "non-breaking space": ("2\u00a0288.5", 2288.5, ",", {}),
    "narrow space": ("-2\u202f288", -2288, ",", {}),
    "apostrophe": ("2'288.5", 2288.5, ",", {}),
    "minus sign": ("−2288.5", -2288.5, ",", {}),
}


@pytest.mark.parametrize("case", THOUSANDS)
def test_thousands_are_read_as_thousands(capsys, tmp_path, case):
    text, number, separator, extra = THOUSANDS[case]
    table = {"x": [text, *SMALL[1:]], **extra, "y": np.arange(ROWS) % 2}
    path = write(tmp_path / "t.csv", separator, **table)
    _, model = train_file(capsys, path)
    assert inputs(model, path)[:3, 0].tolist() == [number, 12, 7]
    assert predict(capsys, path, "--keep", "x")[0] == 0
    assert pl.read_csv(tmp_path / "p.csv")["x"][0] == number
    one_row = write(tmp_path / "new.csv", separator, **{k: [v[0]] for k, v in table.items()})
    assert inputs(model, one_row)[0, 0] == number  # by the sign of training


@pytest.mark.parametrize(
    ("values", "separator", "message"),
    [
        (["1,234", "2,345"] * 20, "\t", "column 'x' has '1,234' in line 2, in which ',' may be"),
        (['"1,234"', '"2,345"'] * 20, ",", "column 'x' has '1,234' in line 2"),
        (["194", "2,345"] * 20, ";", "column 'x' has '2,345' in line 3"),
        (["1.234", "2.345"] * 20, ";", "column 'x' has '1.234' in line 2, in which '.' may be"),
    ],
)
def test_a_number_that_may_be_another_is_refused(capsys, tmp_path, values, separator, message):
    path = write(tmp_path / "t.csv", separator, x=values, y=np.arange(ROWS) % 2)
    output, model = train_file(capsys, path)
    assert model is None and message in output and "--decimal" in output
    _, model = train_file(capsys, path, "--decimal", ",")
    divisor = 1000 if "," in values[1] else 1
    assert inputs(model, path)[1, 0] == float(re.sub(r"\D", "", values[1])) / divisor


@pytest.mark.parametrize("bad", ["1.5", "2,28", "22,88,1", "1,2345", "1.5,5"])
def test_numbers_that_do_not_fit_the_decimal_sign_are_refused(capsys, tmp_path, bad):
    """Neither numbers, nor a category each."""
    z = ["-0,5", "1,5"] * 20
    x = ["2,5", "0,75", "1.234,5", "3"] * 10
    x[6] = bad
    path = write(tmp_path / "t.csv", ";", x=x, z=z, y=np.arange(ROWS) % 2)
    output, model = train_file(capsys, path)
    if bad in ("2,28", "1,2345"):
        assert inputs(model, path)[6, 0] == float(bad.replace(",", "."))
    else:
        assert model is None and f"column 'x' has '{bad}' in line 8, not a number" in output


# --- numbers with slips and marks ---


@pytest.mark.parametrize("mark", ["#N/A", "", "NULL", "?"])
def test_marks_among_numbers_are_counted_and_filled(capsys, tmp_path, mark):
    x = X.astype(str)
    x[[3, 8]] = mark
    output, model = train(capsys, tmp_path, x=x, y=Y)
    counted = f"column 'x' holds numbers, and as missing values {mark!r} (2)"
    assert model is None and counted in output
    assert "column 'x' has no value in line 5 (and 1 more): fill in" in output
    output, model = train(capsys, tmp_path, "--missing", "fill", x=x, y=Y)
    assert counted in output and taken(model) == ["x"] and model.estimator.columns_.gaps[0]
    numbers = inputs(model, tmp_path / "t.csv")
    assert np.flatnonzero(numbers[:, 1]).tolist() == [3, 8]
    assert (numbers[[3, 8], 0] == np.median(np.delete(X, [3, 8]))).all()


def test_texts_that_mean_missing_are_chosen_and_kept_with_the_model(capsys, tmp_path):
    x = X.astype(str)
    x[5], x[6] = "-999", "tba"
    words = ("--missing", "fill", "--missing-values", "-999", "tba")
    output, model = train(capsys, tmp_path, *words, x=x, y=Y)
    assert "'-999' (1)" in output and "'tba' (1)" in output
    assert inputs(model, tmp_path / "t.csv")[5:7, 1].tolist() == [1, 1]


@pytest.mark.parametrize("few", [True, False])
def test_a_slip_among_numbers_is_no_category(capsys, tmp_path, few):
    x = np.array(["1", "2", "3", "40"] * 10) if few else X.astype(str)
    x[8] = "l2"
    output, model = train(capsys, tmp_path, **{"the x": x}, y=Y)
    assert model is None and "column 'the x' has 'l2' in line 10, not a number" in output
    assert "--missing-values l2 (" in output and "--keep 'the x')" in output  # for a shell
    if few:
        _, model = train(capsys, tmp_path, "--keep", "the x", **{"the x": x}, y=Y)
        assert next(iter(model.columns.values())) == ["1", "2", "3", "40", "l2"]


def test_categories_that_are_mostly_numbers_are_announced(capsys, tmp_path):
    x = ["1", "2", "2A", "3"] * 10
    output, model = train(capsys, tmp_path, x=x, y=Y)
    assert "column 'x' holds numbers and '2A': it is taken as text" in output
    assert next(iter(model.columns.values())) == ["1", "2", "2A", "3"]


@pytest.mark.parametrize(("odd", "count"), [("x", 1), ("12m", 15), ("1,5", 1)])
def test_a_target_of_numbers_never_becomes_classes(capsys, tmp_path, odd, count):
    y = Y.astype(str)
    y[4 : 4 + count] = odd
    path = write(tmp_path / "t.csv", "\t", x=X, y=y)
    output, model = train_file(capsys, path)
    assert model is None and f"column 'y' has '{odd}' in line 6, not a number" in output
    assert "--task classification" in output and ("(and 14 more)" in output) == (count == 15)
    output, model = train_file(capsys, path, "--task", "regression")
    assert model is None and f"column 'y' has '{odd}' in line 6, not a number" in output


@pytest.mark.parametrize("mark", ["-", "<NA>", "NaT"])
def test_a_mark_in_the_target_is_no_class(capsys, tmp_path, mark):
    y = np.array(["0", "1"] * 20, dtype=object)
    y[7] = mark
    output, model = train(capsys, tmp_path, x=X, y=y)
    assert model is None and "column 'y' has no value in line 9: leave out" in output


# --- the types of training, afterwards ---


def test_codes_stay_codes_in_files_without_letters(capsys, tmp_path):
    codes = np.array(["01", "02", "2A"])[RNG.integers(0, 3, ROWS)]
    y = np.where(codes == "02", 10.0, 0.0) + 0.1 * X
    _, model = train(capsys, tmp_path, "--missing", "fill", code=codes, x=X, y=y)
    assert next(iter(model.columns.values())) == ["01", "02", "2A"]
    new = write(tmp_path / "new.csv", code=["01", "02"], x=[0.1, 0.2], y=[0, 10])
    assert inputs(model, new)[:, :3].tolist() == [[1, 0, 0], [0, 1, 0]]
    for words in (
        ("evaluate", tmp_path / "m", new),
        ("prune", tmp_path / "m", "--out", tmp_path / "small", "--data", new),
    ):
        code, output, errors = run(capsys, *words)
        assert code == 0 and "not seen" not in output, errors


def test_codes_of_digits_only_are_text(capsys, tmp_path):
    codes = ["01", "02", "10", "20"] * 10
    _, model = train(capsys, tmp_path, code=codes, y=Y)
    assert next(iter(model.columns.values())) == ["01", "02", "10", "20"]


@pytest.mark.parametrize("labels", [["01", "2A"], ["1", "2"], ["true", "False"]])
def test_labels_are_read_as_in_training(capsys, tmp_path, labels):
    y = np.array(labels)[np.arange(ROWS) % 2]
    _, model = train(capsys, tmp_path, x=X, y=y)
    new = write(tmp_path / "new.csv", x=X[:4:2], y=y[:4:2])
    code, _, errors = run(capsys, "evaluate", tmp_path / "m", new)
    assert code == 0, errors
    predict(capsys, new)
    predicted = set(pl.read_csv(tmp_path / "p.csv", infer_schema_length=0)["prediction"])
    assert {label.lower() for label in predicted} <= {label.lower() for label in labels}


def test_values_not_seen_in_training_are_told(capsys, tmp_path):
    towns = np.array(["Rome", "Oslo"])[np.arange(ROWS) % 2]
    train(capsys, tmp_path, "--missing", "fill", town=towns, x=X, y=Y)
    new = write(tmp_path / "new.csv", town=["Bonn", "Ulm", "Oslo"], x=X[:3])
    _, output, _ = run(capsys, "predict", tmp_path / "m", new, "--out", tmp_path / "p.csv")
    line = "column 'town' has 'Bonn', 'Ulm' in 2 rows, not seen in training: taken as missing"
    assert line in output


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (["1", "big"], "column 'x' has 'big' in line 3, not a number"),
        (["1", "-"], "column 'x' has no value in line 3"),
        (["01", "02"], None),
        (["-", "-"], "column 'x' has no value in line 2"),
        (["", ""], "column 'x' has no value in line 2"),
    ],
)
def test_what_was_a_number_must_be_one(capsys, plain, x, message):
    new = write(plain / "new.csv", x=x, y=["?", "junk"])  # a target that predict does not read
    code, errors = predict(capsys, new)
    assert code == (2 if message else 0) and (message or "") in errors


# --- headers, line ends ---


@pytest.mark.parametrize(("line_end", "bom"), [("\n", "\ufeff"), ("\r\n", ""), ("\r", "")])
def test_headers_and_line_ends_of_any_kind(capsys, tmp_path, line_end, bom):
    names = ['"""furnace"""', "is_duplicated_order", "is_duplicated_0", '"a, b"', '" y"']
    rows = [",".join(names)] + [
        f"{x},{i % 3},{i % 5},{i % 7},{y}" for i, (x, y) in enumerate(zip(X, Y, strict=True))
    ]
    (tmp_path / "t.csv").write_bytes((bom + line_end.join(rows)).encode())
    _, model = train_file(capsys, tmp_path / "t.csv", target=" y")
    assert taken(model) == ['"furnace"', "is_duplicated_order", "is_duplicated_0", "a, b"]
    assert model.about.rows + model.about.held_out == ROWS


def test_an_empty_line_is_a_missing_value_of_the_only_column(capsys, plain):
    (plain / "new.csv").write_text("x\n1\n\n2\n")
    code, errors = predict(capsys, plain / "new.csv")
    assert code == 2 and "column 'x' has no value in line 3" in errors


def test_a_separator_at_the_end_of_lines_is_an_empty_column(capsys, tmp_path):
    output, model = train(capsys, tmp_path, **{"x": X, "y": Y, "": [""] * ROWS})
    assert taken(model) == ["x"] and "one value only: ''" in output


@pytest.mark.parametrize("name", ["", "is_duplicated_x"])
def test_columns_of_one_name_are_refused(capsys, tmp_path, name):
    path = tmp_path / "t.csv"
    path.write_text(f"{name},{name},y\n1,2,3\n")
    output, model = train_file(capsys, path)
    assert model is None and f"two columns with the name {name!r}" in output


# --- indices, identifiers, dates ---

IDS = {
    "": np.arange(ROWS),
    "Unnamed: 0": RNG.permutation(1000)[:ROWS],
    "id": RNG.permutation(1000)[:ROWS],
    "PassengerId": np.arange(ROWS) + 100,
    "customer_id": RNG.permutation(1000)[:ROWS],
    "patient": RNG.permutation(ROWS) + 1,
    "name": [f"n{i}" for i in range(ROWS)],
}
OTHERS = {
    "year": np.arange(ROWS) + 1980,
    "width": RNG.permutation(1000)[:ROWS],
    "x_id": np.arange(ROWS) // 2,
    "grid": RNG.permutation(1000)[:ROWS],
    "size": np.arange(ROWS) + 0.5,
    "version": ["1.2.3", "1.2.4"] * 20,
}


@pytest.mark.parametrize("name", IDS)
def test_indices_and_identifiers_are_left_out_unless_wanted(capsys, tmp_path, name):
    output, model = train(capsys, tmp_path, **{name: IDS[name], "x": X, "y": Y})
    words = f"{name!r} (--keep {shlex.quote(name)} takes it)"
    assert f"left out, as they number or name the rows: {words}" in output
    assert taken(model) == ["x"]
    new = write(tmp_path / "new.csv", x=X[:3])  # without the identifier
    assert predict(capsys, new)[0] == 0
    assert predict(capsys, tmp_path / "t.csv")[0] == 0
    first = (tmp_path / "p.csv").read_text().splitlines()[1].split(",")[0]
    assert first == str(IDS[name][0])  # copied
    _, model = train(capsys, tmp_path, "--keep", name, **{name: IDS[name], "x": X, "y": Y})
    assert taken(model) == [name, "x"]


@pytest.mark.parametrize("name", OTHERS)
def test_columns_that_identify_nothing_are_taken(capsys, tmp_path, name):
    output, model = train(capsys, tmp_path, **{name: OTHERS[name], "y": Y})
    assert taken(model) == [name] and "left out" not in output


DAYS = pl.date_range(pl.date(2023, 12, 20), pl.date(2024, 1, 28), eager=True)
FORMS = ["%Y-%m-%d", "%d.%m.%Y", "%m/%d/%Y", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%SZ", None]


@pytest.mark.parametrize("form", FORMS)
def test_dates_are_announced_and_become_numbers_when_wanted(capsys, tmp_path, form):
    days = DAYS.cast(pl.Datetime).dt.strftime(form) if form else DAYS
    table = pl.DataFrame({"day": days, "x": X, "y": Y})
    path = tmp_path / ("t.csv" if form else "t.parquet")
    (table.write_csv if form else table.write_parquet)(path)
    output, model = train_file(capsys, path)
    assert "left out, as they are dates: 'day' (--dates takes them)" in output
    assert taken(model) == ["x"]
    _, model = train_file(capsys, path, "--dates")
    assert taken(model) == ["x", "day: days", "day: month", "day: weekday"]
    table[:1].write_csv(tmp_path / "one.csv")  # 05/01/2024 alone may be in May
    assert inputs(model, tmp_path / "one.csv")[0, 1:].tolist() == [19711, 12, 3]
    table.with_columns(day=pl.lit("soon")).write_csv(tmp_path / "bad.csv")
    code, errors = predict(capsys, tmp_path / "bad.csv")
    assert code == 2 and "column 'day' has 'soon' in line 2, not a date as %" in errors


def test_dates_whose_day_may_be_the_month_are_refused(capsys, tmp_path):
    days = [f"{1 + i % 12:02}/{1 + i % 11:02}/2024" for i in range(ROWS)]
    output, model = train(capsys, tmp_path, "--dates", day=days, x=X, y=Y)
    assert model is None and "column 'day' has dates such as '01/01/2024'" in output
    output, model = train(capsys, tmp_path, day=days, x=X, y=Y)
    assert taken(model) == ["x"] and "as they are dates: 'day'" in output


def test_large_numbers_are_learned_from_or_refused_by_column(capsys, tmp_path):
    x = [f"{value:.2f}e200" for value in X]
    _, model = train(capsys, tmp_path, x=x, y=Y)
    assert all(np.isfinite(value) for value in model.about.scores.values())
    output, model = train(capsys, tmp_path, x=Y, y=x)
    assert model is None and "column 'y' has " in output and "in line 2, too large" in output
