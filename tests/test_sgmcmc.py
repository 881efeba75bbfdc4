# SPDX-License-Identifier: Apache-2.0
"""SG-MCMC: its stationary distributions in closed form, its steps against SGD, and resuming."""

import math

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_bbb as bbb
from pyro_bbb.mcmc._potential import MinibatchGradient, Potential
from pyro_bbb.mcmc._run import Shuffled, initial_positions
from pyro_bbb.mcmc._sgmcmc import LangevinRun, baoab, preconditioner_root, rmsprop, sgld
from tests._support.branching import Branching

SIGMAS = 6  # standard errors
N, NOISE, PRIOR = 30, 0.5, 0.8


def line(n=N, outputs=1):
    """Linear regression with known noise: the posterior is a Normal."""
    x = torch.randn(n, 2) @ torch.tensor([[1.0, 0.8], [0.0, 0.6]])
    y = x @ torch.tensor([[0.5], [-0.3]]) + 0.2 + NOISE * torch.randn(n, 1)
    network = bbb.BayesianMLP([2, outputs], prior=dist.Normal(0.0, PRIOR))
    return bbb.BayesianModel(network, bbb.likelihoods.Gaussian(NOISE), n), (x, y)


def posterior(data):
    """Mean and precision of weight and bias."""
    design = torch.cat([data[0], torch.ones(len(data[0]), 1)], dim=1)
    precision = design.T @ design / NOISE**2 + torch.eye(3) / PRIOR**2
    return precision.inverse() @ design.T @ data[1].flatten() / NOISE**2, precision


def vectors(chains):
    return torch.cat([values.flatten(1) for values in chains.values()], dim=1)


# --- stationary distributions ---


@pytest.mark.parametrize(("sampler", "temperature"), [("sgld", 1.0), ("sghmc", 0.1)])
def test_the_stationary_distribution_is_known(double, sampler, temperature):
    """SGLD is too wide by 1 / (1 - step * precision / 2), SGHMC in BAOAB form is exact."""
    model, data = line()
    loc, precision = posterior(data)
    eta = 1.0 / torch.linalg.eigvalsh(precision)[-1].item()  # variances up to twice as large
    chains = bbb.run_sgmcmc(
        model,
        data,
        sampler=sampler,
        lr=eta * N,
        temperature=temperature,
        momentum=0.5 if sampler == "sghmc" else None,
        num_chains=300,  # independent, each of one sample
        num_samples=1,
        warmup_steps=120,
        thin=1,
        batch_size=N,
        seed=0,
        progress=False,
    )
    covariance = temperature * precision.inverse()
    if sampler == "sgld":
        covariance = covariance @ (torch.eye(3) - eta / 2 * precision).inverse()
    # in the posterior's own directions, scaled to variance 1
    root = torch.linalg.cholesky(covariance)
    z = torch.linalg.solve_triangular(root, (vectors(chains) - loc).T, upper=False)
    count = z.shape[1]
    assert (z.mean(1).abs() < SIGMAS / math.sqrt(count)).all()
    assert ((z.square().mean(1) - 1).abs() < SIGMAS * math.sqrt(2 / count)).all()
    products = torch.stack([z[0] * z[1], z[0] * z[2], z[1] * z[2]]).mean(1)
    assert (products.abs() < SIGMAS / math.sqrt(count)).all()


def test_a_preconditioner_leaves_the_posterior_as_it_is(double):
    model, data = line()
    loc, precision = posterior(data)
    chains = bbb.run_sgmcmc(
        model,
        data,
        lr=0.05,
        preconditioner="rmsprop",
        num_chains=200,
        num_samples=1,
        warmup_steps=100,
        thin=100,
        batch_size=N,
        seed=0,
        progress=False,
    )
    z = torch.linalg.cholesky(precision).T @ (vectors(chains) - loc).T
    assert (z.mean(1).abs() < SIGMAS / math.sqrt(200)).all()
    assert ((z.square().mean(1) - 1).abs() < SIGMAS * math.sqrt(2 / 200)).all()


# --- steps ---


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_without_noise_a_step_is_one_of_torchs_sgd(double, momentum):
    model, data = line()
    potential = Potential(model, *data)
    z, p, eta = torch.randn(4, 3), torch.zeros(4, 3), 0.03 / N
    parameter = nn.Parameter(z.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.03, momentum=momentum or 0.0)
    gradient = MinibatchGradient(potential, z, data)
    for _ in range(10):
        optimizer.zero_grad()
        (sum(map(potential, parameter)) / N).backward()
        optimizer.step()
        slope = gradient(z, *data)[1]
        if momentum is None:
            z = sgld(z, slope, eta, torch.tensor(1.0), temperature=0.0)
        else:
            h = torch.tensor(math.sqrt(2 * eta / (1 + momentum)))
            z, p = baoab(z, p, slope, h, momentum, temperature=0.0)
    torch.testing.assert_close(z, parameter.detach(), rtol=1e-10, atol=1e-12)


def test_the_preconditioner_is_rmsprops(double):
    z, square_avg = torch.randn(2, 3), torch.zeros(2, 3)
    parameter = nn.Parameter(z.clone())
    optimizer = torch.optim.RMSprop([parameter], lr=0.03, alpha=0.99, eps=1e-5)
    for step in range(5):
        parameter.grad = torch.randn(2, 3)
        if step == 0:  # torch begins at 0, which takes a hundred steps to forget
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "square_avg": parameter.grad.square(),
            }
        square_avg = rmsprop(square_avg, parameter.grad, first=step == 0)
        z = sgld(z, parameter.grad, 0.03, preconditioner_root(square_avg), temperature=0.0)
        optimizer.step()
    torch.testing.assert_close(z, parameter.detach(), rtol=1e-10, atol=1e-12)


NETWORKS = {
    "mlp": lambda: bbb.BayesianMLP([2, 4, 1], activation=nn.Tanh),
    "mixture": lambda: bbb.BayesianMLP([2, 4, 1], prior="scale_mixture"),
    "convolution": lambda: bbb.bayesianize(
        nn.Sequential(nn.Unflatten(1, (1, 2)), nn.Conv1d(1, 3, 2), nn.Flatten(), nn.Linear(3, 1))
    ),
    "branching": Branching,
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_chains_in_one_pass_are_chains_one_by_one(double, kind):
    x, y = torch.randn(6, 2), torch.randn(6, 1)
    likelihood = bbb.likelihoods.Gaussian(dist.LogNormal(0.0, 0.5))
    potential = Potential(bbb.BayesianModel(NETWORKS[kind](), likelihood, 60), x, y)
    z = initial_positions(potential, None, [None] * 2)
    gradient = MinibatchGradient(potential, z, (x, y))
    assert gradient._batched == (kind != "branching")
    energies, gradients = gradient(z, x, y)
    for i in range(2):
        energy, slope = potential.value_and_gradient(z[i])
        torch.testing.assert_close(energies[i], energy)
        torch.testing.assert_close(gradients[i], slope)


# --- cycles and batches ---


def test_cycles_warm_up_without_noise_and_take_samples_at_low_rates(double):
    """The path is gradient descent on the quadratic energy, at rates along half a cosine."""
    model, data = line()
    loc, precision = posterior(data)
    options = {"sampler": "sgld", "lr": 0.1, "cycles": 2, "warmup_steps": 6, "init": 0.0, "seed": 0}
    options |= {"num_samples": 4, "batch_size": N, "progress": False}
    visited = vectors(bbb.run_sgmcmc(model, data, thin=2, temperature=0.0, **options))
    z, samples = torch.zeros(3), []
    for step in range(20):
        if step in (7, 9, 17, 19):
            samples.append(z)
        rate = 0.1 / N * (0.5 + 0.5 * math.cos(math.pi * (step % 10) / 10))
        z = z - rate * precision @ (z - loc)
    torch.testing.assert_close(visited, torch.stack(samples))
    cold, warm = (
        vectors(bbb.run_sgmcmc(model, data, thin=1, temperature=t, **options)) for t in (0.0, 1.0)
    )
    assert (cold == warm).all(1).tolist() == [True, False, False, False]


def test_minibatches_go_over_the_data_in_random_order():
    x = torch.arange(10)
    batches = iter(Shuffled(x, x, 3))
    for _ in range(5):
        passed = [next(batches)[1] for _ in range(3)]
        rows = torch.cat(passed)
        assert len(rows.unique()) == 9
    assert not torch.equal(rows, torch.cat([next(batches)[0] for _ in range(3)]))


# --- a run ---


QUICK = {"num_samples": 6, "warmup_steps": 4, "thin": 3, "batch_size": 8, "progress": False}


@pytest.mark.parametrize("options", [{"cycles": 2, "preconditioner": "rmsprop"}, {"seed": None}])
def test_an_interrupted_run_goes_on_to_the_bit(tmp_path, monkeypatch, options):
    model, data = line()
    options = {"seed": 3, "num_chains": 2, "lr": 0.05, **QUICK, **options}
    torch.manual_seed(0)
    uninterrupted = bbb.run_sgmcmc(model, data, **options)
    step = LangevinRun.step

    def killed(run):
        step(run)
        if run.counters.done == 13:
            raise KeyboardInterrupt

    saved = {"checkpoint": tmp_path, "checkpoint_every": 5}
    monkeypatch.setattr(LangevinRun, "step", killed)
    torch.manual_seed(0)
    with pytest.raises(KeyboardInterrupt):
        bbb.run_sgmcmc(model, data, **options, **saved)
    monkeypatch.undo()
    again = bbb.run_sgmcmc(model, data, **options, **saved)
    for name in uninterrupted:
        assert torch.equal(uninterrupted[name], again[name])
    assert torch.equal(uninterrupted.log_density, again.log_density)
    finished = bbb.run_sgmcmc(model, data, **options, **saved)
    assert torch.equal(finished["network.fc1.weight"], uninterrupted["network.fc1.weight"])
    with pytest.raises(ValueError, match=r"different configuration: lr: 0.05 there, 0.06 here"):
        bbb.run_sgmcmc(model, data, **{**options, "lr": 0.06}, **saved)


def curve(prior=None, activation=nn.Tanh, likelihood=None, shift=0.0, **init):
    """A network whose last bias is not random, and the options of its run."""
    torch.manual_seed(0)
    network = bbb.BayesianMLP([2, 3, 1], prior=prior, activation=activation)
    layers = nn.Sequential(network, nn.BatchNorm1d(1))
    with torch.no_grad():
        layers[1].bias.add_(shift)
    return bbb.BayesianModel(layers, likelihood or bbb.likelihoods.Gaussian(0.5), N), init


OTHERS = [
    ({"prior": dist.Normal(0.0, 0.5)}, r"prior: Independent\(.*scale=1.0.* there, .*scale=0.5"),
    ({"shift": 0.5}, "model.network.1.bias: 0.0 there, 0.5 here"),
    ({"init": "prior"}, "init: None there, 'prior' here"),
]


@pytest.mark.parametrize(("changes", "message"), OTHERS)
def test_samples_of_another_model_are_refused_and_the_difference_named(tmp_path, changes, message):
    torch.manual_seed(0)
    data = line()[1]
    for finished in ({}, changes):
        model, init = curve(**finished)
        options = {**QUICK, "num_samples": 1, "checkpoint": tmp_path, **init}
        if finished:
            with pytest.raises(ValueError, match=f"different configuration: .*{message}"):
                bbb.run_sgmcmc(model, data, **options)
        else:
            first = bbb.run_sgmcmc(model, data, **options)
            again = bbb.run_sgmcmc(*curve()[:1], data, **options)
            assert torch.equal(vectors(first), vectors(again))


def test_a_run_is_a_function_of_its_seed_and_predicts(double):
    model, data = line()
    before = torch.get_rng_state()
    first, repeated, reseeded = (
        bbb.run_sgmcmc(model, data, seed=seed, num_chains=2, **QUICK) for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(vectors(first), vectors(repeated)) and not torch.equal(
        *map(vectors, (first, reseeded))
    )
    assert first["network.fc1.weight"].shape == (12, 1, 2) and first.log_density.shape == (2, 6)
    assert bbb.predict(model, first, data[0]).mean.shape == (N, 1)


def test_the_log_density_is_that_of_the_sample(double):
    model, data = line()
    chains = bbb.run_sgmcmc(model, data, seed=0, **{**QUICK, "batch_size": N})
    potential = Potential(model, *data)
    energies = torch.stack([potential(z) for z in vectors(chains)])
    torch.testing.assert_close(chains.log_density.flatten(), -energies)


def test_a_diverging_chain_stops_and_keeps_the_samples():
    model, data = line()
    with pytest.raises(
        bbb.DivergedError, match=r"chain 0 is not finite at step \d+.*lower lr"
    ) as e:
        bbb.run_sgmcmc(model, data, lr=3.0, seed=0, **{**QUICK, "num_samples": 600})
    kept = vectors(e.value.chains)
    assert kept.isfinite().all() and len(kept) == (e.value.step - 1 - 4) // 3
