# SPDX-License-Identifier: Apache-2.0
"""Distances between posteriors, and the page that reports them."""

import json
from pathlib import Path

import pytest
import torch
from torch.distributions import Normal

import pyro_bbb as bbb

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "fidelity.md"
FIGURES = ROOT / "docs" / "results" / "posterior_fidelity.json"


@pytest.fixture
def fidelity(load):
    return load("_helpers.fidelity")


@pytest.fixture
def experiment(load):
    return load("posterior_fidelity")


def regression(means, noise=1.0):
    return bbb.RegressionPrediction(Normal(means[..., None], noise * torch.ones(1)))


def binary(p):
    return bbb.ClassificationPrediction(torch.stack([1 - p, p], dim=-1).log())


def draws(seed, size=(500, 7)):
    return torch.randn(size, generator=torch.Generator().manual_seed(100 + seed))


# --- distances ---


def test_a_posterior_is_at_distance_0_from_itself(fidelity):
    f = draws(0)
    classes = binary(torch.sigmoid(f))
    same = {"function": 0.0, "predictive": 0.0, "sd_ratio": 1.0}
    assert fidelity.compare(classes, classes) == same
    found = fidelity.compare(regression(f), regression(f))
    # targets are drawn anew on both sides, and the means of 500 differ by about 0.04
    assert found | {"predictive": 0.0} == same and 0 < found["predictive"] < 0.1


def test_order_and_number_of_draws_do_not_matter(fidelity):
    f = draws(0)
    twice = torch.cat([f, f])[torch.randperm(1000, generator=torch.Generator().manual_seed(1))]
    assert fidelity.distance(f, twice) == pytest.approx(0, abs=1e-6)


def test_a_shift_is_at_the_distance_of_its_length_in_sds(fidelity):
    f = draws(0)
    found = fidelity.compare(regression(f + 5), regression(f))
    spread = float(f.std(0).mean())
    assert found["function"] == pytest.approx(5 / spread, rel=1e-5)
    total = float(regression(f).std.mean())
    # the mean of 7 differences of two means of 500 draws: six standard errors
    assert found["predictive"] == pytest.approx(5 / total, abs=6 * (2 / 500 / 7) ** 0.5)
    assert found["sd_ratio"] == pytest.approx(1.0)


def test_a_point_in_the_middle_is_at_the_mean_absolute_deviation(fidelity):
    f = draws(0)
    middle = f.mean(0).expand_as(f)
    expected = (f - f.mean(0)).abs().mean() / f.std(0).mean()
    found = fidelity.compare(regression(middle), regression(f))
    assert found["function"] == pytest.approx(float(expected), rel=1e-5)
    assert found["sd_ratio"] == 0


def test_a_wider_posterior_has_its_factor_as_sd_ratio(fidelity):
    f = draws(0)
    assert fidelity.compare(regression(3 * f), regression(f))["sd_ratio"] == pytest.approx(3)


def test_total_variation_is_the_difference_of_mean_probabilities(fidelity):
    p, q = torch.sigmoid(draws(0)), torch.sigmoid(draws(1) + 1)
    expected = (p.mean(0) - q.mean(0)).abs().mean()
    found = fidelity.compare(binary(p), binary(q))["predictive"]
    assert found == pytest.approx(float(expected), rel=1e-4)


def test_comparing_neither_reads_nor_changes_the_random_state(fidelity):
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        found.append(fidelity.compare(regression(draws(0)), regression(draws(1))))
        assert torch.random.get_rng_state().equal(before)
    assert found[0] == found[1]


# --- problems ---


@pytest.mark.parametrize("name", ["sine", "diabetes", "breast_cancer"])
def test_a_problem_fits_its_model_and_keeps_test_and_training_apart(fidelity, name):
    problem = fidelity.PROBLEMS[name](0)
    model = problem.make_model()
    for x, y in (problem.train, problem.test):
        model.check(x, y)
    for x in (problem.far, problem.path):
        model.check(x)
    assert len(problem.at) == len(problem.path) and (problem.at.diff() > 0).all()
    rows = torch.cat([problem.train[0], problem.test[0]])
    assert len(rows.unique(dim=0)) == len(rows)


@pytest.mark.parametrize("name", ["diabetes", "breast_cancer"])
def test_off_the_data_every_measurement_is_moved_by_three_sd(fidelity, name):
    problem = fidelity.PROBLEMS[name](0)
    torch.testing.assert_close(problem.train[0].std(0), torch.ones(problem.far.shape[1]))
    moved = (problem.far - problem.test[0]).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 3.0), rtol=1e-5, atol=1e-5)


def test_off_the_data_of_the_sine_is_beyond_its_range(fidelity):
    problem = fidelity.sine(0)
    assert problem.train[0].abs().max() <= 0.5 < problem.far.abs().min()
    assert problem.test[0].abs().max() <= 0.5


# --- the experiment's words ---


def nuts(worst):
    return {
        "r_hat": {"on the data": 1.001, "off the data": worst},
        "ess_bulk": {"on the data": 900.0},
        "ess_tail": {"on the data": 800.0},
        "divergences": 0,
        "gradients_per_draw": 60.0,
        "seconds": 10.0,
    }


def test_a_reference_whose_chains_disagree_is_called_none(experiment):
    assert "agree: R-hat at most 1.009" in experiment.fidelity.verdict(nuts(1.009))
    assert "do NOT agree" in experiment.fidelity.verdict(nuts(1.01))


def test_the_learning_rate_is_constant_then_falls_to_0(experiment):
    schedule = experiment.constant_then_cosine
    assert schedule(0.0) == schedule(0.49) == 1
    assert schedule(0.5) == pytest.approx(1) and schedule(0.75) == pytest.approx(0.5)
    assert schedule(1.0) == pytest.approx(0, abs=1e-12)


# --- the page ---


def test_the_page_has_the_tables_of_the_committed_figures(experiment):
    page, figures = PAGE.read_text(encoding="utf-8"), json.loads(FIGURES.read_text())
    assert str(experiment.overview_table(figures["problems"])) in page
    for record in figures["problems"].values():
        assert str(experiment.fidelity_table(record)) in page, record["title"]
        assert experiment.fidelity.verdict(record[experiment.NUTS]) in " ".join(page.split())
        failed = {name for name, guide in record["guides"].items() if "failed" in guide}
        assert set(record["guides"]) == set(experiment.APPROACHES)
        assert failed <= {"laplace, exact Hessian"}


def test_many_short_chains_are_right_off_the_data_in_a_tenth_of_the_time_of_nuts(experiment):
    for problem in json.loads(FIGURES.read_text())["problems"].values():
        chains = problem["guides"][experiment.SHORT]
        assert chains["off the data"]["function"] < 0.08
        assert 0.97 < chains["off the data"]["sd_ratio"] < 1.03
        assert chains["seconds"] < problem[experiment.NUTS]["seconds"] / 10


def test_the_page_says_of_the_guides_what_the_figures_say(experiment):
    problems = json.loads(FIGURES.read_text())["problems"]
    on, off = (
        {
            guide: [problem["guides"][guide][place] for problem in problems.values()]
            for guide in problems["sine"]["guides"]
            if guide != experiment.SHORT
        }
        for place in ("on the data", "off the data")
    )
    for mean_field, full in zip(off["softplus_normal"], off["full_rank"], strict=True):
        assert mean_field["sd_ratio"] < full["sd_ratio"] < 1
    for i in range(len(problems)):
        assert on["full_rank"][i]["function"] < on["softplus_normal"][i]["function"]
    for places in (on, off):  # on the sine
        assert min(places, key=lambda guide: places[guide][0]["function"]) == "laplace, linearized"
    for places in (on, off):
        longer = places["softplus_normal, twice the steps"]
        for once, twice in zip(places["softplus_normal"], longer, strict=True):
            assert abs(once["function"] - twice["function"]) < 0.065


def test_the_page_shows_pictures_that_are_there():
    for name in ("sine", "diabetes", "breast_cancer"):
        assert f"images/fidelity_{name}.png" in PAGE.read_text(encoding="utf-8")
        picture = PAGE.parent / "images" / f"fidelity_{name}.png"
        assert 10_000 < picture.stat().st_size < 200_000


def test_the_page_has_the_gap_splits(load):
    gaps, page = load("gap_splits"), PAGE.read_text(encoding="utf-8")
    tables = json.loads((FIGURES.parent / "gap_splits.json").read_text())["tables"]
    assert str(gaps.gap_table(tables)) in page
    best = {table: min(of, key=lambda name, of=of: of[name]["nll"]) for table, of in tables.items()}
    assert best["bostonHousing"] == best["yacht"] == "20 chains of sghmc"
    assert best["energy"] == "laplace, linearized"
    assert all(each["coverage"] < 0.9 for each in tables["energy"].values())
    for name, shown in (("energy", "51"), ("yacht", "40")):
        assert f"{100 * tables[name]['softplus_normal']['coverage']:.0f}" == shown
        assert tables[name]["full_rank"]["coverage"] < 0.7
    rmse = {name: each["rmse"] for name, each in tables["yacht"].items()}
    found = [f"{rmse[key]:.1f}" for key in ("20 chains of sghmc", "delta (MAP)")]
    assert found == ["2.0", "5.3"]
