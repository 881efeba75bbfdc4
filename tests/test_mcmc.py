# SPDX-License-Identifier: Apache-2.0
"""NUTS: its potential against Pyro's own, its draws against posteriors known exactly."""

import sys
from dataclasses import replace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoNormal
from pyro.infer.mcmc.util import initialize_model
from pyro.nn import PyroModule, PyroSample
from pyro.ops.integrator import potential_grad
from scipy import stats
from torch import nn

import pyro_bbb as bbb
from pyro_bbb import mcmc
from pyro_bbb._recorder import record
from pyro_bbb.mcmc import _nuts
from pyro_bbb.mcmc._potential import Potential
from pyro_bbb.mcmc._run import initial_positions
from tests._support.branching import Branching

SIGMAS = 5  # two-sided false-alarm rate of each Monte Carlo comparison: 6e-7
QUICK = {"num_samples": 8, "warmup_steps": 8, "max_tree_depth": 3, "progress": False}
IMPROPER = {"log_uniform", "normal_jeffreys"}  # which chains refuse


class Hierarchical(PyroModule):
    """A line whose weights share a latent scale."""

    def __init__(self, inputs=2):
        super().__init__()
        self.tau = PyroSample(dist.Gamma(3.0, 3.0))
        self.weight = PyroSample(
            lambda self: dist.Normal(0.0, self.tau).expand([inputs]).to_event(1)
        )

    def forward(self, x):
        return x @ self.weight.unsqueeze(-1)


class Accumulating(Branching):
    """Adds into memory that does not depend on the weights."""

    def forward(self, x):
        total = torch.zeros(len(x), 1)
        for _ in range(2):
            total += self.fc(x)
        return total


class Dropping(Branching):
    def forward(self, x):
        return nn.functional.dropout(self.fc(x), training=self.training)


def mlp(prior, outputs=1):
    return bbb.BayesianMLP([2, 4, outputs], activation=nn.Tanh, prior=prior)


def mixed():
    """Two families that are joined, with one between that is not."""
    cauchy = dist.Cauchy(0.0, 1.0)
    return {"fc1.*": dist.Laplace(0.1, 0.7), "*.weight": cauchy, "*": dist.Normal(1.0, 2.0)}


def latent():
    return dist.LogNormal(-1.0, 0.5)


CASES = {  # network and likelihood
    "normal": lambda: (mlp(dist.Normal(0.0, 1.0)), bbb.likelihoods.Gaussian(0.3)),
    "mixture": lambda: (mlp(bbb.ScaleMixtureNormal(0.3, 1.0, 0.01)), bbb.likelihoods.Gaussian(0.3)),
    "mixed": lambda: (mlp(mixed()), bbb.likelihoods.Gaussian(0.3)),
    "latent-noise": lambda: (mlp(None), bbb.likelihoods.Gaussian(latent())),
    "latent-df": lambda: (mlp(None), bbb.likelihoods.StudentT(dist.Gamma(9.0, 1.0), latent())),
    "learned-noise": lambda: (mlp(None), bbb.likelihoods.Gaussian.learned(0.3)),
    "hierarchical": lambda: (Hierarchical(), bbb.likelihoods.Gaussian(0.3)),
    "converted": lambda: (
        bbb.bayesianize(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))),
        bbb.likelihoods.Gaussian(0.3),
    ),
    "classes": lambda: (mlp(None, 3), bbb.likelihoods.Categorical()),
    "accumulating": lambda: (Accumulating(), bbb.likelihoods.Gaussian(0.3)),
    "dropout": lambda: (Dropping().eval(), bbb.likelihoods.Gaussian(0.3)),
    "branching": lambda: (Branching(), bbb.likelihoods.Gaussian(0.3)),
}


def problem(name="normal", n=7):
    network, likelihood = CASES[name]()
    model = bbb.BayesianModel(network, likelihood, num_data=n)
    y = torch.randint(3, (n,)) if name == "classes" else torch.randn(n, 1)
    return model, torch.randn(n, 2), y


# --- the potential ---


@pytest.mark.parametrize("name", CASES)
def test_the_potential_is_pyros_own(double, name):
    model, x, y = problem(name)
    potential = Potential(model, x, y)
    start, theirs, _, _ = initialize_model(model, (x, y))
    size = potential.latents.size
    recorded = record(potential.value_and_gradient, torch.randn(size))
    assert (recorded == potential.value_and_gradient) == (name == "branching")
    for _ in range(4):
        z = 0.7 * torch.randn(size)
        z_dict = potential.latents.unravel(z)
        gradients, energy = potential_grad(theirs, z_dict)
        gradient = torch.cat([gradients[key].flatten() for key in potential.sites])
        for ours in (potential.value_and_gradient, recorded, recorded):
            actual = ours(z)
            torch.testing.assert_close(actual[0], energy, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(actual[1], gradient, rtol=1e-12, atol=1e-11)


def test_networks_are_in_evaluation_mode(double):
    _, x, y = problem()
    model = bbb.BayesianModel(Dropping(), bbb.likelihoods.Gaussian(), 7)
    potential, z = Potential(model, x, y), torch.ones(3)
    assert model.network.training
    recorded = record(potential.value_and_gradient, z)
    assert len({recorded(z)[0].item(), *(potential(z).item() for _ in range(9))}) == 1


def test_a_model_without_latents_is_refused():
    model = bbb.BayesianModel(PyroModule[nn.Linear](2, 1), bbb.likelihoods.Gaussian(), 7)
    with pytest.raises(ValueError, match="at least one latent"):
        mcmc.run_nuts(model, (torch.randn(7, 2), torch.randn(7, 1)))


# --- posteriors known exactly ---


def assert_mean(chains, series, expected):
    """The mean of ``series``, ``[chains, draws, ...]``, within its standard error."""
    of_series = replace(chains, by_chain={"series": series})
    error = series.flatten(0, 1).std(0) / of_series.ess("mean")["series"].sqrt()
    mean = series.flatten(0, 1).mean(0)
    assert ((mean - torch.as_tensor(expected)).abs() < SIGMAS * error).all(), (mean, expected)


def test_a_latent_noise_scale(double):
    """Weight and noise scale against quadrature on a grid: without the Jacobian it fails."""
    x, y = torch.ones(1, 1), torch.tensor([[0.8]])
    network = bbb.BayesianLinear(1, 1, bias=False, prior=dist.Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(dist.Gamma(2.0, 2.0)), 1)
    w, s = np.meshgrid(np.linspace(-5, 5, 401), np.linspace(0.005, 8, 800), indexing="ij")
    log_joint = stats.norm.logpdf(w) + stats.gamma.logpdf(s, 2, scale=0.5)
    log_joint += stats.norm.logpdf(y.item(), w, s)
    mass = np.exp(log_joint - log_joint.max())
    mass /= mass.sum()
    chains = mcmc.run_nuts(
        model, (x, y), num_samples=120, warmup_steps=60, num_chains=2, seed=1, progress=False
    )
    scale = chains.by_chain["likelihood.scale"]
    assert (scale > 0).all()
    assert_mean(chains, scale, (mass * s).sum())
    assert_mean(chains, scale.log(), (mass * np.log(s)).sum())
    assert_mean(chains, chains.by_chain["network.weight"].flatten(2), [(mass * w).sum()])


# --- what a run gives back, and what it leaves alone ---


def test_chains_are_a_mapping_of_joined_draws():
    model, x, y = problem("latent-noise")
    chains = bbb.run_nuts(model, (x, y), num_chains=2, seed=0, **QUICK)
    assert list(chains) == [*bbb.AutoSoftplusNormal(model).site_names] and len(chains) == 5
    weight = chains["network.fc1.weight"]
    assert weight.shape == (16, 4, 2) and weight.dtype == torch.float32
    torch.testing.assert_close(weight[8:], chains.by_chain["network.fc1.weight"][1])
    for numbers in (chains.log_density, chains.acceptance, chains.diverging, chains.num_gradients):
        assert numbers.shape == (2, 8)
    assert chains.diverging.dtype == torch.bool and chains.step_size.shape == (2,)
    assert ((chains.num_gradients > 0) & (chains.num_gradients < 2**3)).all()
    assert ((chains.acceptance >= 0) & (chains.acceptance <= 1 + 1e-5)).all()
    assert chains == chains and chains != replace(chains) and chains in {chains}
    assert "2 chains of 8 draws" in repr(chains)
    potential = Potential(model, x, y)
    for c in range(2):
        for s in (0, 7):
            draw = {name: values[c, s] for name, values in chains.by_chain.items()}
            energy = potential(potential.unconstrain(draw))
            torch.testing.assert_close(chains.log_density[c, s], -energy, rtol=1e-4, atol=1e-3)


def test_a_seed_fixes_each_chain_whatever_their_number():
    model, x, y = problem()
    two = mcmc.run_nuts(model, (x, y), num_chains=2, seed=5, **QUICK)
    alone = mcmc.run_nuts(model, (x, y), num_chains=1, seed=5, **QUICK)
    reseeded = mcmc.run_nuts(model, (x, y), num_chains=1, seed=6, **QUICK)
    for name in two:
        assert torch.equal(two.by_chain[name][0], alone.by_chain[name][0])
        assert not torch.equal(two.by_chain[name][0], two.by_chain[name][1])
        assert not torch.equal(alone[name], reseeded[name])
    twice = []
    for _ in range(2):
        pyro.set_rng_seed(1)
        twice.append(mcmc.run_nuts(model, (x, y), **QUICK)["network.fc1.bias"])
    assert torch.equal(*twice)


def global_state(model):
    return (
        torch.get_rng_state().tolist(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.distributions.Distribution._validate_args,
        pyro.poutine.runtime._PYRO_STACK.copy(),
        dict(pyro.get_param_store()),
        [module.training for module in model.modules()],
        {name: value.tolist() for name, value in model.state_dict().items()},
    )


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_outside_changes(fails, monkeypatch):
    model, x, y = problem("learned-noise")
    pyro.param("theirs", torch.ones(2))
    torch.set_num_threads(2)
    before = global_state(model)
    if fails:
        monkeypatch.setattr(_nuts.NUTS, "sample", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            mcmc.run_nuts(model, (x, y), seed=0, **QUICK)
    else:
        mcmc.run_nuts(model, (x, y), seed=0, **QUICK)
    assert global_state(model) == before
    torch.set_num_threads(1)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_trajectories_that_diverge_are_marked():
    """A Normal between two walls, over which some trajectories run and some do not."""

    def walled(z):
        return z.square().sum() / 2 + 1e6 * (z.abs() > 1.5).sum(), z.clone()

    chain = _nuts.run_chain(walled, torch.zeros(1), 0, 150, 60, {"max_tree_depth": 5})
    diverging, acceptance = chain["diverging"], chain["acceptance"]
    assert 5 < diverging.sum() < 145
    assert (chain["z"].abs() <= 1.5).all()
    outcomes = acceptance[diverging], acceptance[~diverging]
    assert outcomes[0].max() < 1 - 1 / 32 < outcomes[1].mean()  # over the wall is accepted never


# --- where chains start ---


def starts(model, x, y, init):
    return initial_positions(Potential(model, x, y), init, [1, 2])


def test_starts_are_what_was_given(double):
    model, x, y = problem("latent-noise")
    for init in (None, "he", "prior", bbb.AutoSoftplusNormal(model)):
        assert len(starts(model, x, y, init).unique(dim=0)) == 2
    potential = Potential(model, x, y)
    values = potential.draw_prior()
    expected = potential.unconstrain(values)
    short = {name.removeprefix("network."): value for name, value in values.items()}
    guide = bbb.AutoSoftplusNormal(model, init_loc=values, init_rho=-40.0)
    stock = AutoNormal(model, init_loc_fn=lambda site: values[site["name"]], init_scale=1e-12)
    stock(x, y)
    for init in (values, short, lambda site: values[site["name"]], guide, stock):
        for start in starts(model, x, y, init):
            torch.testing.assert_close(start, expected)
    at_half = potential.latents.constrain(starts(model, x, y, 0.5)[0])
    assert (at_half["network.fc1.weight"] == 0.5).all()
    converted, x, y = problem("converted")
    kept = {name: value.clone() for name, value in converted.initial_locs().items()}
    constrained = Potential(converted, x, y).latents.constrain(starts(converted, x, y, None)[0])
    for name, value in kept.items():
        torch.testing.assert_close(constrained[name], value)


# --- diagnostics ---


def of_draws(values):
    """Chains of given draws, ``[chains, draws]``."""
    plain = torch.zeros(values.shape)
    return bbb.Chains(
        by_chain={"a.b": torch.stack([values, -values], -1), "c": values},
        log_density=plain,
        diverging=plain.bool(),
        acceptance=plain,
        num_gradients=plain.long(),
        step_size=torch.ones(len(values)),
        seconds=1.0,
    )


def test_arviz_gets_every_group():
    model, x, y = problem("latent-noise")
    chains = mcmc.run_nuts(model, (x, y), num_chains=2, seed=0, **QUICK)
    plain = chains.to_arviz()
    assert plain["posterior"]["network.fc1.weight"].shape == (2, 8, 4, 2)
    assert plain["posterior"]["network.fc1.weight"].dims[:2] == ("chain", "draw")
    assert plain["sample_stats"]["diverging"].dtype == bool
    np.testing.assert_array_equal(plain["sample_stats"]["step_size"][1, 3], chains.step_size[1])
    full = chains.to_arviz(model, (x, y))
    np.testing.assert_array_equal(full["observed_data"]["obs"], y)
    pointwise = full["log_likelihood"]["obs"].values
    components = bbb.predict(model, chains, x, num_samples=16).components
    expected = components.log_prob(y).sum(-1).unflatten(0, (2, 8))
    np.testing.assert_allclose(pointwise, expected, rtol=2e-4, atol=2e-4)
    with pytest.raises(ValueError, match="model and data"):
        chains.to_arviz(model)


def test_arviz_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match=r"pyro-bbb\[mcmc\]"):
        of_draws(torch.randn(2, 9)).to_arviz()


# --- slow ---


@pytest.mark.slow
def test_processes_change_nothing(double):
    model, x, y = problem("mixture")
    alone = mcmc.run_nuts(model, (x, y), num_chains=2, seed=3, **QUICK)
    shared = mcmc.run_nuts(model, (x, y), num_chains=2, num_workers=2, seed=3, **QUICK)
    for name in alone:
        assert torch.equal(alone[name], shared[name])
    for name in ("log_density", "acceptance", "diverging", "num_gradients", "step_size"):
        assert torch.equal(getattr(alone, name), getattr(shared, name))


@pytest.mark.parametrize("prior", sorted(bbb.priors.PRIORS.keys() - IMPROPER))
def test_every_proper_prior_by_name_is_sampled_and_predicted_from(prior):
    network = bbb.BayesianMLP([2, 3, 1], activation=torch.nn.Tanh, prior=prior)
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(0.5), num_data=12)
    x = torch.randn(12, 2)
    settings = {"num_samples": 2, "warmup_steps": 1, "max_tree_depth": 2, "seed": 0}
    chains = bbb.run_nuts(model, (x, x.sum(1)), progress=False, **settings)
    latents = {name for name, _ in poutine.trace(model).get_trace(x).iter_stochastic_nodes()}
    assert set(chains) == latents - {"obs", "data"}
    assert bbb.predict(model, chains, x).sample_means.shape == (2, 12, 1)
