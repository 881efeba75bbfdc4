# SPDX-License-Identifier: Apache-2.0
"""The pieces of the regression of the paper's Figure 5 that could be wrong unseen."""

import math

import pytest
import torch
from torch.distributions import Normal

import pyro_bbb as bbb


@pytest.fixture
def experiment(load):
    return load("paper_regression")


def test_the_curve_is_the_papers(experiment):
    for x, noise in ((0.0, 0.0), (0.125, 0.0), (0.25, 0.01), (0.7, -0.03)):
        first, second = (math.sin(k * math.pi * (x + noise)) for k in (2, 4))
        y = x + 0.3 * first + 0.3 * second + noise
        at = experiment.curve(torch.tensor(x), torch.tensor(noise))
        assert float(at) == pytest.approx(y, abs=1e-6)
    assert float(experiment.curve(torch.tensor(0.125), torch.zeros(()))) == pytest.approx(
        0.125 + 0.3 * (math.sqrt(0.5) + 1), abs=1e-6
    )


def test_one_network_has_no_epistemic_uncertainty_and_two_have_what_they_differ_by(experiment):
    torch.manual_seed(0)
    networks = [experiment.Plain((5,)) for _ in range(2)]
    x = torch.linspace(-1, 1, 7)[:, None]
    single, both = (experiment.predict_together(networks[:count], x) for count in (1, 2))
    assert single.epistemic_std.abs().max() == 0
    torch.testing.assert_close(single.aleatoric_std, torch.ones(7, 1))
    apart = (networks[0](x).loc - networks[1](x).loc).abs() / 2
    torch.testing.assert_close(both.epistemic_std, apart.detach())


def test_coverage_counts_the_values_inside_the_central_intervals(experiment):
    problem = experiment.Problem.of(0, 5)
    x, y = problem.fresh

    def says(loc, scale):
        return bbb.RegressionPrediction(Normal(loc[None], torch.full_like(loc, scale)[None]))

    inside = (problem.x >= 0) & (problem.x <= 0.5)
    at = says(experiment.curve(problem.x, torch.zeros(1)) + 1e3 * inside, 10.0)
    wide, right = (says(loc, 10.0) for loc in (y, y + 6.8))  # quartiles are 6.74 from the mean
    scores = experiment.score(at, wide, problem, 0)
    assert scores["coverage"] == {"50": {"on": 1.0, "off": 1.0}, "90": {"on": 1.0, "off": 1.0}}
    assert scores["interquartile"]["on"] == pytest.approx(2 * 6.745, rel=1e-3)
    assert scores["epistemic_sd"] == {"on": 0.0, "off": 0.0}
    coverage = experiment.score(says(at.mean + 1e3 * ~inside, 10.0), right, problem, 0)["coverage"]
    assert coverage["50"]["on"] == 0.0 and coverage["90"] == {"on": 1.0, "off": 0.0}
