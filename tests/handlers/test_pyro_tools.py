# SPDX-License-Identifier: Apache-2.0
"""Pyro's own guides, handlers and inspection, on a `BayesianModel`."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer import autoguide as stock
from pyro.infer.inspect import get_dependencies
from pyro.infer.reparam import AutoReparam
from pyro.optim import Adam

import pyro_bbb as bbb

X = torch.linspace(-1, 1, 60).unsqueeze(-1) * torch.ones(3)
Y = X.sum(1, keepdim=True)
WEIGHTS = [f"network.fc{layer}.{leaf}" for layer in (1, 2) for leaf in ("weight", "bias")]
GUIDES = (
    "AutoNormal",
    "AutoDelta",
    "AutoStructured",
    "AutoGaussian",
    "AutoNormalMessenger",
    "AutoHierarchicalNormalMessenger",
    "AutoRegressiveMessenger",
)


def make_model(prior=None, likelihood=None):
    pyro.clear_param_store()
    network = bbb.BayesianMLP([3, 4, 1], activation=torch.nn.Tanh, prior=prior)
    return bbb.BayesianModel(network, likelihood or bbb.likelihoods.Gaussian(0.2), len(X))


def mean_loss(svi, steps):
    return sum(svi.step(X, Y) for _ in range(steps)) / steps


@pytest.mark.parametrize(
    ("name", "noise"),
    [*((name, "latent") for name in GUIDES), ("AutoNormalMessenger", "learned")],
)
def test_every_stock_guide_learns_by_svi_and_predicts(name, noise):
    torch.manual_seed(0)
    likelihood = {
        "learned": bbb.likelihoods.Gaussian.learned(0.5),
        "latent": bbb.likelihoods.Gaussian(dist.LogNormal(-1.0, 0.5)),
    }[noise]
    model = make_model(likelihood=likelihood)
    options = {} if name == "AutoDelta" else {"init_scale": 0.02}
    guide = getattr(stock, name)(model, init_loc_fn=stock.init_to_sample, **options)
    svi = SVI(model, guide, Adam({"lr": 0.05}), Trace_ELBO())
    first = mean_loss(svi, 5)
    mean_loss(svi, 30)
    assert mean_loss(svi, 5) < 0.7 * first
    prediction = bbb.predict(model, guide, X[:5], num_samples=6, seed=0)
    assert prediction.sample_means.shape == (6, 5, 1)
    assert prediction.mean.max() < -1.0 < bbb.predict(model, guide, X[-5:], seed=0).mean.min()


def test_the_parameters_of_a_messenger_are_its_own_and_trained_across_steps():
    model = make_model()
    guide = stock.AutoNormalMessenger(model)
    svi = SVI(model, guide, Adam({"lr": 0.03}), Trace_ELBO())
    svi.step(X, Y)
    before = {name: value.detach().clone() for name, value in guide.named_parameters()}
    assert len(before) == 2 * len(WEIGHTS)
    svi.step(X, Y)
    for name, value in guide.named_parameters():
        assert not torch.equal(value, before[name]), name
    assert not dict(model.named_parameters())


def test_a_messenger_is_refused_where_guides_run_apart_from_the_model():
    model = make_model()
    guide = stock.AutoNormalMessenger(model)
    with pytest.raises(TypeError, match=r"guide must not run the model.*SVI\(model, guide"):
        bbb.fit(model, guide, (X, Y), epochs=1, progress=False)
    with pytest.raises(TypeError, match="medians without inputs, got AutoNormalMessenger"):
        bbb.to_module(model, guide)


def test_the_store_is_restored_when_a_handler_raises_at_a_site():
    class Broken(stock.AutoNormalMessenger):
        def get_posterior(self, name, prior):
            raise ArithmeticError(name)

    model = make_model()
    pyro.param("outside", torch.ones(()))
    with pytest.raises(ArithmeticError, match=r"fc1\.weight"):
        Broken(model)(X, Y)
    assert list(pyro.get_param_store()) == ["outside"]
    assert bbb.predict(model, bbb.AutoSoftplusNormal(model), X).mean.shape == (len(X), 1)


def test_a_parameter_inside_the_network_is_still_refused_under_a_messenger():
    class Network(pyro.nn.PyroModule):
        def __init__(self):
            super().__init__()
            self.linear = bbb.BayesianLinear(3, 1)

        def forward(self, x):
            return self.linear(x) + pyro.param("shift", torch.zeros(()))

    model = bbb.BayesianModel(Network(), bbb.likelihoods.Gaussian(0.2), len(X))
    with pytest.raises(ValueError, match=r"pyro.param\('shift'\) inside the network"):
        stock.AutoNormalMessenger(model)(X, Y)


def test_auto_reparam_learns_its_centring():
    torch.manual_seed(0)
    model = AutoReparam()(make_model(prior=dist.Normal(0.5, 1.0)))
    guide = stock.AutoNormal(model)
    svi = SVI(model, guide, Adam({"lr": 0.1}), Trace_ELBO())
    first = mean_loss(svi, 5)
    mean_loss(svi, 30)
    assert mean_loss(svi, 5) < first
    centred = [pyro.param(f"{name}_centered") for name in WEIGHTS]
    assert all((value != 0.5).any() for value in centred)  # 0.5 at the start


@pytest.mark.parametrize("prior", [None, "mixture", "learned", "hierarchical"])
def test_dependencies_are_those_of_the_graphical_model(prior):
    priors = {
        "mixture": bbb.ScaleMixtureNormal(0.5, 1.0, 0.1),
        "learned": bbb.priors.LearnedScaleMixture(),
        "hierarchical": bbb.priors.HierarchicalNormal(),
    }
    model = make_model(priors.get(prior))
    scales = {name for name in model.latent_shapes() if "_prior_" in name}
    dependencies = {
        name: set(upstream) - {name}
        for name, upstream in get_dependencies(model, (X, Y))["prior_dependencies"].items()
    }
    assert dependencies.pop("obs") == set(WEIGHTS)
    assert bool(scales) == (prior == "hierarchical")
    for name, upstream in dependencies.items():
        assert len(upstream) == (prior == "hierarchical" and name in WEIGHTS)
        assert upstream <= scales
