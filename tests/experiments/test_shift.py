# SPDX-License-Identifier: Apache-2.0
"""Scores of `experiments/shift.py`, and the trainings that it shares."""

from functools import partial

import pytest
import torch

import pyro_bbb as bbb


@pytest.fixture
def shifts(load):
    return load("shift")


def sure(p, x):
    """A prediction that is class 0 with probability ``p``, for any images."""
    wrong = torch.full((len(x), 9), (1 - p) / 9)
    probs = torch.cat([torch.full((len(x), 1), p), wrong], dim=-1)
    return bbb.ClassificationPrediction(probs.log()[None])


def test_scores_of_a_network_that_ignores_the_images_do_not_change(shifts):
    x, y = torch.rand(20, 1, 28, 28), torch.arange(20) % 4  # five are right
    measured = shifts.measure(partial(sure, 0.75), (x, y), moved=True)

    clean = {
        "accuracy": 0.25,
        "confidence": 0.75,
        "nll": -0.25 * torch.tensor(0.75).log() - 0.75 * torch.tensor(0.25 / 9).log(),
        "brier": 0.25 * (0.25**2 + 9 * (0.25 / 9) ** 2)
        + 0.75 * (0.75**2 + 8 * (0.25 / 9) ** 2 + (1 - 0.25 / 9) ** 2),
        "ece": 0.5,
        "auroc": 0.5,
    }
    assert measured["clean"].keys() == clean.keys() | {"area_under_risk_coverage"}
    for name, figure in clean.items():
        assert measured["clean"][name] == pytest.approx(float(figure), abs=1e-5), name
    assert list(measured["rotation"]) == [str(15 * i) for i in range(13)]
    assert list(measured["translation"]) == ["0", "2", "4", "6", "8", "10", "12", "14"]
    assert {s: list(names) for s, names in measured["corruptions"].items()} == {
        str(s): list(bbb.data.CORRUPTIONS) for s in range(1, 6)
    }
    every = [*measured["rotation"].values(), *measured["translation"].values()]
    every += [s for names in measured["corruptions"].values() for s in names.values()]
    assert all(s == measured["clean"] for s in every)
    for scores in (measured["shifted"], *measured["severity"].values()):
        assert scores == pytest.approx(measured["clean"], abs=1e-12)


@pytest.mark.slow
def test_the_trainings_of_posteriors_are_taken(load, tmp_path):
    posteriors, shift = load("posteriors"), load("shift")
    options = {"smoke": True, "methods": ("rank1",)}
    posteriors.main(
        posteriors.Config(**options, problems=("mnist_lenet5",), output=tmp_path / "posteriors")
    )
    trainings = tmp_path / "posteriors" / "trainings"
    before = {path: path.stat().st_mtime_ns for path in trainings.rglob("*.safetensors")}
    shift.main(shift.Config(**options, trainings=trainings, output=tmp_path / "shift"))
    after = {path: path.stat().st_mtime_ns for path in trainings.rglob("*.safetensors")}
    assert before and before == after and not (tmp_path / "shift" / "trainings").exists()
