# SPDX-License-Identifier: Apache-2.0
"""The scores, splits and ranks of `experiments/tables.py`, and what a run keeps."""

import json
import sys

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch


@pytest.fixture
def experiment(load):
    return load("tables")


@pytest.fixture
def rivals(load):
    return load("_helpers.rivals")


def test_crps_is_the_integral_of_the_squared_difference_of_distribution_functions(
    experiment, rivals
):
    loc, scale = np.array([[0.0, 1.0], [2.0, 1.5]]), np.array([[1.0, 0.2], [0.3, 2.0]])
    prediction, y = rivals.mixture(loc, scale), np.array([0.4, -1.0])

    def squared(z, row):
        cdf = scipy.stats.norm.cdf(z, loc[:, row], scale[:, row]).mean()
        return (cdf - (z >= y[row])) ** 2

    points = {"points": [-1, 0.4, 1, 2], "limit": 200}
    exact = [scipy.integrate.quad(squared, -20, 20, args=(row,), **points)[0] for row in (0, 1)]
    targets = torch.from_numpy(y)
    assert experiment.crps(prediction, targets) == pytest.approx(np.mean(exact), rel=1e-6)
    assert experiment.crps(prediction, targets, rows=1) == pytest.approx(np.mean(exact), rel=1e-6)
    assert experiment.crps_by_steps(prediction, targets) == pytest.approx(np.mean(exact), rel=1e-3)


@pytest.mark.parametrize("tails", [False, True])
def test_gap_splits_test_the_middle_third_and_tail_splits_the_ends(experiment, tails):
    x = np.random.default_rng(0).permutation(np.arange(60.0))[:, None]
    split = experiment.sorted_split(x, x[:, 0], 0, tails=tails)
    middle = set(range(20, 40))
    tested = set(range(10)) | set(range(50, 60)) if tails else middle
    assert set(split.y_test) == tested and set(split.y) == set(range(60)) - tested
    assert (split.x_test[:, 0] == split.y_test).all()


def test_conformal_intervals_cover_exchangeable_targets(rivals, monkeypatch):
    class Constant:
        def __init__(self, **options):
            pass

        def fit(self, x, y):
            return self

        def predict(self, x):
            return np.zeros(len(x))

    monkeypatch.setitem(sys.modules, "xgboost", type("", (), {"XGBRegressor": Constant}))
    y = np.random.default_rng(0).normal(size=400)
    x = y[:, None]
    answer = rivals.fit_xgboost(rivals.Split(x, y, x, y), seed=1)
    _, held = rivals.held_out(rivals.Split(x, y, x, y), 1)
    low, high = answer.interval(0.9)
    inside = np.abs(y[held]) <= high[0]
    assert inside.sum() == 37 and low[0] == -high[0]  # ceil(41 * 0.9) of the 40 held out


def test_ranks_are_by_paired_differences_and_nemenyis_distance(experiment):
    def scores(*values, seconds=1.0):
        return [{"nll": value, "seconds": seconds} for value in values]

    def table(**records):
        return {k: experiment.summary(r, records["ours"]) for k, r in records.items()}

    first = table(
        ours=scores(0, 2), better=scores(-1), worse=scores(1, 3), slow=scores(0, 0, seconds=9)
    )
    last = [{"failed": "no"}]
    second = table(ours=scores(1), better=scores(0), worse=last, slow=scores(0, seconds=9))
    ranks = experiment.mean_ranks({"a": first, "b": second}, ["nll"], budget=5.0)
    assert ranks["mean_ranks"]["nll"] == {"better": 1.0, "ours": 2.0, "worse": 3.0}
    # q of three methods at 5 % is 2.343 (Demsar 2006, Table 5a)
    assert ranks["critical_difference"] == pytest.approx(2.343 * (3 * 4 / 12) ** 0.5, rel=1e-3)
    slow = {"a": table(ours=scores(0, 2, seconds=9), x=scores(1, 0), y=scores(0))}
    assert list(experiment.mean_ranks(slow, ["nll"], 5.0)["mean_ranks"]["nll"]) == ["x", "y"]
    worse = first["worse"]["nll"]
    assert worse["difference"] == 1 and worse["half_width"] == pytest.approx(0)


def test_rivals_are_kept_and_ours_made_again_when_the_library_changes(
    experiment, rivals, monkeypatch, tmp_path
):
    ran = []

    def method(name):
        def fit(split, seed):
            ran.append(name)
            return rivals.Answer(rivals.mixture(0 * split.y_test, 1.0))

        return rivals.Method(fit)

    labels = {"BayesianRegressor": method("ours"), "forest": method("rival")}
    kind = experiment.Kind({}, labels, ("nll",))
    monkeypatch.setattr(experiment, "KINDS", {"regression": kind})
    monkeypatch.setattr(experiment, "library", lambda: "a")

    def run(**options):
        ran.clear()
        results = experiment.main(experiment.Config(smoke=True, output=tmp_path, **options))
        assert json.loads((tmp_path / "metrics.json").read_text()) == results
        return sorted(ran), results["tables"]["regression-made-up"]

    assert run(methods=("forest",))[0] == ["rival"] * 2
    done, table = run()
    assert done == ["ours"] * 2 and set(table) == set(labels)
    assert run()[0] == []
    monkeypatch.setattr(experiment, "library", lambda: "b")
    assert run()[0] == ["ours"] * 2
    done, table = run(methods=("BayesianRegressor",), fresh=("BayesianRegressor",))
    assert done == ["ours"] * 2 and set(table) == set(labels)
    assert run(fresh=("forest",))[0] == ["rival"] * 2
