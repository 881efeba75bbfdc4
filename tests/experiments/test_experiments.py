# SPDX-License-Identifier: Apache-2.0
"""Every experiment runs in ``--smoke`` through its ``main`` and leaves what it promises."""

import ast
import dataclasses
import json
import re
import threading
from pathlib import Path

import joblib
import pytest
import torch
import tyro

FOLDER = Path(__file__).parents[2] / "experiments"
EXPERIMENTS = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.fixture
def experiment(request, load):
    return load(request.param)


@pytest.fixture
def common(load):
    return load("_helpers.run")


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS, indirect=True)
def test_smoke_run_leaves_config_metrics_pictures_and_report(experiment, tmp_path):
    results = experiment.main(experiment.Config(smoke=True, output=tmp_path, seed=7))

    written = json.loads((tmp_path / "metrics.json").read_text())
    assert written == json.loads(json.dumps(results))
    assert written["seed"] == 7 and written["seconds"] > 0 and "torch" in written["versions"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert set(config) == {field.name for field in dataclasses.fields(experiment.Config)}

    html = (tmp_path / "report.html").read_text()
    assert html.count("data:image/png;base64,") == len(list(tmp_path.glob("*.png")))
    assert "<table>" in html
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


def test_digits_are_split_once_for_all_and_by_class(load):
    digits = load("_helpers.images").digits
    (x, y), (x_test, y_test) = digits()
    assert x.shape == (1347, 64) and x_test.shape == (450, 64)
    assert 0 <= x.min() and x.max() == 1
    share = len(y_test) / (len(y) + len(y_test))
    for label in range(10):
        here, there = int((y == label).sum()), int((y_test == label).sum())
        assert abs(there - share * (here + there)) < 1
    again = digits()
    assert again[1][0].equal(x_test) and again[1][1].equal(y_test)
    rows = torch.cat([x, x_test]).unique(dim=0)
    assert len(rows) == 1797, "an image stands in both parts, or twice"


@pytest.mark.parametrize(
    ("experiment", "option"),
    [
        ("active_learning", "rules"),
        ("mushroom_bandit", "agents"),
        ("posteriors", "problems"),
    ],
    indirect=["experiment"],
)
def test_a_name_that_is_not_known_is_refused_before_the_work(experiment, option, tmp_path):
    config = experiment.Config(output=tmp_path / "out", **{option: ("no-such",)})
    with pytest.raises(SystemExit, match=rf"^--{option} must be of .+, got no-such$"):
        experiment.main(config)
    assert not (tmp_path / "out").exists()


def test_whitening_makes_all_directions_alike_and_all_images_of_one_length(load):
    whitening = load("fashion_mnist").Whitening
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    x = torch.randn(400, 5, generator=generator, dtype=torch.float64) @ mixing + 3.0

    white = whitening.of(x, 1e-12)
    z = (x - white.mean) @ white.matrix
    torch.testing.assert_close(z.T.cov(correction=0), torch.eye(5, dtype=z.dtype))
    assert z.mean(0).abs().max() < 1e-12
    torch.testing.assert_close(white.matrix, white.matrix.T)  # no rotation: pixels stay pixels

    damped = whitening.of(x, 0.5)
    covariance = x.T.cov(correction=0)
    precision = torch.linalg.inv(covariance + 0.5 * torch.eye(5, dtype=x.dtype))
    torch.testing.assert_close(damped.matrix @ damped.matrix, precision)
    z = (x - x.mean(0)) @ damped.matrix
    seen = damped(x[:7])
    torch.testing.assert_close(seen.norm(dim=1), z.norm(dim=1).mean().expand(7))
    torch.testing.assert_close(torch.cosine_similarity(seen, z[:7]), torch.ones(7, dtype=x.dtype))


def test_table_is_aligned_markdown(load):
    table = load("_helpers.tables").Table(("name", "%"), [("a", "10.0"), ("long one", "7")])
    assert str(table).splitlines() == [
        "| name     |    % |",
        "| -------- | ---: |",
        "| a        | 10.0 |",
        "| long one |    7 |",
    ]


@pytest.fixture
def repeat(common, tmp_path, monkeypatch):
    """`Run.repeat` of a run with these settings."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    @dataclasses.dataclass(frozen=True)
    class Config(common.RepeatedSettings):
        epochs: int = 1
        output: Path = tmp_path

    return lambda one, *where, **settings: common.Run(Config(**settings)).repeat(one, *where)


def test_repeated_figures_become_mean_and_sd(load, repeat):
    shown = load("_helpers.tables").shown
    summary = repeat(lambda seed: {"a": {"b": seed / 100, "text": "x"}}, seed=3, repeats=3)
    assert set(summary["seeds"]) == {"3", "4", "5"}
    assert summary["mean"] == {"a": {"b": pytest.approx(0.04)}}
    assert summary["sd"] == {"a": {"b": pytest.approx(0.01)}}
    assert shown(summary, "a", "b") == "4.00 ± 1.00"
    once = repeat(lambda seed: {"a": {"b": 0.5}}, "another")
    assert shown(once, "a", "b", factor=1, digits=1) == "0.5"


def test_finished_seeds_are_kept_by_what_decides_their_figures(monkeypatch, repeat):
    ran = []

    def one(seed, fails=()):
        ran.append(seed)
        if seed in fails:
            raise KeyboardInterrupt
        return {"a": seed / 3}

    with pytest.raises(KeyboardInterrupt):
        repeat(lambda seed: one(seed, {6}), seed=4, repeats=4)
    summary = repeat(one, seed=4, repeats=4)
    assert ran == [4, 5, 6, 6, 7]
    assert repeat(one, seed=5, repeats=3, threads=2)["mean"] == {"a": 2.0} and len(ran) == 5
    assert repeat(one, seed=4, repeats=4, epochs=2) == summary and len(ran) == 9

    ran.clear()
    monkeypatch.setenv("WORLD_SIZE", "2")  # the other process has no such folder
    repeat(one, seed=4, repeats=4)
    assert ran == [4, 5, 6, 7]


def test_seeds_run_where_joblib_is_told_to_but_for_the_first(monkeypatch, repeat):
    def one(seed):
        return {"seed": seed, "here": threading.current_thread() is threading.main_thread()}

    with joblib.parallel_config(backend="threading", n_jobs=2):
        seeds = repeat(one, seed=2, repeats=3)["seeds"]
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ValueError, match="not both"):
            repeat(one, seed=2, repeats=3)
    assert [figures["seed"] for figures in seeds.values()] == [2, 3, 4]
    assert [figures["here"] for figures in seeds.values()] == [True, False, False]
