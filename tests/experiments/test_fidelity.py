# SPDX-License-Identifier: Apache-2.0
"""The experiment that compares methods with the reference posteriors, and its page."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from pyro_bbb.data import REFERENCES, references

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "fidelity.md"
FIGURES = ROOT / "docs" / "results" / "posterior_fidelity.json"


@pytest.fixture
def experiment(load):
    return load("posterior_fidelity")


# --- the experiment ---


def test_the_learning_rate_is_constant_then_falls_to_0(experiment):
    schedule = experiment.constant_then_cosine
    assert schedule(0.0) == schedule(0.49) == 1
    assert schedule(0.5) == pytest.approx(1) and schedule(0.75) == pytest.approx(0.5)
    assert schedule(1.0) == pytest.approx(0, abs=1e-12)


# --- the page ---


def test_the_page_has_the_tables_of_the_committed_figures(experiment):
    page, problems = PAGE.read_text("utf-8"), json.loads(FIGURES.read_text())["problems"]
    assert set(problems) == set(REFERENCES)
    assert all(str(table) in page for table in experiment.tables(problems).values())
    assert experiment.with_tables(page, problems) == page
    for name in REFERENCES:
        assert problems[name]["NUTS"] == json.loads(json.dumps(diagnostics(name)))
        assert set(problems[name]["guides"]) == set(experiment.APPROACHES)


def test_the_page_says_of_the_methods_what_the_figures_say():
    methods = {}
    for problem in json.loads(FIGURES.read_text())["problems"].values():
        for name, guide in problem["guides"].items():
            methods.setdefault(name, []).append(guide)

    def measures(name, region, measure):
        return [guide[region][measure] for guide in methods[name] if region in guide]

    assert max(measures("sample", "off", "function")) < 0.1
    assert max(measures("sample", "on", "function")) < 0.075
    assert all(0.96 < ratio < 1.06 for ratio in measures("sample", "off", "sd_ratio"))
    assert sum(ratio < 0.88 for ratio in measures("softplus_normal", "off", "sd_ratio")) == 11
    for region in ("on", "off"):
        nearer = (measures(name, region, "function") for name in ("full_rank", "softplus_normal"))
        assert all(full < factorised for full, factorised in zip(*nearer, strict=True))
    failed = {name: sum("failed" in guide for guide in of) for name, of in methods.items()}
    assert {name: count for name, count in failed.items() if count} == {
        "laplace, linearized": 2,
        "laplace": 2,
        "100 chains of sghmc": 1,
    }


def diagnostics(name):
    with safe_open(references.FOLDER / f"{name}.safetensors", "pt") as file:
        return json.loads(file.metadata()["record"])["diagnostics"]


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
