# SPDX-License-Identifier: Apache-2.0
"""Priors with parameters: they are found, stay in their domain, and go where the weights are."""

import copy
import math

import pyro
import pyro.distributions as dist
import pytest
import scipy.stats
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.nn import PyroModule
from torch import nn

import pyro_bbb as bbb
from pyro_bbb.priors import LearnedNormal, LearnedScaleMixture

SIZE = torch.Size
TRUE = (0.3, 1.5, 0.05)  # pi, sigma1, sigma2
KEYS = ("logit", "log_sigma1", "log_sigma2")


def mixture_draws(count):
    pi, sigma1, sigma2 = TRUE
    wide = torch.rand(count) < pi
    return torch.randn(count) * torch.where(wide, sigma1, sigma2)


def standard_errors(weights):
    """Errors of the maximum-likelihood logit and log-scales, by the observed information."""
    pi, sigma1, sigma2 = TRUE
    truth = torch.tensor([math.log(pi / (1 - pi)), math.log(sigma1), math.log(sigma2)])

    def neg_log_likelihood(theta):
        probs = torch.stack([torch.sigmoid(theta[0]), torch.sigmoid(-theta[0])])
        scales = theta[1:].exp()
        normals = -0.5 * (weights[:, None] / scales).square() - scales.log()
        return -torch.logsumexp(normals + probs.log(), -1).sum()

    information = torch.autograd.functional.hessian(neg_log_likelihood, truth)
    return truth, information.inverse().diagonal().sqrt()


def found(prior):
    return torch.stack([getattr(prior, key).detach() for key in KEYS])


# --- LearnedScaleMixture: density ---


@pytest.mark.parametrize("logit", [-1e4, -20.0, 0.0, 100.0])
@pytest.mark.parametrize("sigmas", [(1.0, 0.01), (0.01, 1.0), (0.5, 0.5)])
def test_density_and_gradients_are_finite_and_right_however_large_the_logit(logit, sigmas):
    prior = LearnedScaleMixture(0.5, *sigmas)
    with torch.no_grad():
        prior.logit.fill_(logit)
    w = torch.tensor([-30.0, -1.0, -0.02, 0.0, 1e-3, 0.5, 5.0], requires_grad=True)
    log_prob = prior(nn.Module(), "weight", w.shape).base_dist.log_prob(w)
    ours = torch.autograd.grad(log_prob.sum(), (w, *prior.parameters()))
    x = w.detach().double().requires_grad_()
    theta = [p.detach().double().requires_grad_() for p in prior.parameters()]
    odds, *logs = theta
    normals = [-0.5 * (x * (-s).exp()).square() - s - 0.5 * math.log(2 * math.pi) for s in logs]
    first = torch.nn.functional.logsigmoid(odds) + normals[0]
    exact = torch.logaddexp(first, torch.nn.functional.logsigmoid(-odds) + normals[1])
    size = max(abs(logit), 1) * 1e-6  # numbers as large as the logit are rounded
    torch.testing.assert_close(log_prob.double(), exact, rtol=1e-5, atol=4 * size)
    expected = torch.autograd.grad(exact.sum(), (x, *theta))
    largest = max(slope.abs().max().item() for slope in expected)  # terms of this size cancel
    for gradient, reference in zip(ours, expected, strict=True):
        assert gradient.isfinite().all()
        assert (gradient.double() - reference).abs().max() <= size * largest


def test_parameters_are_unconstrained_and_the_properties_constrained():
    prior = LearnedScaleMixture(*TRUE)
    assert [name for name, _ in prior.named_parameters()] == list(KEYS)
    values = torch.stack([prior.pi, prior.sigma1, prior.sigma2])
    torch.testing.assert_close(values, torch.tensor(TRUE))
    with torch.no_grad():
        for parameter in prior.parameters():
            parameter.fill_(-30.0)
    assert 0 < prior.pi < 1 and prior.sigma1 > 0 and prior.sigma2 > 0
    torch.autograd.backward([prior.pi + prior.sigma1 + prior.sigma2])
    assert all(parameter.grad > 0 for parameter in prior.parameters())
    assert "pi=0.3, sigma1=1.5, sigma2=0.05" in repr(LearnedScaleMixture(*TRUE))


# --- LearnedScaleMixture: in networks ---


def test_one_set_of_parameters_serves_all_sites():
    network = bbb.BayesianMLP([3, 4, 2], prior=LearnedScaleMixture())
    assert [name for name, _ in network.named_parameters()] == [f"fc1.prior.{k}" for k in KEYS]
    converted = bbb.bayesianize(
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), LearnedScaleMixture()
    )
    assert len(list(converted.parameters())) == 3
    twin = copy.deepcopy(network)
    assert len(list(twin.parameters())) == 3
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in network.parameters()}
    assert {p.dtype for p in network.double().parameters()} == {torch.float64}
    assert network(torch.randn(2, 3).double()).dtype == torch.float64


def test_two_learned_priors_in_one_layer_are_both_announced():
    prior = {"weight": LearnedScaleMixture(), "bias": LearnedScaleMixture(0.2, 2.0, 1.0)}
    layer = bbb.BayesianLinear(3, 2, prior=prior)
    trace = poutine.trace(layer).get_trace(torch.randn(4, 3))
    announced = {id(site["value"].unconstrained()) for site in params(trace)}
    assert announced == {id(parameter) for parameter in layer.parameters()}
    assert len(announced) == 6


def params(trace):
    return [site for site in trace.nodes.values() if site["type"] == "param"]


@pytest.mark.parametrize("kind", ["learned_scale_mixture", "learned_normal"])
def test_frozen_parameters_are_not_trained(kind):
    layer = bbb.BayesianLinear(3, 2, prior=kind)
    assert params(poutine.trace(layer).get_trace(torch.randn(4, 3)))
    layer.requires_grad_(False)
    assert not params(poutine.trace(layer).get_trace(torch.randn(4, 3)))


def test_svi_finds_the_parameters_that_generated_the_weights():
    """A network alone as Pyro model, its weights known: maximum likelihood by SVI.

    5 standard errors from the observed information, three parameters: false alarms 2e-6.
    """
    torch.set_default_dtype(torch.float64)
    weights = mixture_draws(2000)
    prior = LearnedScaleMixture(0.5, 1.0, 0.2)
    layer = bbb.BayesianLinear(50, 40, bias=False, prior=prior)
    model = poutine.condition(layer, {"weight": weights.view(40, 50)})
    svi = SVI(model, lambda x: None, pyro.optim.Adam({"lr": 0.05}), Trace_ELBO())
    for _ in range(250):
        svi.step(torch.zeros(1, 50))
    truth, error = standard_errors(weights)
    assert (error < 0.1).all()
    assert ((found(prior) - truth).abs() < 5 * error).all()
    slope = torch.autograd.grad(prior(layer, "weight", SIZE([2000])).log_prob(weights), prior.logit)
    assert abs(slope[0]) < 0.01 / error[0]  # at the likelihood's maximum, not merely near


def small_model(prior):
    network = bbb.BayesianMLP([3, 4, 1], prior=prior)
    return bbb.BayesianModel(network, bbb.likelihoods.Gaussian(0.5), num_data=12)


def small_data():
    return torch.randn(12, 3), torch.randn(12, 1)


# --- LearnedNormal ---


def test_each_weight_has_a_location_of_its_own():
    network = bbb.BayesianMLP([3, 4, 2], prior=LearnedNormal(0.7))
    names = [name for name, _ in network.named_parameters()]
    weights = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
    assert names == [f"{name}_prior_loc" for name in weights]
    assert all((parameter == 0).all() for parameter in network.parameters())
    with torch.no_grad():
        network.fc1._parameters["weight_prior_loc"].normal_()
    trace = poutine.trace(network).get_trace(torch.randn(5, 3))
    site = trace.nodes["fc1.weight"]
    loc = network.fc1._parameters["weight_prior_loc"]
    expected = scipy.stats.norm.logpdf(site["value"].detach(), loc.detach(), 0.7).sum()
    assert site["fn"].log_prob(site["value"]).item() == pytest.approx(expected, rel=1e-5)
    announced = {id(site["value"].unconstrained()) for site in params(trace)}
    assert announced == {id(parameter) for parameter in network.parameters()}
    assert not list(pyro.get_param_store())


def test_the_locations_go_to_the_posterior_means():
    model = small_model(LearnedNormal(0.5))
    guide = bbb.AutoSoftplusNormal(model, init_loc=lambda site: torch.randn_like(site["value"]))
    guide.requires_grad_(False)
    TraceMeanField_ELBO().loss_and_grads(model, guide, *small_data())
    locs = {name: dict(model.named_parameters())[f"{name}_prior_loc"] for name in guide.site_names}
    for name, loc in locs.items():  # of the closed-form KL: (t - mu) / s^2
        torch.testing.assert_close(loc.grad, (loc - guide.loc(name)).detach() / 0.25)
    options = {"epochs": 200, "loss": "mean_field", "lr": 0.2, "progress": False}
    bbb.fit(model, guide, small_data(), **options)
    for name, loc in locs.items():
        torch.testing.assert_close(loc.detach(), guide.loc(name), atol=1e-3, rtol=0)


def test_a_shared_learned_normal_follows_dtype_and_copies():
    network = bbb.BayesianMLP([3, 4, 2], prior=LearnedNormal())
    twin = copy.deepcopy(network).double()
    assert {p.dtype for p in twin.parameters()} == {torch.float64}
    assert twin(torch.randn(2, 3).double()).dtype == torch.float64
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    converted = bbb.bayesianize(nn.Linear(3, 2).double(), LearnedNormal())
    assert {p.dtype for p in converted.parameters()} == {torch.float64}
    assert dict(network.state_dict()).keys() == {name for name, _ in network.named_parameters()}


def test_a_second_conversion_leaves_the_priors_parameters_alone():
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    half = bbb.bayesianize(layers, LearnedNormal(), where="0")
    both = bbb.bayesianize(half, LearnedScaleMixture(), where="1")
    sites = poutine.trace(both).get_trace(torch.randn(2, 3)).stochastic_nodes
    assert sites == ["0.weight", "0.bias", "1.weight", "1.bias"]
    names = {name for name, _ in both.named_parameters()}
    assert names == {"0.weight_prior_loc", "0.bias_prior_loc", *(f"1.prior.{key}" for key in KEYS)}
    with pytest.raises(ValueError, match="no trainable parameters"):
        bbb.bayesianize(both)


@pytest.mark.parametrize("prior", ["learned_scale_mixture", "learned_normal"])
def test_an_exported_network_has_weights_alone(prior):
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    converted = bbb.bayesianize(network, prior)
    for bayesian in (converted, bbb.BayesianMLP([3, 4, 1], prior=prior)):
        model = bbb.BayesianModel(bayesian, bbb.likelihoods.Gaussian(), num_data=12)
        guide = bbb.AutoSoftplusNormal(model)
        plain = bbb.to_module(model, guide)
        assert len(list(plain.parameters())) == 4
        assert not any(isinstance(module, PyroModule) for module in plain.modules())
        x = torch.randn(5, 3)
        torch.testing.assert_close(plain(x), bbb.predict_mean(model, guide, x).mean)


def test_a_custom_prior_may_attach_parameters():
    class PerWeightScale(bbb.priors.Prior):
        def attach(self, module, name, shape):
            module.register_parameter(f"{name}_prior_rho", nn.Parameter(torch.zeros(shape)))

        def forward(self, module, name, shape):
            rho = module._parameters[f"{name}_prior_rho"]
            return dist.Normal(0.0, rho.exp()).to_event(len(shape))

    model = small_model({"*.bias": "normal", "*": PerWeightScale()})
    names = [name for name, _ in model.named_parameters()]
    assert names == ["network.fc1.weight_prior_rho", "network.fc2.weight_prior_rho"]
    guide = bbb.AutoSoftplusNormal(model)
    bbb.fit(model, guide, small_data(), epochs=2, progress=False)
    assert all((parameter != 0).all() for parameter in model.parameters())
    assert len(list(bbb.to_module(model, guide).parameters())) == 4
