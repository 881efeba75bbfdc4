# SPDX-License-Identifier: Apache-2.0
"""From a weight's name and shape to its distribution, in every form a prior may take."""

import copy
import math

import numpy as np
import pyro.distributions as dist
import pytest
import scipy.stats
import torch
from pyro import poutine
from pyro.nn import PyroModule
from torch import nn

from pyro_bbb import BayesianLinear, BayesianMLP, ScaleMixtureNormal, priors
from pyro_bbb.priors import ByName, FanInNormal, Independent, as_prior, declare

SIZE = torch.Size


def sites(network, x):
    """The distribution of every weight, by name, as the network draws it."""
    trace = poutine.trace(network).get_trace(x)
    return {name: node["fn"] for name, node in trace.iter_stochastic_nodes()}


def mlp_sites(prior):
    return sites(BayesianMLP([3, 4, 2], prior=prior), torch.randn(5, 3))


def scales(fns):
    """The one standard deviation of each weight's prior."""
    return {name: fn.stddev.unique().item() for name, fn in fns.items()}


SHAPES = {"fc1.weight": (4, 3), "fc1.bias": (4,), "fc2.weight": (2, 4), "fc2.bias": (2,)}


# --- kinds of priors ---


def test_a_scalar_distribution_is_expanded_to_one_event_per_weight():
    fns = mlp_sites(ScaleMixtureNormal(0.25, 2.0, 0.5))
    assert {name: fn.event_shape for name, fn in fns.items()} == SHAPES
    for fn in fns.values():
        assert fn.batch_shape == ()
        w = torch.randn(fn.event_shape)
        expected = ScaleMixtureNormal(0.25, 2.0, 0.5).log_prob(w).sum()
        torch.testing.assert_close(fn.log_prob(w), expected)


def test_a_distribution_with_a_batch_shape_broadcasts_to_the_weight():
    per_input = dist.Normal(0.0, torch.tensor([1.0, 2.0, 3.0]))
    fn = as_prior(per_input)(nn.Module(), "weight", SIZE([4, 3]))
    assert torch.equal(fn.stddev, torch.tensor([1.0, 2.0, 3.0]).expand(4, 3))


def test_a_callable_sees_module_name_and_shape():
    seen = []

    def prior(module, name, shape):
        seen.append((type(module), name, shape))
        return dist.Normal(0.0, 1.0 / len(shape))

    fns = sites(BayesianLinear(3, 4, prior=prior), torch.randn(5, 3))
    assert set(seen) == {(BayesianLinear, "weight", (4, 3)), (BayesianLinear, "bias", (4,))}
    assert scales(fns) == {"weight": 0.5, "bias": 1.0}
    assert [fn.event_shape for fn in fns.values()] == [(4, 3), (4,)]


def test_a_callable_may_return_one_event_of_the_weights_shape():
    def prior(module, name, shape):
        n = math.prod(shape)
        joint = dist.MultivariateNormal(torch.zeros(n), torch.eye(n) + 0.5)
        return joint if len(shape) == 1 else dist.Normal(0.0, 1.0).expand(shape).to_event()

    fns = sites(BayesianLinear(3, 4, prior=prior), torch.randn(5, 3))
    assert isinstance(fns["bias"], dist.MultivariateNormal)
    assert [(fn.batch_shape, fn.event_shape) for fn in fns.values()] == [((), (4, 3)), ((), (4,))]


# --- names ---

NAMED = {
    "normal": ({"scale": 2.0, "loc": 0.5}, scipy.stats.norm(0.5, 2.0), scipy.stats.norm()),
    "laplace": ({"scale": 2.0}, scipy.stats.laplace(0, 2.0), scipy.stats.laplace()),
    "student_t": ({"df": 5.0, "scale": 2.0}, scipy.stats.t(5, 0, 2.0), scipy.stats.t(3)),
    "fan_in_normal": (
        {"gain": 3.0},
        scipy.stats.norm(0, math.sqrt(3)),
        scipy.stats.norm(0, math.sqrt(2 / 3)),
    ),
    "learned_normal": ({"scale": 2.0}, scipy.stats.norm(0, 2.0), scipy.stats.norm()),
}


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_named_prior_has_the_density_of_scipy(name):
    options, configured, default = NAMED[name]
    w = torch.linspace(-3, 3, 6).view(2, 3)
    for prior, reference in ((priors.make(name, **options), configured), (name, default)):
        layer = BayesianLinear(3, 2, bias=False, prior=prior)
        fn = sites(layer, torch.zeros(1, 3))["weight"]
        assert fn.log_prob(w).item() == pytest.approx(reference.logpdf(w.numpy()).sum(), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "narrow"), [("scale_mixture", math.exp(-6)), ("learned_scale_mixture", 0.1)]
)
def test_a_named_mixture_has_the_density_of_scipy(name, narrow):
    w = torch.linspace(-3, 3, 6).view(2, 3)
    for options in ({}, {"pi": 0.2, "sigma1": 2.0, "sigma2": 0.3}):
        pi, sigma1, sigma2 = {"pi": 0.5, "sigma1": 1.0, "sigma2": narrow, **options}.values()
        fn = priors.make(name, **options)(nn.Module(), "weight", w.shape)
        normal = scipy.stats.norm.pdf
        density = pi * normal(w, 0, sigma1) + (1 - pi) * normal(w, 0, sigma2)
        assert fn.log_prob(w).item() == pytest.approx(np.log(density).sum(), rel=1e-5)


# --- patterns ---


def normals(**scale_by_pattern):
    return {pattern: dist.Normal(0.0, scale) for pattern, scale in scale_by_pattern.items()}


def test_the_first_matching_pattern_counts():
    in_order = scales(mlp_sites(normals(**{"*.bias": 1.0, "fc2.*": 2.0, "*": 3.0})))
    assert in_order == {"fc1.weight": 3.0, "fc1.bias": 1.0, "fc2.weight": 2.0, "fc2.bias": 1.0}
    reversed_order = scales(mlp_sites(normals(**{"fc2.*": 2.0, "*.bias": 1.0, "*": 3.0})))
    assert reversed_order == in_order | {"fc2.bias": 2.0}


def test_patterns_are_case_sensitive_and_whole():
    with pytest.raises(ValueError, match="no pattern for 'fc1.weight'"):
        BayesianMLP([2, 1], prior=normals(FC1=1.0, weight=1.0, fc1=1.0))


def test_a_dict_may_hold_every_kind_of_prior_and_dicts_of_full_names():
    prior = {
        "fc1.*": {"*.weight": FanInNormal(gain=3.0), "*.bias": dist.Normal(0.0, 2.0)},
        "*.weight": lambda module, name, shape: dist.Normal(0.0, float(shape[0])),
        "*": Independent(dist.Normal(0.0, 5.0)),
    }
    actual = scales(mlp_sites(prior))
    expected = {"fc1.weight": math.sqrt(3), "fc1.bias": 2.0, "fc2.weight": 2.0, "fc2.bias": 5.0}
    assert actual == pytest.approx(expected)


def test_scopes_nest():
    prior = ByName(normals(**{"a.b.weight": 1.0, "*": 2.0})).scoped("a").scoped("b")
    assert scales({"w": prior(nn.Module(), "weight", SIZE([2]))}) == {"w": 1.0}
    assert scales({"w": prior(nn.Module(), "bias", SIZE([2]))}) == {"w": 2.0}


# --- FanInNormal ---


def test_fan_in_scales():
    actual = scales(mlp_sites(FanInNormal(gain=3.0)))
    expected = {"fc1.weight": 3 / math.sqrt(3), "fc1.bias": 3, "fc2.weight": 1.5, "fc2.bias": 3}
    assert actual == pytest.approx(expected)
    convolution = FanInNormal()(nn.Module(), "weight", SIZE([8, 4, 5, 5]))
    assert scales({"w": convolution}) == pytest.approx({"w": math.sqrt(2 / 100)})


def test_with_the_relu_gain_a_network_keeps_the_second_moment():
    # Each layer's E[h^2] is unbiased over the weights: relu halves g^2 E[h^2] + g^2 of the bias,
    # so that without biases it stays 1. 6 standard errors over 1000 networks, false alarms 2e-9.
    prior = {"*.bias": dist.Normal(0.0, 1e-9), "*": FanInNormal()}
    network, x = BayesianMLP([20, 30, 30, 30, 1], prior=prior), torch.ones(1, 20)
    with torch.no_grad():
        squares = torch.stack([network(x).square().squeeze() for _ in range(1000)])
    error = squares.std() / math.sqrt(1000)
    # the last layer has no relu after it: twice the second moment of its inputs / 2
    assert abs(squares.mean() - 2.0) < 6 * error
    assert error < 0.2


# --- devices, dtypes, copies ---

PRIORS = {
    "scalar": ScaleMixtureNormal(0.5, 1.0, 0.1),
    "tensors": dist.Normal(torch.zeros(()), torch.ones(())),
    "mixture": dist.MixtureSameFamily(
        dist.Categorical(torch.ones(2)), dist.Normal(0.0, torch.tensor([1.0, 0.1]))
    ),
    "transformed": dist.LogNormal(0.0, 1.0),
    "by name": {"*.bias": dist.Laplace(0.0, 1.0), "*": ScaleMixtureNormal(0.5, 1.0, 0.1)},
    "fan in": FanInNormal(),
}
every_prior = pytest.mark.parametrize("kind", sorted(PRIORS))


def dtypes(network, x):
    fns = sites(network, x).values()
    return {fn.sample().dtype for fn in fns} | {fn.log_prob(fn.sample()).dtype for fn in fns}


@every_prior
def test_a_priors_tensors_follow_the_network(kind):
    network = BayesianMLP([3, 4, 2], prior=copy.deepcopy(PRIORS[kind]))
    x = torch.randn(5, 3)
    before = {
        name: fn.log_prob(torch.ones(fn.event_shape)) for name, fn in sites(network, x).items()
    }
    assert network.double() is network
    assert network(x.double()).dtype == torch.float64
    assert dtypes(network, x.double()) == {torch.float64}
    for name, fn in sites(network, x.double()).items():
        after = fn.log_prob(torch.ones(fn.event_shape, dtype=torch.float64))
        torch.testing.assert_close(after.float(), before[name])
    meta = network.to("meta")(x.double().to("meta"))
    assert meta.is_meta


@every_prior
def test_a_deep_copy_is_independent(kind):
    original = BayesianMLP([3, 4, 2], prior=copy.deepcopy(PRIORS[kind]))
    x = torch.randn(5, 3)
    twin = copy.deepcopy(original)
    twin.double()
    assert twin(x.double()).dtype == torch.float64
    assert dtypes(original, x) == {torch.float32}
    twin = copy.deepcopy(original)
    original.double()
    assert dtypes(twin, x) == {torch.float32}
    assert original(x.double()).dtype == torch.float64


def test_a_prior_never_validates_but_the_users_distribution_still_does():
    normal = dist.Normal(torch.zeros(()), torch.ones(())).expand([2])
    fn = as_prior(normal)(nn.Module(), "weight", SIZE([3, 2]))
    nan = torch.full((3, 2), math.nan)
    assert fn.log_prob(nan).isnan()
    with pytest.raises(ValueError, match="within the support"):
        normal.log_prob(nan)


# --- declare ---


def test_declare_replaces_parameters_by_sample_sites():
    class Scaled(nn.Linear, PyroModule):
        pass

    layer = Scaled(3, 2)
    assert len(list(layer.parameters())) == 2
    declare(layer, as_prior(dist.Normal(0.0, 1.0)), weight=(2, 3))
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    assert list(layer.state_dict()) == ["bias"]
    assert set(sites(layer, torch.randn(5, 3))) == {"weight"}
