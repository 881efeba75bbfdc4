"""Every experiment runs in ``--smoke`` through its ``main`` and leaves what it promises."""

import ast
import dataclasses
import importlib
import json
import re
from pathlib import Path

import pytest
import torch
import tyro

FOLDER = Path(__file__).parents[1] / "experiments"
EXPERIMENTS = ["choose_defaults", "quickstart"]  # a new experiment is added here


@pytest.fixture
def experiment(request, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)  # as when the file is run
    return importlib.import_module(request.param)


@pytest.fixture
def common(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("_common")


def test_every_experiment_is_listed():
    files = {path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_")}
    assert files == set(EXPERIMENTS)


@pytest.mark.parametrize("experiment", EXPERIMENTS, indirect=True)
def test_smoke_run_leaves_config_metrics_pictures_and_report(experiment, tmp_path):
    results = experiment.main(experiment.Config(smoke=True, output=tmp_path, seed=7))

    written = json.loads((tmp_path / "metrics.json").read_text())
    assert written == json.loads(json.dumps(results))
    assert written["seed"] == 7 and written["seconds"] > 0 and "torch" in written["versions"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert set(config) == {field.name for field in dataclasses.fields(experiment.Config)}

    html = (tmp_path / "report.html").read_text()
    assert html.count("data:image/png;base64,") == len(list(tmp_path.glob("*.png"))) > 0
    assert not re.search(r"(src|href)=\"(?!data:)|url\(|@import", html), "needs other files"


@pytest.mark.parametrize("experiment", EXPERIMENTS, indirect=True)
def test_every_option_has_help(experiment, capsys):
    with pytest.raises(SystemExit):
        tyro.cli(experiment.Config, args=["--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for field in dataclasses.fields(experiment.Config):
        assert re.search(rf"--{field.name.replace('_', '-')}\b[^(]*[a-z]", text), field.name
    source = Path(experiment.__file__).read_text()
    config = next(n for n in ast.parse(source).body if getattr(n, "name", "") == "Config")
    for value, line in zip(config.body[1::2], config.body[2::2], strict=True):
        assert isinstance(value, ast.AnnAssign) and isinstance(line.value, ast.Constant)


def test_digits_are_split_once_for_all_and_by_class(common):
    (x, y), (x_test, y_test) = common.digits()
    assert x.shape == (1347, 64) and x_test.shape == (450, 64)
    assert 0 <= x.min() and x.max() == 1
    share = len(y_test) / (len(y) + len(y_test))
    for label in range(10):
        here, there = int((y == label).sum()), int((y_test == label).sum())
        assert abs(there - share * (here + there)) < 1
    again = common.digits()
    assert again[1][0].equal(x_test) and again[1][1].equal(y_test)
    rows = torch.cat([x, x_test]).unique(dim=0)
    assert len(rows) == 1797, "an image stands in both parts, or twice"


@pytest.mark.parametrize("experiment", ["quickstart"], indirect=True)
def test_quickstart_foreign_inputs_have_the_range_of_digits(experiment):
    x = torch.rand(450, 64)
    foreign = experiment.foreign_inputs(x, seed=0)
    for each in foreign.values():
        assert each.shape[1] == 64 and each.isfinite().all() and each.min() >= 0 and each.max() <= 1
    shuffled = foreign["shuffled digits"]
    assert shuffled.sort(-1).values.equal(x.sort(-1).values) and not shuffled.equal(x)
    assert len(foreign["photograph patches"]) == (427 // 32) * (640 // 32)


def test_table_is_aligned_markdown(common):
    table = common.Table(("name", "%"), [("a", "10.0"), ("long one", "7")])
    assert str(table).splitlines() == [
        "| name     |    % |",
        "| -------- | ---: |",
        "| a        | 10.0 |",
        "| long one |    7 |",
    ]
