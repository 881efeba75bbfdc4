# SPDX-License-Identifier: Apache-2.0
r"""Simulation-based calibration (Talts et al. 2018, "Validating Bayesian inference algorithms").

Draw weights from the prior and data given them; then the rank of a weight among L draws of its
exact posterior is uniform on 0, ..., L. A posterior too narrow puts the weight outside its draws
too often. In Bayesian linear regression the exact posterior is known, and so is the best diagonal
one: its means are exact and its variances $1 / \Lambda_{jj}$, too small where weights correlate.
"""

import math

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from scipy import stats
from torch.distributions import transform_to

import pyro_bbb as bbb
from pyro_bbb.distributions.observation import Normal
from pyro_bbb.prediction import RegressionPrediction

REPLICATIONS, DRAWS, BINS = 400, 99, 20
ALARM = 1e-5  # rate of false alarms of each uniformity test; the seed is fixed
N, SIGMA = 8, 0.7
WEIGHT = "network.weight"


class Regression:
    """Two weights, a fixed design, and the posterior by linear algebra."""

    def __init__(self, correlated):
        first, second = torch.linalg.qr(torch.randn(N, 2))[0].T  # orthonormal
        second = 0.9 * first + math.sqrt(1 - 0.9**2) * second if correlated else second
        self.x = 3 * torch.stack([first, second], dim=1)  # [N, 2]
        self.precision = self.x.T @ self.x / SIGMA**2 + torch.eye(2)
        self.covariance = self.precision.inverse()
        network = bbb.BayesianLinear(2, 1, bias=False, prior=dist.Normal(0.0, 1.0))
        self.model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(SIGMA), num_data=N)

    def simulate(self):
        """Weights ``[2]`` from the prior, and the posterior's mean given data from them."""
        trace = poutine.trace(self.model).get_trace(self.x)
        y = trace.nodes["obs"]["value"].flatten()
        loc = self.covariance @ self.x.T @ y / SIGMA**2
        return trace.nodes[WEIGHT]["value"].flatten(), loc

    def mean_field(self):
        """The guide with the best diagonal covariance, and the setter of its mean."""
        rho = self.precision.diagonal().rsqrt().expm1().log()
        guide = bbb.AutoSoftplusNormal(self.model)
        with torch.no_grad():
            guide.get_parameter(f"rhos.{WEIGHT}").copy_(rho[None])
        return guide, guide.loc(WEIGHT)[0].copy_

    def full_rank(self):
        """The guide with the exact covariance, and the setter of its mean."""
        guide = bbb.guides.make("full_rank", self.model)
        guide(self.x, torch.zeros(N, 1))
        factor = torch.linalg.cholesky(self.covariance)
        scale = factor.diagonal()
        for name, value in {"scale": scale, "scale_tril": factor / scale[:, None]}.items():
            constraint, _ = guide._pyro_params[name]
            unconstrained = transform_to(constraint).inv(value)
            guide._parameters[f"{name}_unconstrained"].data.copy_(unconstrained)
        return guide, guide._parameters["loc"].data.copy_


def weight_ranks(regression, guide, set_loc):
    """How many of the guide's draws are below the true weight, ``[replications, 2]``."""
    ranks = []
    for _ in range(REPLICATIONS):
        weight, loc = regression.simulate()
        set_loc(loc)
        draws = guide.sample_posterior(DRAWS)[WEIGHT].reshape(DRAWS, 2)
        ranks.append((draws < weight).sum(0))
    return torch.stack(ranks)


def uniformity(ranks):
    """The p-value of a chi-square test that ranks ``[replications]`` are uniform."""
    counts = torch.bincount(ranks * BINS // (DRAWS + 1), minlength=BINS)
    return stats.chisquare(counts.numpy()).pvalue


@pytest.mark.parametrize(
    "guide, correlated", [("full_rank", True), ("full_rank", False), ("mean_field", False)]
)
def test_ranks_are_uniform_where_the_posterior_is_exact(double, guide, correlated):
    """The diagonal posterior is exact, too, if there is no correlation."""
    regression = Regression(correlated)
    ranks = weight_ranks(regression, *getattr(regression, guide)())
    for column in ranks.T:
        assert uniformity(column) > ALARM


def test_predictions_of_fresh_observations_are_calibrated(double):
    """Ranks among draws of the predictive are uniform, and its intervals cover what they say."""
    regression, x = Regression(correlated=True), torch.tensor([[0.4, -1.3]])
    guide, set_loc = regression.full_rank()
    ranks, targets, components = [], [], []
    for _ in range(REPLICATIONS // 2):
        weight, loc = regression.simulate()
        y = x @ weight + SIGMA * torch.randn(1)
        set_loc(loc)
        prediction = bbb.predict(regression.model, guide, x, num_samples=DRAWS)
        ranks.append((prediction.components.sample().flatten() < y).sum())
        components.append(prediction.components.loc)  # [draws, 1, 1]
        targets.append(y)
    together = RegressionPrediction(Normal(torch.cat(components, dim=1), SIGMA))
    lower, upper = together.interval(0.8)
    torch.testing.assert_close(lower[-1:], prediction.interval(0.8)[0])
    covered = [bool(c) for c in ((lower < torch.stack(targets)) & (torch.stack(targets) < upper))]
    assert uniformity(torch.stack(ranks)) > ALARM
    # A mixture of 99 draws is off by a hundredth of the weights' share of the variance: far less
    # than the error of counting.
    error = math.sqrt(0.8 * 0.2 / len(covered))
    assert abs(sum(covered) / len(covered) - 0.8) < 5 * error  # false alarm: 6e-7
