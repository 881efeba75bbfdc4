# SPDX-License-Identifier: Apache-2.0
"""Chains that tune themselves: known posteriors, restarts, budgets, and resuming."""

import math

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_bbb as bbb
from pyro_bbb.mcmc import _sample
from pyro_bbb.mcmc._sample import TUNED_SAMPLERS, TunedRun
from pyro_bbb.mcmc._samplers import MCLMC, turn

SIGMAS = 6  # standard errors
NOISE, PRIOR = 0.5, 0.8


def regression(rows=60, features=6):
    """Linear regression of ill-conditioned inputs with known noise: the posterior is a Normal."""
    scales = torch.diag(torch.logspace(0, -1, features))
    x = torch.randn(rows, features) @ scales
    y = x.sum(1, keepdim=True) + NOISE * torch.randn(rows, 1)
    network = bbb.BayesianMLP([features, 1], prior=dist.Normal(0.0, PRIOR))
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(NOISE), rows)
    design = torch.cat([x, torch.ones(rows, 1)], dim=1).double()
    precision = design.T @ design / NOISE**2 + torch.eye(features + 1) / PRIOR**2
    mean = torch.linalg.solve(precision, design.T @ y.double().flatten()) / NOISE**2
    return model, (x, y), mean, precision


def curve(rows=40):
    x = torch.linspace(-2, 2, rows)[:, None]
    network = bbb.BayesianMLP([1, 8, 1], activation=nn.Tanh)
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(0.1), rows)
    return model, (x, x.sin() + 0.1 * torch.randn(rows, 1))


QUICK = {"num_chains": 4, "max_steps": 120, "num_samples": 64, "progress": False, "seed": 0}


# --- known posteriors ---


@pytest.mark.parametrize("sampler", TUNED_SAMPLERS)
def test_a_normal_posterior_is_found(sampler):
    """All means are 0 and all variances 1 in whitened coordinates."""
    torch.manual_seed(0)
    model, data, mean, precision = regression()
    options = {"sampler": sampler, "num_chains": 32, "num_samples": 2000, "seed": 1}
    if sampler == "sghmc":
        options["batch_size"] = len(data[0])
    chains = bbb.sample(model, data, progress=False, **options)
    vectors = torch.cat([values.flatten(1) for values in chains.values()], dim=1).double()
    white = (vectors - mean) @ torch.linalg.cholesky(precision)
    by_chain = white.unflatten(0, (32, -1))
    error = by_chain.std((0, 1)) / bbb.metrics.ess(by_chain, "mean").sqrt()
    assert (white.mean(0).abs() < SIGMAS * error).all()
    spread = bbb.metrics.ess(by_chain, "sd").rsqrt() / math.sqrt(2)  # of a standard deviation
    # a step of mclmc may be wrong by 2.2 % of an energy's standard deviation
    assert ((white.std(0) - 1).abs() < SIGMAS * spread + 0.03).all()
    assert chains.r_hat_of_functions <= 1.2 and chains.ess_of_functions >= 400
    assert not chains.diverging.any()


def test_the_turn_is_the_papers_equation():
    """It is that by cosh and sinh, in double precision; finite for a force whose cosh overflows."""
    torch.manual_seed(1)
    u = nn.functional.normalize(torch.randn(5, 7), dim=1).double()
    force = torch.randn(5, 7, dtype=torch.double)
    size, epsilon = force.norm(dim=1, keepdim=True), torch.full((5, 1), 0.7).double()
    n, delta = force / size, epsilon * size / 6
    cosine = (n * u).sum(1, keepdim=True)
    bottom = delta.cosh() + cosine * delta.sinh()
    expected = (u + n * (delta.sinh() + cosine * (delta.cosh() - 1))) / bottom
    turned, kinetic = turn(u, force, epsilon)
    torch.testing.assert_close(turned, expected)
    torch.testing.assert_close(kinetic, 6 * bottom.log().squeeze(1))
    turned, kinetic = turn(u.float(), 1e5 * force.float(), epsilon.float())
    torch.testing.assert_close(turned, n.float(), atol=1e-6, rtol=0)
    assert kinetic.isfinite().all()


def test_the_band_opens_in_a_gap_and_nowhere_else():
    """The chains have the settings of `BayesianRegressor`.

    Where chains that err keep their step size, the ratio of the bands is 2 instead of 5.
    """
    torch.manual_seed(0)
    x = torch.cat([torch.linspace(-2.5, -1, 40), torch.linspace(0.8, 2.5, 40)])[:, None]
    gap = torch.linspace(-1, 0.8, 40)[:, None]
    truth = torch.sin(2.2 * x)
    y = truth + 0.1 * torch.randn(80, 1)
    center, unit = y.mean(), y.std()
    network = bbb.BayesianMLP([1, 50, 1], prior=bbb.priors.FanInNormal(2.5))
    noise = bbb.likelihoods.Gaussian(dist.HalfNormal(torch.tensor(1.0)))
    model = bbb.BayesianModel(network, noise, 80)
    data = x / x.std(), (y - center) / unit
    chains = bbb.sample(model, data, num_chains=32, max_steps=1500, seed=0, progress=False)
    on, off = (bbb.predict(model, chains, at / x.std(), num_samples=500) for at in (x, gap))
    assert off.epistemic_std.mean() > 3 * on.epistemic_std.mean()
    assert (on.mean * unit + center - truth).square().mean().sqrt() < 0.06  # of noise 0.1
    assert 0.1 < (chains["likelihood.scale"] * unit).median() < 0.15


# --- restarts ---


def test_diverged_chains_return_and_are_counted(monkeypatch):
    """A chain of four has an infinite error in its first step of sampling."""
    model, data = curve()
    calls = 0

    class Broken(MCLMC):
        def step(self, *arguments):
            nonlocal calls
            calls += 1
            state, error, acceptance = super().step(*arguments)
            if calls == 1:
                error[2] = math.inf
                state.z[2] = math.nan
            return state, error, acceptance

    monkeypatch.setattr(_sample, "make_sampler", lambda _, d: Broken(d))
    chains = bbb.sample(model, data, **QUICK)
    assert chains.restarts.tolist() == [0, 0, 1, 0]
    assert all(values.isfinite().all() for values in chains.values())


def test_chains_that_cannot_move_raise(monkeypatch):
    model, data = curve()

    class Stuck(MCLMC):
        def step(self, state, *_):
            infinite = torch.full_like(state.energy, math.inf)
            return state, infinite, infinite

    monkeypatch.setattr(_sample, "make_sampler", lambda _, d: Stuck(d))
    with pytest.raises(bbb.DivergedError, match="energy or gradient of chain 0 is not finite"):
        bbb.sample(model, data, **QUICK)


@pytest.mark.parametrize("prior", ["student_t", "scale_mixture"])
def test_deep_networks_stay_finite(prior):
    torch.manual_seed(0)
    x = torch.randn(40, 3)
    y = x.prod(1, keepdim=True) + 0.1 * torch.randn(40, 1)
    network = bbb.BayesianMLP([3, *[8] * 6, 2], prior=prior)
    model = bbb.BayesianModel(network, bbb.likelihoods.HeteroscedasticGaussian(), 40)
    chains = bbb.sample(model, (x, y), **QUICK | {"max_steps": 200})
    assert all(values.isfinite().all() for values in chains.values())
    assert chains.diverging.sum() <= chains.restarts.sum() < 20


# --- what ends a run, and what it returns ---


def test_budgets_and_counts():
    model, data = curve()
    chains = bbb.sample(model, data, **QUICK)
    assert chains.diverging.shape == (4, 16)
    again = bbb.sample(model, data, **QUICK)
    assert all(torch.equal(chains[name], again[name]) for name in chains)
    options = QUICK | {"max_steps": 10**6, "num_samples": 10**6, "seconds": 1.0}
    for rows in (40, 4000):  # a step of 4,000 rows takes longer than one that trains
        assert bbb.sample(*curve(rows=rows), **options).seconds < 3.0
    single = bbb.sample(model, data, **QUICK | {"num_chains": 1})
    assert single.r_hat_of_functions is None and single.ess_of_functions > 0


def test_weights_of_examples_count():
    """Examples of weight 0 are as good as absent: the other half is a line of another slope."""
    x = torch.linspace(-2, 2, 40)[:, None]
    y = torch.where(torch.arange(40)[:, None] % 2 == 0, x, -x)
    model = bbb.BayesianModel(bbb.BayesianMLP([1, 1]), bbb.likelihoods.Gaussian(0.1), 40)
    weight = (torch.arange(40) % 2 == 0).float()
    chains = bbb.sample(model, (x, y), sample_weight=weight, **QUICK | {"max_steps": 1000})
    assert (chains["network.fc1.weight"] - 1).abs().max() < 0.1


@pytest.mark.parametrize("killed_at", [7, 110])
def test_an_interrupted_run_goes_on(tmp_path, monkeypatch, killed_at):
    model, data = curve()
    uninterrupted = bbb.sample(model, data, **QUICK)
    steps, step = [], TunedRun.step

    def interrupted(run):
        step(run)
        steps.append(run.counters.done)
        if len(steps) == killed_at:
            raise KeyboardInterrupt

    monkeypatch.setattr(TunedRun, "step", interrupted)
    saved = {"checkpoint": tmp_path, "checkpoint_every": 5}
    with pytest.raises(KeyboardInterrupt):
        bbb.sample(model, data, **QUICK, **saved)
    resumed = bbb.sample(model, data, **QUICK, **saved)
    assert len(steps) < killed_at + uninterrupted.num_gradients.numel() * 2
    for name in uninterrupted:
        assert torch.equal(uninterrupted[name], resumed[name])
    with pytest.raises(ValueError, match="different configuration: max_steps: 120 there"):
        bbb.sample(model, data, **QUICK | {"max_steps": 130}, **saved)
