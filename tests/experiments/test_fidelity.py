# SPDX-License-Identifier: Apache-2.0
"""The experiment that compares methods with the reference posteriors, and its page."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from pyro_bbb.data import REFERENCES, references

ROOT = Path(__file__).parents[2]
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


def test_the_record_has_the_diagnostics_of_nuts_and_all_approaches(experiment):
    problems = json.loads(FIGURES.read_text())["problems"]
    assert set(problems) == set(REFERENCES)
    for name in REFERENCES:
        assert problems[name]["NUTS"] == json.loads(json.dumps(diagnostics(name)))
        assert set(problems[name]["guides"]) == set(experiment.APPROACHES)


def diagnostics(name):
    with safe_open(references.FOLDER / f"{name}.safetensors", "pt") as file:
        return json.loads(file.metadata()["record"])["diagnostics"]
