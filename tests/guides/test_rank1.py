# SPDX-License-Identifier: Apache-2.0
"""Rank-one ensembles: the objective in plain torch, whose turn it is, and the MAP as a limit."""

import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

import pyro_bbb as bbb
from pyro_bbb.elbo import minibatch_elbo
from pyro_bbb.estimators import ESTIMATORS
from pyro_bbb.training._captured import TracingDevice

CONV, HEAD = "network.0", "network.3"
KERNELS = {f"{CONV}.weight": (2, 1), f"{HEAD}.weight": (3, 8)}  # their first two dimensions
PRIOR, TAU = 0.7, 0.4


@pytest.fixture(autouse=True)
def in_double_precision():
    torch.set_default_dtype(torch.float64)


def data():
    return torch.randn(12, 1, 4, 4), torch.arange(12) % 3


def make(name="rank1_ensemble", likelihood=None, **options):
    """A convolution and a linear layer; their 4 x 4 images are cut to 2 x 2."""
    layers = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))
    network = bbb.bayesianize(layers, prior=dist.Normal(0.0, PRIOR))
    likelihood = likelihood or bbb.likelihoods.Categorical()
    model = bbb.BayesianModel(network, likelihood, num_data=12)
    return model, bbb.guides.make(name, model, **options)


def make_wide(**options):
    """Factors with different and wide posteriors."""
    model, guide = make(**{"size": 3, "prior_scale": TAU, "init_scale": 0.3} | options)
    with torch.no_grad():
        for name, parameter in guide.named_parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) * ("locs.network" in name))
            parameter.add_(0.5 * torch.rand_like(parameter) * ("rhos" in name))
    return model, guide


def factors_of(guide, member):
    """Normals of r and s of each kernel, read off the parameters."""
    params = {name: p.detach() for name, p in guide.named_parameters()}
    normals = {}
    for name, sizes in KERNELS.items():
        loc, rho = (params[f"factors.{group}.{name}"][member] for group in ("locs", "rhos"))
        columns = zip(loc.split(sizes), F.softplus(rho).split(sizes), strict=True)
        normals[name] = [Normal(*column) for column in columns]
    return normals


def kl_of(guide, member):
    normals = itertools.chain(*factors_of(guide, member).values())
    return sum(kl_divergence(q, Normal(torch.ones_like(q.loc), TAU)).sum() for q in normals)


def log_joint(weights, x, y):
    """Log-likelihood and log-prior of weights by site name."""
    hidden = F.conv2d(x, weights[f"{CONV}.weight"], weights[f"{CONV}.bias"]).tanh().flatten(1)
    logits = F.linear(hidden, weights[f"{HEAD}.weight"], weights[f"{HEAD}.bias"])
    log_prior = sum(Normal(0.0, PRIOR).log_prob(w).sum() for w in weights.values())
    return -F.cross_entropy(logits, y, reduction="sum"), log_prior


# --- the objective ---


def test_every_draw_has_the_objective_in_plain_torch():
    """Exactly, with the KL by torch, of the member whose turn it is; one turn each."""
    model, guide = make_wide()
    x, y = data()
    for turn in range(5):
        guide_trace = pyro.poutine.trace(guide).get_trace(x, y, 0.3)
        model_trace = pyro.poutine.trace(pyro.poutine.replay(model, trace=guide_trace))
        elbo = model_trace.get_trace(x, y, 0.3).log_prob_sum() - guide_trace.log_prob_sum()
        weights = {name: guide_trace.nodes[name]["value"] for name in guide.site_names}
        log_likelihood, log_prior = log_joint(weights, x, y)
        expected = log_likelihood + 0.3 * (log_prior - kl_of(guide, turn % 3))
        torch.testing.assert_close(elbo, expected, rtol=1e-12, atol=0.0)


def test_every_objective_is_the_same():
    """No part of the KL is lost where an objective has closed forms; the score of q is none."""
    model, guide = make_wide()
    x, y = data()
    objectives = [Trace_ELBO(), TraceMeanField_ELBO(), minibatch_elbo(None, 1)]
    objectives += [minibatch_elbo("mean_field", 1)] * 2
    estimators = ["reparam"] * 4 + ["stl"]
    losses, gradients = [], []
    for objective, estimator in zip(objectives, estimators, strict=True):
        guide.zero_grad()
        guide._turn.zero_()
        torch.manual_seed(1)
        with ESTIMATORS[estimator]():
            losses.append(objective.loss_and_grads(model, guide, x, y, 0.3))
        gradients.append(torch.cat([p.grad.flatten() for p in guide.parameters()]))
    for loss, gradient in zip(losses, gradients, strict=True):
        assert loss == pytest.approx(losses[0], rel=1e-12)
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-10, atol=1e-12)


# --- a limit: the MAP ---


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_one_member_with_fixed_factors_of_1_is_the_map(engine):
    noise = bbb.likelihoods.Gaussian(dist.LogNormal(0.0, 1.0))
    x, _ = data()
    pairs, runs = (x, torch.randn(12, 3)), []
    still = {"size": 1, "spread": 0.0, "init_scale": 1e-30}
    start = make("delta", noise)[1].median()
    for name, options in {"delta": {}, "rank1_ensemble": still}.items():
        model, guide = make(name, noise, init_loc=start, **options)
        for parameter in (p for key, p in guide.named_parameters() if "factors" in key):
            parameter.requires_grad_(False)
        # one batch: the noise of the factors would give minibatches another order
        options = {"epochs": 8, "batch_size": 12, "lr": 0.01, "seed": 0, "engine": engine}
        history = bbb.fit(model, guide, pairs, progress=False, **options)
        runs.append((guide.median(), history))
    (expected, of_map), (medians, history) = runs
    assert medians.keys() == expected.keys()
    for name, value in medians.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10)
    nll = torch.tensor(of_map.nll)
    torch.testing.assert_close(torch.tensor(history.nll), nll, rtol=1e-10, atol=1e-10)


# --- members ---


def test_members_differ_by_rank_one_and_draws_take_turns():
    model, guide = make(size=3, init_scale=1e-30)
    members = [guide.member(k) for k in range(3)]
    for name in KERNELS:
        ratio = members[1][name] / members[2][name]
        ratio = ratio.view(*ratio.shape[:2], -1)
        assert ratio.std(-1, correction=0).max() < 1e-14  # one for all positions
        singular = torch.linalg.svdvals(ratio[..., 0])
        assert singular[0] > 0.1 and (singular[1:] < 1e-13 * singular[0]).all()
    draws = guide.sample_posterior(5)
    one_by_one = [guide(data()[0]) for _ in range(5)]
    for i, name in itertools.product(range(5), guide.site_names):
        assert torch.equal(draws[name][i], members[i % 3][name])
        assert torch.equal(one_by_one[i][name], members[i % 3][name])
    assert guide._turn.item() == 2


def test_every_member_is_drawn_from_its_own_normals():
    """Means and variances of the kernels, in closed form, within 6 standard errors."""
    _, guide = make_wide()
    draws = guide.sample_posterior(3 * 4000)
    for member, name in itertools.product(range(3), KERNELS):
        (r, s), kernel = factors_of(guide, member)[name], guide.get_parameter(f"locs.{name}")
        first = torch.outer(r.mean, s.mean)
        second = torch.outer(r.mean.square() + r.variance, s.mean.square() + s.variance)
        own = (draws[name][member::3] / kernel).view(4000, *first.shape, -1)[..., 0]
        for power, expected in ((1, first), (2, second)):
            error = own.pow(power).std(0) / len(own) ** 0.5
            assert ((own.pow(power).mean(0) - expected).abs() < 6 * error).all()


@pytest.mark.parametrize("particles", [1, 2, 4])
def test_compiled_steps_take_turns_as_eager_ones(monkeypatch, particles):
    captured, states = [], []
    capture = TracingDevice.capture
    monkeypatch.setattr(
        TracingDevice, "capture", lambda *args: captured.append(capture(*args)) or captured[-1]
    )
    for engine in ("eager", "compiled"):
        pyro.set_rng_seed(0)
        model, guide = make(size=3)
        options = {"epochs": 5, "batch_size": 5, "seed": 1, "num_particles": particles}
        bbb.fit(model, guide, data(), engine=engine, progress=False, lr=0.01, **options)
        states.append(guide.state_dict())
    assert len(captured) == 2  # minibatches of 5 and of 2
    eager, compiled = states
    for name, value in eager.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-9, atol=1e-10)


def test_initial_factors_and_the_numbers_of_a_member():
    _, guide = make(size=200, spread=0.1)
    means = torch.cat([p.flatten() for n, p in guide.named_parameters() if "factors.locs" in n])
    error = 0.1 / len(means) ** 0.5
    assert (means.mean() - 1).abs() < 5 * error and (means.std() - 0.1).abs() < 5 * error
    _, guide = make(size=200, init="signs")
    means = torch.cat([p.flatten() for n, p in guide.named_parameters() if "factors.locs" in n])
    assert (means.abs() == 1).all() and means.mean().abs() < 5 / len(means) ** 0.5
    assert guide.numbers_per_member == 2 * (2 + 1) + 2 * (3 + 8) + 2 + 3
    _, larger = make(size=201)
    count = [sum(p.numel() for p in g.parameters()) for g in (guide, larger)]
    assert count[1] - count[0] == guide.numbers_per_member


def test_latents_found_at_the_first_call_and_models_without_kernels():
    def model(x):
        z = pyro.sample("z", dist.LogNormal(0.0, 1.0))
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w.sum(), z), obs=x)

    guide = bbb.guides.Rank1Ensemble(model, size=2)
    loss = Trace_ELBO().loss_and_grads(model, guide, torch.zeros(3))
    draws = guide.sample_posterior(4)
    assert torch.tensor(loss).isfinite()
    assert draws["z"].shape == (4,) and draws["w"].shape == (4, 2)
    assert (draws["z"] > 0).all()


@pytest.mark.parametrize("call", [bbb.to_module, lambda m, g: bbb.predict_mean(m, g, data()[0])])
def test_one_network_for_several_members_is_refused(call):
    model, guide = make()
    with pytest.raises(TypeError, match=r"an ensemble of 4 has no single centre; .*member\(0\)"):
        call(model, guide)
    alone = make(size=1)
    call(*alone)


def test_a_drawn_ensemble_answers_as_predict():
    model, guide = make(size=3)
    x, _ = data()
    plain = bbb.to_ensemble(model, guide, num_samples=6, seed=0)
    expected = bbb.predict(model, guide, x, num_samples=6, seed=0).probs
    torch.testing.assert_close(plain(x)["probs"], expected)


def test_what_wants_a_normal_of_the_weights_refuses_it():
    model, guide = make()
    x, y = data()
    with pytest.raises(TypeError, match="linearized needs a Normal guide, .*got Rank1Ensemble"):
        bbb.predict(model, guide, x, linearized=True)
    with pytest.raises(TypeError, match="guide must be an AutoSoftplusNormal, got Rank1Ensemble"):
        bbb.prune(guide, 0.5)
    with pytest.raises((TypeError, ValueError), match="AutoSoftplusNormal"):
        bbb.fit(model, guide, (x, y), epochs=1, optimizer="ivon", progress=False)
    with pytest.raises(TypeError, match="marginals have no closed form; use draws"):
        guide.quantiles([0.5])
