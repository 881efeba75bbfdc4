# SPDX-License-Identifier: Apache-2.0
"""A posterior as the next prior: exact where Bayes is, and refused where it cannot be."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)

import pyro_bbb as bbb
from pyro_bbb.priors import FromGuide, from_guide

SIGMA, S = 0.4, 0.8


def build(prior, sizes=(3, 4, 1)):
    network = bbb.BayesianMLP(sizes, prior=prior)
    return bbb.BayesianModel(network, bbb.likelihoods.Gaussian(SIGMA), num_data=8)


def prior_sites(model, dtype=torch.float32):
    trace = poutine.trace(model.network).get_trace(torch.randn(2, 3, dtype=dtype))
    return {name: site["fn"] for name, site in trace.iter_stochastic_nodes()}


# --- continual learning, in closed form ---


class Task:
    """Orthogonal inputs: the exact posteriors of the weights are independent Normals."""

    def __init__(self):
        q, _ = torch.linalg.qr(torch.randn(8, 4))
        self.x = q * torch.tensor([3.0, 1.0, 0.5, 2.0])  # [N, 4], no bias: the last is an input
        self.y = self.x @ torch.tensor([0.7, -0.4, 0.2, 0.5]) + SIGMA * torch.randn(8)

    def posterior(self, loc, scale):
        """Mean and scale after this task, from those before."""
        precision = self.x.square().sum(0) / SIGMA**2 + scale.pow(-2)
        return (self.x.T @ self.y / SIGMA**2 + loc / scale**2) / precision, precision.rsqrt()

    def log_evidence(self, loc, scale):
        covariance = SIGMA**2 * torch.eye(8) + self.x @ (scale.square()[:, None] * self.x.T)
        marginal = torch.distributions.MultivariateNormal(self.x @ loc, covariance)
        return marginal.log_prob(self.y).item()


def linear(prior):
    network = bbb.BayesianLinear(4, 1, bias=False, prior=prior)
    return bbb.BayesianModel(network, bbb.likelihoods.Gaussian(SIGMA), num_data=8)


def guide_at(model, loc, scale):
    guide = bbb.AutoSoftplusNormal(model, init_loc={"weight": loc[None]})
    guide._parameter("rhos", "network.weight").data.copy_(scale.expm1().log()[None])
    return guide


def test_two_tasks_in_turn_are_both_tasks_at_once():
    """Every draw's ELBO is the log evidence of task 2 given task 1, at the exact posterior."""
    torch.set_default_dtype(torch.float64)
    first, second = Task(), Task()
    start = torch.zeros(4), torch.full((4,), S)
    after_first = first.posterior(*start)
    model = linear(dist.Normal(0.0, S))
    guide = guide_at(model, *after_first)
    elbo = -Trace_ELBO().loss(model, guide, first.x, first.y[:, None])
    assert elbo == pytest.approx(first.log_evidence(*start), abs=1e-9)

    model = linear(from_guide(guide))
    after_both = second.posterior(*after_first)
    guide = guide_at(model, *after_both)
    for _ in range(3):
        elbo = -Trace_ELBO().loss(model, guide, second.x, second.y[:, None])
        assert elbo == pytest.approx(second.log_evidence(*after_first), abs=1e-9)
    stl = Trace_ELBO()
    with bbb.sticking_the_landing():  # without the score each draw's gradient is 0
        stl.loss_and_grads(model, guide, second.x, second.y[:, None])
    assert all(parameter.grad.abs().max() < 1e-9 for parameter in guide.parameters())

    # the posterior of both tasks' data at once, by one linear system
    x, y = torch.cat([first.x, second.x]), torch.cat([first.y, second.y])
    precision = x.T @ x / SIGMA**2 + torch.eye(4) / S**2
    loc = torch.linalg.solve(precision, x.T @ y / SIGMA**2)
    torch.testing.assert_close(guide.loc("network.weight")[0], loc)
    torch.testing.assert_close(guide.scale("network.weight")[0], precision.diagonal().rsqrt())


# --- which guides ---


@pytest.mark.parametrize(
    "kind",
    [
        bbb.AutoSoftplusNormal,
        AutoNormal,
        AutoDiagonalNormal,
        AutoLowRankMultivariateNormal,
        AutoMultivariateNormal,
    ],
)
def test_marginals_of_every_normal_guide(kind):
    """Mean and standard deviation of many draws: 6 standard errors for 42 numbers, 1e-7."""
    model, data = build("normal"), (torch.randn(8, 3), torch.randn(8, 1))
    guide = kind(model)
    bbb.fit(model, guide, data, epochs=20, lr=0.05, progress=False)
    count = 4000
    with torch.no_grad(), poutine.trace() as get_traces, pyro.plate("draws", count, dim=-2):
        guide(*data)
    sites = prior_sites(build(from_guide(guide)))
    assert list(sites) == list(prior_sites(model))
    for name, fn in sites.items():
        draws = get_traces.trace.nodes[name]["value"]  # [count, 1, ...]
        draws = draws.reshape(count, *fn.event_shape)
        assert isinstance(fn.base_dist, dist.Normal)
        assert ((draws.mean(0) - fn.mean).abs() < 6 * fn.stddev / math.sqrt(count)).all()
        assert ((draws.std(0) / fn.stddev - 1).abs() < 6 / math.sqrt(2 * count)).all()


def test_the_prior_is_a_copy_that_stays():
    model = build("normal")
    guide = bbb.AutoSoftplusNormal(model)
    second = build(from_guide(guide))
    assert not list(second.parameters())
    before = {name: fn.mean.clone() for name, fn in prior_sites(second).items()}
    bbb.fit(model, guide, (torch.randn(8, 3), torch.randn(8, 1)), epochs=2, progress=False)
    for name, fn in prior_sites(second).items():
        assert torch.equal(fn.mean, before[name]) and not fn.mean.requires_grad
        assert not torch.equal(guide.loc(name), before[name])


def test_without_data_the_old_guide_is_the_new_optimum():
    guide = bbb.AutoSoftplusNormal(build("normal"))
    second = poutine.block(build(from_guide(guide)), hide=["obs"])
    assert TraceMeanField_ELBO().loss(second, guide, torch.ones(8, 3)) == pytest.approx(0, abs=1e-6)


def test_latents_that_are_not_normal_are_left_to_the_default():
    """The weights of a hierarchical model are passed on, their scales are not."""
    guide = bbb.AutoSoftplusNormal(build("horseshoe"), init_rho=-1.0)
    prior = from_guide(guide)
    assert set(prior_sites(build(prior))) == {n for n in guide.site_names if "_prior_" not in n}
    positive = bbb.AutoSoftplusNormal(build(dist.LogNormal(0.0, 1.0)), init_rho=-1.0)
    with pytest.raises(ValueError, match="must have a Normal posterior of a weight"):
        from_guide(positive)


def test_weights_the_guide_has_not_get_the_default_or_are_named():
    guide = bbb.AutoSoftplusNormal(build("normal"))
    with pytest.raises(ValueError, match=r"no Normal posterior of 'fc3.weight'.*'fc1.weight'"):
        build(from_guide(guide), sizes=(3, 4, 1, 2))
    patterns = {"fc3.weight": "laplace", "*.bias": "horseshoe"}
    sites = prior_sites(build(from_guide(guide, default=patterns), sizes=(3, 4, 1, 2)))
    assert isinstance(sites["network.fc3.weight"].base_dist, dist.Laplace)
    assert "network.fc3.bias_prior_scale" in sites and "network.fc1.bias_prior_scale" not in sites
    assert torch.equal(sites["network.fc1.weight"].mean, guide.loc("network.fc1.weight"))


def test_a_network_without_model_has_the_same_names():
    layer = bbb.BayesianLinear(2, 1, prior="normal")
    guide = bbb.AutoSoftplusNormal(lambda x: layer(x))
    guide(torch.randn(3, 2))
    assert set(guide.site_names) == {"weight", "bias"}
    prior = from_guide(guide)
    assert isinstance(prior, FromGuide)
    sites = poutine.trace(bbb.BayesianLinear(2, 1, prior=prior)).get_trace(torch.randn(3, 2)).nodes
    torch.testing.assert_close(sites["weight"]["fn"].mean, guide.loc("weight"))


def test_another_shape_is_refused_where_it_would_broadcast():
    guide = bbb.AutoSoftplusNormal(build("normal"))
    with pytest.raises(
        ValueError, match=r"guide's 'weight' must have .* shape \[5, 4\], got \[1, 4\]"
    ):
        build(from_guide(guide), sizes=(3, 4, 5))


def test_pruned_and_point_guides_are_refused():
    model = build("normal")
    guide = bbb.AutoSoftplusNormal(model)
    with pytest.raises(ValueError, match="positive scales, got others for 'network.fc1.*pruned"):
        from_guide(bbb.prune(guide, fraction=0.9))
    point = AutoDelta(model)
    bbb.fit(model, point, (torch.randn(8, 3), torch.randn(8, 1)), epochs=1, progress=False)
    with pytest.raises(TypeError, match="guide must have a method quantiles, got AutoDelta"):
        from_guide(point)
    with torch.no_grad():
        guide.locs.network.fc1._parameters["weight"][0, 0] = math.inf
    with pytest.raises(ValueError, match="finite means"):
        from_guide(guide)
