# SPDX-License-Identifier: Apache-2.0
"""The command line: every command on small tables, and what it says of bad ones."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace as Namespace
from typing import get_args

import numpy as np
import polars as pl
import pytest
import sklearn.metrics
import torch
import tyro

from pyro_bbb import __version__, guides
from pyro_bbb.apps import column_encoding as columns
from pyro_bbb.apps import main, table_commands
from pyro_bbb.apps.command_line import COMMANDS, Guide
from pyro_bbb.apps.table_model import About, Model
from pyro_bbb.apps.table_scores import SCORE_NAMES, cautions, score, with_refusal
from pyro_bbb.sklearn import _posterior

RNG = np.random.default_rng(0)
AREA = RNG.uniform(30, 200, 120)
TOWN = RNG.choice(["Bonn", "Oslo", "Rome"], 120)
HOUSES = pl.DataFrame(
    {
        "id": [f"h{i}" for i in range(120)],
        "area": AREA,
        "rooms": RNG.integers(1, 6, 120),
        "town": TOWN,
        "garden": RNG.choice([True, False], 120),
        "country": ["EU"] * 120,
        "price": 1000 * AREA + 20_000 * (TOWN == "Oslo") + RNG.normal(0, 3000, 120),
    }
)


def run(capsys, *words):
    """Exit code, standard output and standard error of one command."""
    try:
        code = main([str(word) for word in words])
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def as_json(capsys, *words):
    code, out, err = run(capsys, *words, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tables, and a model of each task trained on them."""
    folder = tmp_path_factory.mktemp("cli")
    HOUSES.write_csv(folder / "houses.csv")
    HOUSES.write_parquet(folder / "houses.parquet")
    train = ["train", str(folder / "houses.csv"), "--drop", "id", "--epochs", "40", "--quiet"]
    assert main([*train, "--target", "price", "--out", str(folder / "price")]) == 0
    assert main([*train, "--target", "town", "--out", str(folder / "town")]) == 0
    return folder


# --- training ---


def test_train_says_what_it_found(capsys, folder, tmp_path):
    words = ("train", folder / "houses.parquet", "--target", "price", "--drop", "id", "--epochs", 2)
    code, out, err = run(capsys, *words, "--out", tmp_path / "model")
    assert code == 0 and err == ""
    assert "'price' makes this a regression: it holds 120 different numbers" in out
    assert "left out, as they have one value only: 'country'" in out
    assert "120 rows; 4 columns become 6 numbers" in out
    assert "scores on 12 rows held out" in out and "RMSE" in out
    about = Model.load(tmp_path / "model").about
    assert (about.task, about.rows, about.held_out) == ("regression", 108, 12)
    assert about.scores.keys() - {"helpful"} <= SCORE_NAMES.keys()


@pytest.mark.slow
def test_chains_are_saved_asked_and_reported(capsys, folder, tmp_path):
    table, model = folder / "houses.csv", tmp_path / "m"
    words = ("--target", "price", "--drop", "id", "--inference", "chains", "--seconds", 2)
    code, out, err = run(capsys, "train", table, *words, "--out", model)
    assert code == 0 and re.search(r"posterior by 64 chains of \d+ draws \(R-hat .*ESS", out), out
    assert "rust the band on the data" in out
    scores = as_json(capsys, "evaluate", model, table)["scores"]
    assert scores["r2"] > 0.8
    assert as_json(capsys, "predict", model, table, "--out", tmp_path / "p.csv")["rows"] == 120
    as_json(capsys, "report", model, table, "--out", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "The network has 401 weights, their posterior by 64 chains" in page
    assert Model.load(model).about.verdict in page
    words = ("prune", model, "--data", table, "--out", tmp_path / "small")
    code, _, err = run(capsys, *words)
    assert code == 2 and "pruning needs: train it with --inference variational" in err


def test_options_of_training_reach_the_guide(capsys, folder, tmp_path):
    words = ("train", folder / "houses.csv", "--target", "price", "--drop", "id", "--epochs", 1)
    for options, guide, temperature in (
        (("--guide", "low_rank"), guides.LowRank, 1.0),
        (("--temperature", 0.1), guides.AutoSoftplusNormal, 0.1),
        (("--ensemble", 3), guides.Ensemble, 1.0),
        (("--ensemble", 2, "--guide", "softplus_normal"), guides.Ensemble, 1.0),
    ):
        as_json(capsys, *words, *options, "--out", tmp_path / "m", "--force")
        estimator = Model.load(tmp_path / "m").estimator
        posterior = estimator.posterior_.guide
        assert type(posterior) is guide and estimator.temperature == temperature
        if guide is guides.Ensemble:
            assert posterior.size == options[1] and estimator.guide == "ensemble"
    assert type(posterior.members[0]) is guides.AutoSoftplusNormal


def test_each_guide_is_one_of_the_librarys():
    assert set(get_args(Guide)) == guides.GUIDES.keys() - {"ensemble", "vbll"}


@pytest.mark.parametrize(
    ("values", "task"),
    [
        (["a", "b"] * 20, "classification"),
        ([True, False] * 20, "classification"),
        ([0, 1, 2, 1] * 10, "classification"),
        ([0.0, 1.0] * 20, "classification"),
        ([0.5, 1.0] * 20, "regression"),
        (list(range(40)), "regression"),
        ([1, 2, 3, 4] * 2, "regression"),  # too few rows to be sure
    ],
)
def test_the_task_is_recognised(values, task):
    assert columns.recognise(pl.Series("y", values))[0] == task


def test_every_class_is_in_training_however_rare(capsys, tmp_path):
    table = pl.DataFrame({"x": np.arange(60.0), "y": ["a"] * 58 + ["b", "c"]})
    table.write_csv(tmp_path / "t.csv")
    words = ("train", tmp_path / "t.csv", "--target", "y", "--epochs", 1, "--held-out", 0.9)
    assert as_json(capsys, *words, "--out", tmp_path / "m")["held_out"] > 40
    assert list(Model.load(tmp_path / "m").estimator.classes_) == ["a", "b", "c"]


# --- predictions ---


def test_predictions_of_numbers(capsys, folder, tmp_path):
    out = tmp_path / "p.csv"
    words = ("predict", folder / "price", folder / "houses.csv", "--out", out)
    summary = as_json(capsys, *words)
    table = pl.read_csv(out)
    names = "id country price prediction lower upper aleatoric epistemic refused"
    assert table.columns == names.split()
    assert table["id"].to_list() == HOUSES["id"].to_list()
    assert summary["rows"] == 120 and summary["refused"] == table["refused"].sum()
    model = Model.load(folder / "price")
    mean, std = model.estimator.predict(model.inputs(HOUSES, print), return_std=True)
    np.testing.assert_allclose(table["prediction"], mean, rtol=5e-6)  # six digits
    np.testing.assert_allclose(np.hypot(table["aleatoric"], table["epistemic"]), std, rtol=1e-5)
    texts = pl.read_csv(out, infer_schema_length=0)["prediction"]
    digits = [len(v.lstrip("-0.").removesuffix(".0").replace(".", "")) for v in texts]
    assert max(digits) == 6
    inside = (table["lower"] <= HOUSES["price"]) & (HOUSES["price"] <= table["upper"])
    assert inside.mean() > 0.8 and (table["lower"] < table["prediction"]).all()
    assert model.about.uncertainty == "epistemic"  # of equal noise, both rank the same
    refused = table["epistemic"] > model.about.threshold
    assert refused.to_list() == table["refused"].to_list()


def test_columns_to_copy_are_chosen(capsys, folder, tmp_path):
    out, table = tmp_path / "p.csv", folder / "houses.csv"
    words = ("predict", folder / "price", table, "--out", out, "--force", "--keep")
    for names in ((), ("town", "id")):
        as_json(capsys, *words, *names)
        assert pl.read_csv(out).columns[: len(names) + 1] == [*names, "prediction"]
    HOUSES.with_columns(lower=1.0).write_csv(tmp_path / "again.csv")
    words = ("predict", folder / "price", tmp_path / "again.csv", "--out", out, "--force")
    code, _, err = run(capsys, *words)
    assert code == 2 and "columns ['lower'] of the table are those of predictions, too" in err


def test_predictions_of_classes(capsys, folder, tmp_path):
    out = tmp_path / "p.parquet"
    as_json(capsys, "predict", folder / "town", folder / "houses.parquet", "--out", out)
    table = pl.read_parquet(out)
    probs = table.select("p(Bonn)", "p(Oslo)", "p(Rome)").to_numpy()
    np.testing.assert_allclose(probs.sum(1), 1.0, atol=2e-6)
    np.testing.assert_allclose(probs.max(1), table["probability"])
    towns = ["Bonn", "Oslo", "Rome"]
    assert table["prediction"].to_list() == [towns[i] for i in probs.argmax(1)]
    for row, names in zip(probs, table["set"], strict=True):  # the fewest that reach the level
        inside = [row[towns.index(name)] for name in names.split("|")]
        assert inside == sorted(row, reverse=True)[: len(inside)]
        assert sum(inside) > 0.9 - 1e-5 and sum(inside[:-1]) < 0.9 + 1e-5


def test_rows_far_from_training_are_refused(capsys, folder, tmp_path):
    far = HOUSES.with_columns(area=pl.col("area") * 100).drop("price")
    far.write_csv(tmp_path / "far.csv")
    words = (folder / "price", tmp_path / "far.csv", "--out", tmp_path / "p.csv")
    assert as_json(capsys, "predict", *words)["refused"] == 120


# --- evaluation, pruning, report ---


def test_evaluate_scores_what_predict_writes(capsys, folder, tmp_path):
    scores = as_json(capsys, "evaluate", folder / "price", folder / "houses.csv")["scores"]
    words = (folder / "price", folder / "houses.csv", "--out", tmp_path / "p.csv", "--quiet")
    run(capsys, "predict", *words)
    table, y = pl.read_csv(tmp_path / "p.csv"), HOUSES["price"]
    rmse = ((table["prediction"] - y) ** 2).mean() ** 0.5
    assert scores["rmse"] == pytest.approx(rmse, rel=1e-5)  # the file has six digits
    inside = (table["lower"] <= y) & (y <= table["upper"])
    assert scores["coverage"] == pytest.approx(inside.mean())
    assert scores["width"] == pytest.approx((table["upper"] - table["lower"]).mean())
    assert scores["refused"] == pytest.approx(table["refused"].mean())


def test_evaluate_scores_classes(capsys, folder, tmp_path):
    scores = as_json(capsys, "evaluate", folder / "town", folder / "houses.csv")["scores"]
    words = (folder / "town", folder / "houses.csv", "--out", tmp_path / "p.csv", "--quiet")
    run(capsys, "predict", *words)
    table, y = pl.read_csv(tmp_path / "p.csv"), HOUSES["town"]
    assert scores["accuracy"] == pytest.approx((table["prediction"] == y).mean())
    true = [table[f"p({town})"][i] for i, town in enumerate(y)]
    assert scores["nll"] == pytest.approx(-np.log(true).mean())
    sets = [text.split("|") for text in table["set"]]
    assert scores["set_coverage"] == pytest.approx(
        np.mean([town in allowed for town, allowed in zip(y, sets, strict=True)])
    )
    assert scores["set_size"] == pytest.approx(np.mean([len(s) for s in sets]))
    printed = run(capsys, "evaluate", folder / "town", folder / "houses.csv")[1]
    for town, counts in scores["classes"].items():
        right = f"{counts['right']} ({counts['right'] / counts['rows']:.0%})"
        assert re.search(
            rf"{town} +{counts['rows']} +{re.escape(right)} +{counts['answered']} ", printed
        )


def table_model(classes=(), **about):
    """A model that knows its classes, and about its table what is given."""
    task = "classification" if classes else "regression"
    fixed = {"target": "y", "missing": "refuse", "rows": 100, "held_out": 100}
    described = About(**{**fixed, "task": task, "level": 0.9, **about})
    return Model(Namespace(classes_=list(classes)), described)


def rows_of(probs, y, **uncertainties):
    probs, y = torch.as_tensor(probs), torch.as_tensor(y)
    loss = (probs.argmax(-1) != y).double()
    log_prob = probs.gather(1, y[:, None])[:, 0].log()
    return {"probs": probs, "y": y, "loss": loss, "log_prob": log_prob, **uncertainties}


def test_scores_of_rare_classes_are_sklearns():
    probs = np.random.default_rng(0).dirichlet([8.0, 0.5, 0.5, 0.3], 400)
    y = np.array([np.random.default_rng(i).choice(4, p=p) for i, p in enumerate(probs)])
    total = torch.tensor(1 - probs.max(1))
    model = table_model("abcd", threshold=0.15)
    scores, right = score(rows_of(probs, y, total=total), model), probs.argmax(1) == y
    counts, answered = scores["classes"], total.numpy() <= 0.15
    recall = sklearn.metrics.recall_score(y, probs.argmax(1), average=None)
    assert [row["right"] / row["rows"] for row in counts.values()] == pytest.approx(recall)
    recall = sklearn.metrics.recall_score(
        y[answered], probs[answered].argmax(1), average=None, labels=range(4), zero_division=0
    )
    assert [
        row["answered_right"] / max(1, row["answered"]) for row in counts.values()
    ] == pytest.approx(recall)
    area = sklearn.metrics.roc_auc_score(y, probs, multi_class="ovr")
    assert scores["auroc"] == pytest.approx(area)
    assert scores["base_rate"] == np.bincount(y).max() / 400
    assert scores["accuracy_answered"] == pytest.approx(right[answered].mean())
    assert scores["accuracy_refused"] == pytest.approx(right[~answered].mean())


def test_the_uncertainty_that_ranks_the_errors_is_chosen():
    """The other ranks them last; the threshold refuses 5 % by the one that is chosen."""
    y = torch.arange(100) // 90
    probs = torch.tensor([[0.9, 0.1]]).repeat(100, 1)  # wrong are the last ten rows
    good, bad = torch.linspace(0, 1, 100).double(), torch.linspace(1, 0, 100).double()
    for name, worse in (("total", "epistemic"), ("epistemic", "total")):
        model = with_refusal(table_model("ab"), rows_of(probs, y, **{name: good, worse: bad}))
        assert model.about.uncertainty == name and model.about.threshold == good[94]
        scores = model.about.scores
        assert scores["refused"] == 0.05 and scores["accuracy_refused"] == 0
        assert scores["refusal_p"] == 0.001  # exactly 1 of 3e5
        errors = {"loss": y.double(), "mean": y * 1.0, "y": torch.zeros(100)}
        ends = {"lower": -torch.ones(100), "upper": torch.ones(100), "log_prob": torch.zeros(100)}
        model = with_refusal(table_model(), errors | ends | {name: good, worse: bad})
        assert model.about.uncertainty == name and model.about.scores["rmse_refused"] == 1
    first, second = (table_model(classes) for classes in ("ab", ""))
    equal = {"total": good, "epistemic": good}
    assert with_refusal(first, rows_of(probs, y, **equal)).about.uncertainty == "total"
    assert with_refusal(second, errors | ends | equal).about.uncertainty == "epistemic"


def test_refusal_that_does_not_help_is_warned_of():
    y = torch.arange(100) // 90
    probs = torch.tensor([[0.9, 0.1]]).repeat(100, 1)
    unrelated = torch.arange(100).double() * 37 % 100
    scores = score(rows_of(probs, y, total=unrelated), table_model("ab", threshold=94))
    commonest, refusal = cautions(scores)
    assert "not above that of always predicting the commonest class" in commonest
    assert refusal == (
        "It refuses 5.0% of rows, which are not shown to be worse than those answered: accuracy "
        "100.0% against 89.5% (p = 1)"
    )
    probs[90:] = torch.tensor([0.4, 0.6])
    informed = torch.arange(100).double()
    scores = score(rows_of(probs, y, total=informed), table_model("ab", threshold=94))
    assert scores["accuracy"] == 1 and cautions(scores)[-1] == (
        "It refuses 5 of the 10 rows of 'b', but 5.0% of all"
    )
    assert cautions(score(rows_of(probs, y, total=informed), table_model("ab"))) == []
    single = rows_of(probs[:90], y[:90], total=informed[:90])  # of one class, without an AUROC
    assert cautions(score(single, table_model("ab"))) == []


def test_thresholds_that_help_are_offered():
    """The ten wrong rows are the 10th to 19th least certain of 100."""
    y = torch.arange(100) // 90
    probs = torch.tensor([[0.9, 0.1]]).repeat(100, 1)
    total = torch.arange(100).double()
    total[90:] = 80 + total[90:] / 100
    model = with_refusal(table_model("ab"), rows_of(probs, y, total=total, epistemic=-total))
    assert model.about.scores["helpful"] == [0.8, 0.7, 0.5]
    assert cautions(model.about.scores)[-1].endswith(
        "; refusal helps with --answered 0.8 or 0.7 or 0.5"
    )
    right = with_refusal(table_model("ab"), rows_of(probs, 0 * y, total=total, epistemic=total))
    assert right.about.scores["helpful"] == []
    assert cautions(right.about.scores)[-1].endswith("; none tried helps")


def test_prune_keeps_the_share_asked_for(capsys, folder, tmp_path):
    table = ("--data", folder / "houses.csv")
    words = ("prune", folder / "price", "--out", tmp_path / "m", "--fraction", 0.5, *table)
    summary = as_json(capsys, *words)
    assert summary["left"] == summary["weights"] - round(0.5 * summary["weights"])
    after = as_json(capsys, "evaluate", tmp_path / "m", folder / "houses.csv")["scores"]
    assert after == summary["after"] != summary["before"]
    before = as_json(capsys, "evaluate", folder / "price", folder / "houses.csv")["scores"]
    assert before == summary["before"]
    about = Model.load(tmp_path / "m").about
    assert about.pruned == 0.5 and about.held_out == 120  # whose scores set the threshold
    assert summary["threshold"] == about.threshold != Model.load(folder / "price").about.threshold
    assert about.scores["refused"] == pytest.approx(0.05, abs=0.01)
    code, _, err = run(capsys, *words[:4])
    assert code == 2 and "--data" in err


@pytest.mark.parametrize("model", ["price", "town"])
def test_report_is_one_page_that_needs_no_other_file(capsys, folder, tmp_path, model):
    path = tmp_path / "r.html"
    summary = as_json(capsys, "report", folder / model, folder / "houses.csv", "--out", path)
    page = path.read_text()
    pictures, tables = {"price": (4, 4), "town": (3, 5)}[model]
    assert page.count("<img") == pictures and page.count("<table") == tables
    assert all(
        x.startswith("data:image/png;base64,") for x in re.findall('(?:src|href)="(.*?)"', page)
    )
    assert f"{summary['scores']['refused']:.4g}" in page and "rust the band" in page
    assert page.count("Warning: ") == len(cautions(summary["scores"]))
    assert page.count("rows, which are ") == 1  # as a verdict or as a warning
    assert re.search(r'<h1>.*</h1>\n<p class="verdict">It', page)
    assert re.search(r"<td>line \d+</td><td>h\d+</td>", page)  # identifiers, of houses.csv
    run(capsys, "report", folder / model, "--out", path, "--quiet", "--force")  # no table
    assert "least certain" not in path.read_text()


def test_what_a_table_says_is_no_markup(capsys, tmp_path):
    name = "<script>alert(1)</script>"
    table = pl.DataFrame({name: np.arange(60.0), "y": np.arange(60.0) % 7 + 0.5})
    table.write_csv(tmp_path / "t.csv")
    words = ("--target", "y", "--epochs", 1, "--quiet", "--out", tmp_path / "m")
    assert run(capsys, "train", tmp_path / "t.csv", *words)[0] == 0
    run(capsys, "report", tmp_path / "m", "--out", tmp_path / "r.html")
    assert "<script>" not in (tmp_path / "r.html").read_text()


# --- missing values, and other values that cannot be used ---


def test_columns_are_numbers_and_texts_by_name():
    table = pl.DataFrame({"n": [1, 2, None], "b": [True, False, True], "t": ["x", "z", None]})
    learned, constant = columns.learn(table.with_columns(same=pl.lit(0)))
    assert learned == {"n": None, "b": None, "t": ["x", "z"]} and constant == ["same"]
    shuffled = table.select("t", "b", "n").with_columns(more=pl.lit(0))
    selected = columns.select(shuffled, learned, "fill", print)
    assert selected.equals(table.with_columns(pl.col("n", "b").cast(float)))


def csv(**changed):
    """The table as CSV with some columns replaced; None leaves one out."""
    table = HOUSES.drop("id", *(name for name, value in changed.items() if value is None))
    new = {name: pl.Series(value) for name, value in changed.items() if value is not None}
    return table.with_columns(**new).write_csv()


def at(row, value, name):
    """A column with another value in one row, counted from 1."""
    values = HOUSES[name].to_list()
    return [*values[: row - 1], value, *values[row:]]


TOWNS = [f"town {i // 2}" for i in range(120)]
TIMES = pl.Series(np.arange(120)).cast(pl.Time)
TABLES = {  # what is wrong, and what is said of it
    "a gap": (csv(rooms=at(7, None, "rooms")), "column 'rooms' has no value in line 8: fill"),
    "infinite": (csv(area=at(4, float("inf"), "area")), "column 'area' has inf in line 5"),
    "no target": (csv(price=at(5, None, "price")), "has no value in line 6: leave out the rows"),
    "infinite target": (
        csv(price=at(5, float("inf"), "price")),
        "column 'price' has inf in line 6",
    ),
    "one target": (csv(price=["a"] * 120), "column 'price' has one value only, 'a'"),
    "no such target": (csv(price=None), "there is no column 'price', only 'area', 'rooms'"),
    "free text": (csv(town=TOWNS), "'town' has 60 different texts, more than 50: .* --drop town"),
    "nothing to learn from": ("price\n1.5\n2.5\n", "there is no column to learn from"),
    "few rows": ("x,price\n1,1.5\n2,2.5\n", "has 2 rows, fewer than the 4"),
    "no rows": ("x,price\n", "has no rows"),
    "empty": ("", "cannot be read as CSV"),
}


@pytest.mark.parametrize("case", TABLES)
def test_bad_tables_are_named_by_row_and_column(capsys, tmp_path, case):
    content, message = TABLES[case]
    (tmp_path / "t.csv").write_text(content)
    words = ("--target", "price", "--out", tmp_path / "m", "--epochs", 1)
    code, _, err = run(capsys, "train", tmp_path / "t.csv", *words)
    assert code == 2 and re.search(f"^error: .*{message}", err), err
    assert not (tmp_path / "m").exists()


def test_parquet_columns_of_other_types_are_named(capsys, tmp_path):
    HOUSES.drop("id").with_columns(day=TIMES).write_parquet(tmp_path / "t.parquet")
    words = ("--target", "price", "--out", tmp_path / "m")
    code, _, err = run(capsys, "train", tmp_path / "t.parquet", *words)
    assert code == 2 and "column 'day' is of type Time" in err
    (tmp_path / "no.parquet").write_text("x,y\n1,2\n")
    code, _, err = run(capsys, "train", tmp_path / "no.parquet", *words)
    assert code == 2 and "cannot be read as Parquet" in err


NEW = {  # of new rows, for a trained model
    "a gap": (csv(area=at(2, None, "area")), "column 'area' has no value in line 3"),
    "a new town": (
        csv(town=at(2, "Graz", "town")),
        "'town' has 'Graz' in line 3, which was not in",
    ),
    "no column": (csv(area=None), "the table has no column 'area', which the model was trained on"),
}


@pytest.mark.parametrize("case", NEW)
def test_bad_new_rows_are_named_by_row_and_column(capsys, folder, tmp_path, case):
    content, message = NEW[case]
    (tmp_path / "t.csv").write_text(content)
    out = tmp_path / "p.csv"
    code, _, err = run(capsys, "predict", folder / "price", tmp_path / "t.csv", "--out", out)
    assert code == 2 and message in err and not out.exists()


def test_a_new_class_is_named(capsys, folder, tmp_path):
    (tmp_path / "t.csv").write_text(csv(town=at(6, "Graz", "town")))
    code, _, err = run(capsys, "evaluate", folder / "town", tmp_path / "t.csv")
    assert code == 2 and "column 'town' has 'Graz' in line 7, which is none of the classes" in err


# --- bad options, models, exits ---

OPTIONS = {
    "held out": (["--held-out", "1"], "--held-out must be between 0 and 1, got 1.0"),
    "level": (["--level", "0"], "--level must be between 0 and 1"),
    "drop": (["--drop", "nothing"], "--drop: there is no column 'nothing'"),
    "separator": (["--separator", ""], "--separator must be one character"),
    "prior": (["--prior", "nice"], "prior must be one of"),
    "noise": (["--noise", "nice"], "noise must be a number"),
    "hidden": (["--hidden", "8", "0"], "--hidden must be at least 1, got 8 0"),
    "epochs": (["--epochs", "0"], "--epochs must be at least 1, got 0"),
    "temperature": (["--temperature", "0"], "--temperature must be positive and finite, got 0.0"),
    "ensemble": (["--ensemble", "0"], "--ensemble must be at least 1, got 0"),
    "guide": (["--guide", "nice"], "invalid choice 'nice' for argument '--guide'"),
    "guide of chains": (
        ["--guide", "delta", "--inference", "chains"],
        "guide must stay at its default for inference='chains', which does not use it, got 'delta'",
    ),
    "seed": (["--seed", "-1"], "--seed must be in [0, 2**32), got -1"),
    "task": (
        ["--task", "regression", "--target", "town"],
        f"'town' has '{TOWN[0]}' in line 2, not a number",
    ),
    "noise of classes": (["--target", "town", "--noise", "latent"], "--noise is an option of"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_bad_options_are_named(capsys, folder, tmp_path, case):
    words, message = OPTIONS[case]
    target = () if "--target" in words else ("--target", "price")
    base = ("train", folder / "houses.csv", "--out", tmp_path / "m", *target)
    drop = () if case == "drop" else ("--drop", "id")
    code, _, err = run(capsys, *base, *drop, *words)
    assert code == 2 and message in err, err


@pytest.mark.parametrize(
    "words", [[], ["bogus"], ["train"], ["predict", "x"], ["train", "x", "--epochs", "few"]]
)
def test_wrong_usage_exits_with_2(capsys, words):
    assert run(capsys, *words)[0] == 2


def test_bad_models_and_places_are_named(capsys, folder, tmp_path):
    table, out = folder / "houses.csv", tmp_path / "p.csv"
    code, text, err = run(capsys, "predict", tmp_path, table, "--out", out, "--json")
    assert code == 2 and "holds no model" in err and "holds no model" in json.loads(text)["error"]
    Model.load(folder / "price").estimator.save(tmp_path / "other")
    code, _, err = run(capsys, "predict", tmp_path / "other", table, "--out", out)
    assert code == 2 and "`train` has not made" in err
    broken = tmp_path / "broken"
    shutil.copytree(folder / "price", broken)
    (broken / "spec.json").write_text("{}")
    code, _, err = run(capsys, "predict", broken, table, "--out", out)
    assert code == 2 and "spec.json" in err
    for place, message in ((tmp_path / "no" / "p.csv", "must be a file in a folder that exists"),):
        code, _, err = run(capsys, "predict", folder / "price", table, "--out", place)
        assert code == 2 and message in err
    code, _, err = run(capsys, "predict", folder / "price", tmp_path / "none.csv", "--out", out)
    assert code == 2 and "there is no such file" in err
    words = ("--out", out, "--keep", "nothing")
    code, _, err = run(capsys, "predict", folder / "price", table, *words)
    assert code == 2 and "--keep: there is no column 'nothing'" in err
    assert not out.exists()


def test_no_file_of_a_model_is_written_over(capsys, folder, tmp_path):
    table, model, town = folder / "houses.csv", tmp_path / "price", tmp_path / "town"
    for copied in (model, town):
        shutil.copytree(folder / copied.name, copied)
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "page.html").symlink_to(model / "spec.json")
    before = {path: path.read_bytes() for m in (model, town) for path in m.iterdir()}
    for words in (
        ("report", model, "--out", town / "spec.json"),
        ("report", model, "--out", model / "new.html"),
        ("report", model, "--out", tmp_path / "page.html"),
        ("predict", model, table, "--out", model / "new.csv"),
        ("prune", model, "--data", table, "--out", tmp_path / "link" / "deep" / "er"),
        ("train", table, "--target", "price", "--out", town / "x"),
    ):
        code, _, err = run(capsys, *words, "--force")
        assert code == 2 and "is inside the model" in err, words
    assert {path: path.read_bytes() for m in (model, town) for path in m.iterdir()} == before


def test_what_cannot_be_written_is_found_before_any_work(capsys, folder, tmp_path, monkeypatch):
    table, model, taken = folder / "houses.csv", folder / "price", tmp_path / "taken"
    taken.touch()
    locked = tmp_path / "locked"
    locked.mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != locked and access(path, mode))
    monkeypatch.setattr(table_commands, "train", None)  # would be a TypeError
    for out, reason in (
        (taken, "Not a directory"),
        (tmp_path / ("m" * 300) / "x", "File name too long"),
        (f"{tmp_path}/a\0b", "null byte"),
        (locked, "no permission"),
    ):
        for words in (
            ("train", table, "--target", "price", "--force", "--out", out),
            ("play", "--no-browser", "--model", out),
            ("predict", model, table, "--force", "--out", f"{out}/x.csv"),
            ("report", model, "--force", "--out", f"{out}/x"),
        ):
            code, _, err = run(capsys, *words)
            named = reason if words[0] in ("train", "play") else "--out"
            assert code == 2 and named in err, (words, err)
    long = tmp_path / ("p" * 245 + ".csv")  # whose temporary file would have too long a name
    code, _, err = run(capsys, "predict", model, table, "--out", long)
    assert code == 2 and "File name too long" in err
    code, _, err = run(capsys, "predict", "m" * 300, table, "--out", tmp_path / "p.csv")
    assert code == 2 and "File name too long" in err


def test_nothing_is_written_over_without_force(capsys, folder, tmp_path):
    table, model = tmp_path / "t.csv", tmp_path / "price"
    shutil.copy(folder / "houses.csv", table)
    shutil.copytree(folder / "price", model)
    (tmp_path / "taken.csv").touch()
    before = table.read_bytes(), (model / "spec.json").read_bytes()
    for words, reason in (
        (("predict", model, table, "--out", table, "--force"), "must not be the input"),
        (("predict", model, table, "--out", tmp_path / "taken.csv"), "taken.csv exists"),
        (("train", table, "--target", "price", "--out", model), "price exists"),
        (("prune", model, "--out", model, "--data", table, "--force"), "must not be the input"),
        (("report", model, table, "--out", table, "--force"), "must not be the input"),
    ):
        code, _, err = run(capsys, *words)
        assert code == 2 and reason in err
    assert before == (table.read_bytes(), (model / "spec.json").read_bytes())
    words = (model, table, "--out", tmp_path / "taken.csv", "--force")
    assert run(capsys, "predict", *words)[0] == 0
    assert (tmp_path / "taken.csv").read_text()


def program(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_an_extra_that_is_not_installed_is_named():
    process = program("import sys; sys.modules['tyro'] = None; import pyro_bbb.apps")
    assert process.returncode == 1
    assert process.stderr == 'tyro is not installed: pip install "pyro-bbb[cli]"\n'
    words = "import sys; sys.modules['tyro'] = None; sys.argv[1:] = ['play']; import pyro_bbb.apps"
    assert 'pip install "pyro-bbb[play]"' in program(words).stderr


@pytest.mark.parametrize(
    ("package", "extra", "words"),
    [
        ("polars", "cli", ["train", __file__, "--target", "y", "--out", "m"]),
        ("nicegui", "play", ["play"]),
    ],
)
def test_an_extra_of_a_command_is_named(capsys, monkeypatch, package, extra, words):
    for name in list(sys.modules):
        if name.startswith(
            tuple(f"pyro_bbb.apps.{x}" for x in ("table_", "column", "csv", "play"))
        ):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    code, _, err = run(capsys, *words)
    assert code == 2
    assert err == f'error: {package} is not installed: pip install "pyro-bbb[{extra}]"\n'


def test_wrong_arguments_are_found_before_heavy_packages_are_imported(tmp_path):
    (tmp_path / "t.csv").write_text("x,y\n1,2\n")
    (tmp_path / "model").mkdir()
    table, model, out = tmp_path / "t.csv", tmp_path / "model", ["--out", str(tmp_path / "new.csv")]
    calls = [
        ["train", "no.csv", "--target", "y", *out],
        ["train", table, "--target", "y", *out, "--level", "90"],
        ["train", table, "--target", "y", *out, "--seconds", "0"],
        ["train", table, "--target", "y", *out, "--ensemble", "0"],
        ["train", table, "--target", "y", *out, "--temperature", "inf"],
        ["predict", "no model", table, *out],
        ["predict", model, table, "--out", "p.xlsx"],
        ["prune", model, *out, "--data", table, "--fraction", "2"],
        ["report", model, table, "--out", "no folder/r.html"],
    ]
    words = [list(map(str, call)) for call in calls]
    process = program(
        "import sys, pyro_bbb.apps\n"
        f"codes = [pyro_bbb.apps.main(each) for each in {[*words, ['--version']]}]\n"
        "print(codes, {'torch', 'pyro', 'polars', 'numpy', 'sklearn'} & {*sys.modules})"
    )
    said = f"pyro-bbb {__version__}\n{[*[2] * len(calls), 0]} set()\n"
    assert process.stdout == said, process.stderr


def test_what_is_wrong_with_a_table_is_found_before_torch_is_imported(tmp_path):
    (tmp_path / "t.csv").write_text('x,"the; y"\n"1\n",2\n1,slip\n' + "1.5,2.5\n" * 40)
    words = ["train", str(tmp_path / "t.csv"), "--out", str(tmp_path / "m"), "--target"]
    process = program(
        "import sys, pyro_bbb.apps\n"
        f"for target in ('The y', 'the; y'): pyro_bbb.apps.main([*{words}, target])\n"
        "print({'torch', 'pyro', 'sklearn'} & {*sys.modules})"
    )
    assert process.stdout == "set()\n", process.stderr
    near, slip = process.stderr.splitlines()
    assert near.endswith("only 'x', 'the; y'; do you mean 'the; y'?")
    assert "column 'the; y' has 'slip' in line 4, not a number" in slip  # the first row has two


def test_interrupted_work_exits_with_130(capsys, folder, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pyro_bbb.apps.table_commands.by_row", interrupt)
    code, _, err = run(capsys, "evaluate", folder / "price", folder / "houses.csv")
    assert code == 130 and err == "interrupted\n"


def test_an_interrupted_training_keeps_what_was_learned(capsys, folder, tmp_path, monkeypatch):
    fit = _posterior.fit
    monkeypatch.setattr(_posterior, "fit", lambda *a, **k: replace(fit(*a, **k), interrupted=True))
    words = ("--target", "price", "--drop", "id", "--epochs", 1, "--out", tmp_path / "m", "--json")
    code, out, _ = run(capsys, "train", folder / "houses.csv", *words)
    assert code == 130 and json.loads(out)["interrupted"]
    assert Model.load(tmp_path / "m").about.target == "price"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_help(capsys, command):
    example = COMMANDS[command].__doc__.partition("Example: pyro-bbb ")[2].strip()
    tyro.extras.subcommand_cli_from_dict(COMMANDS, args=example.split())
    code, out, _ = run(capsys, command, "--help")
    assert f"Example: pyro-bbb {command}" in out
    text = " ".join(out.replace("│", " ").split())
    assert code == 0
    for name in re.findall(r"--[a-z][a-z-]+", text.partition("options")[0]):
        assert re.search(rf"{name}\b[^(]* [a-z]+ ", text.partition("options")[2]), name
