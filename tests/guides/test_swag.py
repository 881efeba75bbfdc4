# SPDX-License-Identifier: Apache-2.0
"""SWAG against iterates computed by numpy, the stationary law of SGD, and torch's densities."""

import copy
import math

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from scipy.linalg import solve_discrete_lyapunov
from torch import nn

import pyro_bbb as bbb
from pyro_bbb.guides import SWAG
from pyro_bbb.guides._swag import Iterates
from pyro_bbb.guides.covariance import LowRankPlusDiagonal, PartsNormal
from pyro_bbb.guides.linearization import output_moments

N, PRIOR, SIGMA = 40, 0.5, 0.8
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def regression(sizes=(3, 1), network=None):
    x = torch.randn(N, 3) @ torch.tensor([[1.0, 0.6, 0.0], [0.0, 0.8, 0.3], [0.0, 0.0, 0.5]])
    y = x @ torch.tensor([0.7, -0.4, 0.2]) + 0.5 + SIGMA * torch.randn(N)
    network = network or bbb.BayesianMLP(list(sizes), prior=dist.Normal(0.0, PRIOR))
    return bbb.BayesianModel(network, bbb.likelihoods.Gaussian(SIGMA), num_data=N), (x, y)


def quadratic(x, y):
    """Precision and mean of the conjugate posterior, of the weights and then the bias."""
    design = torch.cat([x, torch.ones(N, 1)], dim=1).numpy()
    precision = design.T @ design / SIGMA**2 + np.eye(4) / PRIOR**2
    return precision, np.linalg.solve(precision, design.T @ y.numpy() / SIGMA**2)


def fit(model, guide, data, **options):
    defaults = {"lr": 1e-3, "batch_size": N, "optimizer": torch.optim.SGD, "progress": False}
    return bbb.fit(model, guide, data, **defaults | options)


def stated(guide):
    """The covariance of a guide's Normal."""
    (block,) = guide.covariance
    return block.factor @ block.factor.T + block.scale.square().diag()


def prepared(model, **options):
    """A posterior of a few iterates that are random."""
    guide = SWAG(model, **options)
    for _ in range(7):
        nn.init.normal_(guide.loc)
        guide.collect()
    guide.approximate([])
    return guide


# --- iterates of gradient descent ---


def numpys_posterior(iterates, rank):
    """Mean, diagonal and low-rank covariance, by the paper's formulas as they stand."""
    means = [np.mean(iterates[: i + 1], axis=0) for i in range(len(iterates))]
    deviations = np.stack([z - mean for z, mean in zip(iterates, means, strict=True)])[-rank:]
    low_rank = deviations.T @ deviations / (len(deviations) - 1)
    return means[-1], np.var(iterates, axis=0), low_rank


@pytest.mark.parametrize(
    ("options", "steps", "schedule"),
    [
        ({"rank": 3, "start": 0.75}, range(75, 101), "cosine"),
        ({"rank": 20, "start": 0.5, "every": 7}, range(56, 101, 7), "cosine"),
        ({"rank": 2, "start": 0.0}, range(1, 101), "constant"),
    ],
)
def test_the_posterior_is_that_of_the_iterates_of_gradient_descent(
    double, options, steps, schedule
):
    model, data = regression()
    precision, mean = quadratic(*data)
    guide = bbb.guides.make("swag", model, **options)
    z, iterates = guide.loc.detach().numpy().copy(), []
    for step in range(100):
        progress = min(step / 100, options["start"])
        lr = 1e-3 * (0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1)
        z = z - lr * precision @ (z - mean)
        if step + 1 in steps:
            iterates.append(z)
    assert guide.plan(100, 1) == steps
    fit(model, guide, data, epochs=100, lr_schedule=schedule)
    centre, variances, low_rank = map(torch.tensor, numpys_posterior(iterates, guide._rank))
    (block,) = guide.covariance
    torch.testing.assert_close(guide.loc.detach(), centre, **EXACT)
    torch.testing.assert_close(2 * block.scale.square(), variances, **EXACT)
    torch.testing.assert_close(2 * block.factor @ block.factor.T, low_rank, **EXACT)
    assert torch.equal(guide.median()["network.fc1.weight"][0], guide.loc.detach()[:3])


def test_the_iterates_of_sgd_have_the_stationary_covariance_of_lyapunovs_equation(double):
    r"""$z_{t+1} = A z_t + \eta\epsilon$ with $A = I - \eta H$ (Mandt et al. 2017, section 3.2).

    The rank is the number of iterates, so that the low-rank part is their covariance. An estimate's
    variance is $\frac1n\sum_k \Gamma_{k,ii}\Gamma_{k,jj} + \Gamma_{k,ij}\Gamma_{k,ji}$ over lags
    k, with $\Gamma_k = A^k\Sigma$ (Bartlett). 18 numbers, 6 standard errors, twelve times
    as often as of Normals, for the skew of squares: false alarm once in 2,000,000 seeds.
    """
    model, data = regression()
    precision, mean = quadratic(*data)
    lr, n = 1.5 / np.linalg.eigvalsh(precision)[-1], 4000
    root = torch.tril(torch.randn(4, 4)) / lr
    descent = np.eye(4) - lr * precision
    sigma = solve_discrete_lyapunov(descent, lr**2 * (root @ root.T).numpy())
    guide = SWAG(model, rank=n)
    optimizer = torch.optim.SGD([guide.loc], lr=lr)
    hessian, mode = torch.tensor(precision), torch.tensor(mean)
    for step in range(n + 500):
        guide.loc.grad = hessian @ (guide.loc.detach() - mode) + root @ torch.randn(4)
        optimizer.step()
        if step >= 500:
            guide.collect()
    guide.approximate(data)
    (block,) = guide.covariance
    powers = [np.linalg.matrix_power(descent, k) @ sigma for k in range(400)]
    lags = [*powers, *(power.T for power in powers[1:])]
    diagonals = [np.diag(lag) for lag in lags]
    variances = sum(np.outer(d, d) + lag * lag.T for d, lag in zip(diagonals, lags, strict=True))
    limits = 6 * np.sqrt(variances / n)
    low_rank = (2 * block.factor @ block.factor.T).numpy()
    assert np.all(np.abs(low_rank - sigma) < limits)
    assert np.all(np.abs(2 * block.scale.square().numpy() - np.diag(sigma)) < np.diag(limits))
    limits = 6 * np.sqrt(np.diag(sum(lags)) / n)
    assert np.all(np.abs(guide.loc.detach().numpy() - mean) < limits)


def test_moments_far_from_0_keep_their_precision():
    """The mean of squares less the square of the mean would be 1e8 in float32."""
    z = 1e4 + torch.randn(50, 6)
    seen = Iterates()
    for iterate in z:
        seen.add(iterate, 5)
    torch.testing.assert_close(
        seen.squares / 50, z.double().var(0, correction=0).float(), rtol=1e-3, atol=0
    )
    torch.testing.assert_close(seen.mean, z.double().mean(0).float(), rtol=2e-7, atol=0)


# --- the Normal ---


def test_the_density_is_torchs(double):
    loc, factor, scale = torch.randn(5), torch.randn(5, 2), torch.rand(5) + 0.1
    block = LowRankPlusDiagonal(slice(0, 5), factor, scale)
    expected = torch.distributions.LowRankMultivariateNormal(loc, factor, scale.square())
    z = torch.randn(3, 5)
    actual = PartsNormal(loc, [block])
    torch.testing.assert_close(actual.log_prob(z), expected.log_prob(z), **EXACT)
    torch.testing.assert_close(block.std(), expected.stddev, **EXACT)
    torch.testing.assert_close(
        block.times_root(torch.eye(5)) @ block.times_root(torch.eye(5)).T,
        expected.covariance_matrix,
        **EXACT,
    )


def test_latents_that_never_moved_have_no_density(double):
    scale, factor = torch.tensor([0.3, 0.0, 0.7]), torch.tensor([[0.5], [0.0], [-0.2]])
    block, less = (
        LowRankPlusDiagonal(slice(0, len(rows)), factor[rows], scale[rows])
        for rows in ([0, 1, 2], [0, 2])
    )
    z = torch.randn(4, 3)
    actual, expected = PartsNormal(torch.zeros(3), [block]), PartsNormal(torch.zeros(2), [less])
    torch.testing.assert_close(actual.log_prob(z), expected.log_prob(z[:, [0, 2]]), **EXACT)
    assert not actual.rsample((5,))[:, 1].any()


def test_draws_have_the_stated_mean_and_covariance(double):
    model, (x, _) = regression()
    guide = prepared(model, rank=3)
    draws = guide.sample_posterior(20_000)
    joined = torch.cat([draws["network.fc1.weight"][:, 0], draws["network.fc1.bias"]], dim=1)
    root = torch.linalg.cholesky(stated(guide))
    white = torch.linalg.solve_triangular(root, (joined - guide.loc.detach()).T, upper=False)
    # 4 means and 10 second moments, 6 standard errors: false alarm once in 10,000,000 seeds
    assert white.mean(1).abs().max() < 6 / math.sqrt(20_000)
    errors = white @ white.T / 20_000 - torch.eye(4)
    assert (errors.abs() < 6 * ((1 + torch.eye(4)) / 20_000).sqrt()).all()
    quantiles = guide.quantiles([0.5, 0.975])["network.fc1.bias"]
    torch.testing.assert_close(quantiles[0], guide.loc.detach()[3:])
    torch.testing.assert_close(
        quantiles[1] - quantiles[0], 1.959963984540054 * stated(guide)[3, 3].sqrt()[None]
    )
    moments = output_moments(model, guide, x)
    design = torch.cat([x, torch.ones(N, 1)], dim=1)
    expected = torch.einsum("ni,ij,nj->n", design, stated(guide), design)
    torch.testing.assert_close(moments.variance[:, 0], expected, **EXACT)
    prediction = bbb.predict(model, guide, x, linearized=True)
    torch.testing.assert_close(prediction.epistemic_std.flatten(), expected.sqrt(), **EXACT)


# --- in fit ---


@pytest.mark.parametrize(
    ("options", "steps", "planned"),
    [
        ({"start": 0.75}, (400, 20), range(300, 401, 5)),
        ({}, (4000, 20), range(2000, 4001, 20)),
        ({"start": 0.55}, (100, 1), range(55, 101)),
        ({"start": 0.9, "every": 4}, (100, 50), range(92, 101, 4)),
        ({"start": 0.0}, (4, 4), range(1, 5)),
        ({"start": 0.75}, (3, 1), range(2, 4)),
    ],
)
def test_iterates_are_an_epoch_apart_or_as_many_as_the_rank(options, steps, planned):
    assert SWAG(regression()[0], **options).plan(*steps) == planned


def test_training_that_a_callback_ends_early_says_so_with_its_history():
    model, data = regression()
    guide = SWAG(model, start=0.75)
    with pytest.raises(bbb.guides.TooFewIteratesError, match="1 were collected") as raised:
        fit(model, guide, data, epochs=8, callbacks=[lambda end: end.epoch == 5])
    assert len(raised.value.history) == 6 and guide.is_point


def test_training_goes_on_from_the_mean_with_new_iterates(double):
    model, data = regression()
    precision, mean = quadratic(*data)
    guide = SWAG(model, start=0.0)
    fit(model, guide, data, epochs=8)
    z = guide.loc.detach().numpy().copy()
    fit(model, guide, data, epochs=2, lr_schedule="constant")
    first = z - 1e-3 * precision @ (z - mean)
    second = first - 1e-3 * precision @ (first - mean)
    torch.testing.assert_close(guide.loc.detach(), torch.tensor(first + second) / 2, **EXACT)


@pytest.mark.parametrize("name", ["swag", "ensemble"])
def test_captured_steps_are_collected_too(double, name):
    model, data = regression((3, 4, 1))
    options = {"guide": "swag", "size": 2} if name == "ensemble" else {}
    guide = bbb.guides.make(name, model, rank=4, **options)
    guides = [copy.deepcopy(guide) for _ in range(2)]
    for engine, twin in zip(("eager", "compiled"), guides, strict=True):
        bbb.fit(model, twin, data, epochs=12, batch_size=16, engine=engine, seed=1, progress=False)
    states = [twin.state_dict() for twin in guides]
    assert any("factor" in key for key in states[0])
    torch.testing.assert_close(*states, rtol=1e-7, atol=1e-9)


def test_points_of_constrained_latents_are_trained_one_by_one():
    network = bbb.BayesianMLP([3, 1], prior="inverse_gamma")
    model, data = regression(network=network)
    guide = bbb.guides.make("ensemble", model, guide="swag", size=2)
    assert not guide.stackable
    fit(model, guide, data, epochs=8, optimizer=None)
    draws = guide.sample_posterior(6)
    assert min(x.min() for name, x in draws.items() if name.endswith("variance")) > 0


def test_running_statistics_are_those_of_the_mean(double):
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 1)
    network = bbb.bayesianize(nn.Sequential(*layers))
    network.get_submodule("2").eval()
    model, data = regression(network=network)
    guide = SWAG(model)
    fit(model, guide, data, epochs=8, optimizer=None)
    weights = guide.median()
    inputs = data[0] @ weights["network.0.weight"].T + weights["network.0.bias"]
    first, fixed = network.get_submodule("1"), network.get_submodule("2")
    torch.testing.assert_close(first.running_mean, inputs.mean(0), **EXACT)
    torch.testing.assert_close(first.running_var, inputs.var(0), **EXACT)
    assert first.momentum == 0.1 and first.training
    assert torch.equal(fixed.running_mean, torch.zeros(4)) and fixed.num_batches_tracked == 0
