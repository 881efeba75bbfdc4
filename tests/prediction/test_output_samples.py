# SPDX-License-Identifier: Apache-2.0
"""Outputs drawn for each input separately: closed forms, drawn weights as the oracle, refusals."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroSample
from scipy import stats
from torch import nn
from torch.nn.utils import parametrize

import pyro_bbb as bbb
from pyro_bbb.priors._hierarchical import horseshoe

SIGMAS = 5  # two-sided false-alarm rate of each comparison of moments: 6e-7
P_VALUE = 1e-6  # and of each Kolmogorov-Smirnov test
DRAWS = 20_000


def posterior(network, likelihood=None, rho=-0.5):
    """A model, and a guide with widely and unequally scattered weights."""
    model = bbb.BayesianModel(network, likelihood or bbb.likelihoods.Gaussian(0.3), num_data=5)
    guide = bbb.AutoSoftplusNormal(model)
    with torch.no_grad():
        for parameter in guide.rhos.parameters():
            parameter.copy_(rho + torch.randn_like(parameter))
        for parameter in guide.locs.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return model, guide


def mlp(*sizes, **options):
    return bbb.BayesianMLP(list(sizes), **options)


def per_input(model, guide, x, num_samples=DRAWS, **options):
    return bbb.predict(
        model, guide, x, num_samples=num_samples, estimator="local_reparam", **options
    )


def per_draw(model, guide, x, num_samples=DRAWS, **options):
    return bbb.predict(model, guide, x, num_samples=num_samples, estimator="reparam", **options)


def outputs(prediction):
    """What to compare of every draw and input, as columns ``[S, n * k]``."""
    if isinstance(prediction, bbb.ClassificationPrediction):
        return prediction.sample_probs.flatten(1).numpy()
    return prediction.sample_means.flatten(1).numpy()


def assert_same_law(actual, expected):
    """Mean, variance and distribution of every column of two independent samples."""
    assert actual.shape[1] == expected.shape[1]
    for a, b in zip(actual.T, expected.T, strict=True):
        for power in (1, 2):
            f, g = (np.power(z - b.mean(), power) for z in (a, b))
            error = math.sqrt(f.var() / len(f) + g.var() / len(g))
            assert abs(f.mean() - g.mean()) <= SIGMAS * error
        assert stats.ks_2samp(a, b).pvalue > P_VALUE


def assert_same_predictive(model, guide, x, num_samples=DRAWS):
    """Each input's outputs have the law that drawn weights give them, jointly."""
    for row in x.split(1):
        pair = (
            outputs(per_input(model, guide, row, num_samples)),
            outputs(per_draw(model, guide, row, num_samples)),
        )
        assert_same_law(*pair)
        sums, products = zip(*[(z.sum(1), z[:, 0] * z[:, -1]) for z in pair], strict=True)
        assert_same_law(*(np.stack(z, 1) for z in zip(sums, products, strict=True)))


def assert_draws_weights(model, guide, x):
    """Where no estimator is given."""
    chosen = bbb.predict(model, guide, x, num_samples=4, seed=1).sample_means
    assert torch.equal(chosen, per_draw(model, guide, x, 4, seed=1).sample_means)


# The closed form, and the law of drawn weights


@pytest.mark.parametrize("noise", [0.0, -2.0])
def test_a_layers_moments_are_those_of_the_closed_form(double, monkeypatch, noise):
    model, guide = posterior(bbb.BayesianLinear(4, 2))
    x = torch.randn(3, 4)
    monkeypatch.setattr(torch, "randn", lambda *shape, **_: torch.full(shape, noise))
    prediction = per_input(model, guide, x, 5)
    weight, bias = "network.weight", "network.bias"
    mean = x.numpy() @ guide.loc(weight).numpy().T + guide.loc(bias).numpy()
    scale, of_bias = guide.scale(weight).numpy(), guide.scale(bias).numpy()
    variance = x.numpy() ** 2 @ scale.T**2 + of_bias**2
    for actual in prediction.sample_means:
        np.testing.assert_allclose(actual, mean + noise * np.sqrt(variance), rtol=1e-12)


@pytest.mark.parametrize("likelihood", ["Categorical", "Gaussian", "HeteroscedasticGaussian"])
def test_deep_networks_predict_as_by_drawn_weights(double, likelihood):
    model, guide = posterior(mlp(3, 6, 5, 2), getattr(bbb.likelihoods, likelihood)())
    assert_same_predictive(model, guide, torch.randn(1, 3))


@pytest.mark.parametrize("network", [lambda: mlp(3, 6, 2), lambda: partly_random()])
def test_inputs_together_predict_as_each_alone(double, network):
    model, guide = posterior(network())
    x = torch.randn(2, 3)
    together = outputs(per_input(model, guide, x))
    alone = [outputs(per_draw(model, guide, row)) for row in x.split(1)]
    assert_same_law(together, np.concatenate(alone, axis=1))


def test_inputs_are_independent_where_drawn_weights_join_them(double):
    model, guide = posterior(mlp(3, 6, 1))
    x = torch.randn(1, 3).expand(2, 3)
    first, second = outputs(per_draw(model, guide, x)).T
    np.testing.assert_allclose(first, second, rtol=1e-12)
    correlation = np.corrcoef(outputs(per_input(model, guide, x)).T)[0, 1]
    assert abs(correlation) < SIGMAS / math.sqrt(DRAWS)


def test_latent_noise_and_scales_of_priors_are_drawn_from_the_guide(double):
    prior = bbb.priors.HierarchicalNormal()
    noise = bbb.likelihoods.Gaussian(dist.LogNormal(-1.0, 1.0))
    model, guide = posterior(mlp(3, 5, 2, prior=prior), noise)
    x = torch.randn(1, 3)
    assert_same_predictive(model, guide, x)
    scales = [
        predict(model, guide, x).components.stddev[:, :, 0] for predict in (per_input, per_draw)
    ]
    assert_same_law(*(scale.numpy() for scale in scales))
    both = per_input(model, guide, x.expand(3, 3), 9).components.stddev
    assert len(both.unique()) == 9  # one noise for each draw


class Products(PyroModule):
    """A matrix product with a latent."""

    def __init__(self):
        super().__init__()
        self.weight = PyroSample(dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))

    def forward(self, x):
        return x @ self.weight


def partly_random():
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 2))
    return bbb.bayesianize(plain, where=["3", "0.bias"])


# Numbers, seeds, passes


def test_seeds_fix_the_draws_whatever_the_batches(double):
    model, guide = posterior(mlp(3, 5, 2))
    x, state = torch.randn(7, 3), torch.get_rng_state()
    first = per_input(model, guide, x, 300, seed=3).sample_means  # 3 inputs in a pass
    assert torch.equal(torch.get_rng_state(), state)
    for batch_size in (1, 2, 7):
        again = per_input(model, guide, x, 300, seed=3, batch_size=batch_size)
        assert torch.equal(again.sample_means, first)
    assert not torch.equal(per_input(model, guide, x, 300, seed=4).sample_means, first)


# Where it is not exact


def tied():
    layer = nn.Linear(3, 3)
    return bbb.bayesianize(nn.Sequential(layer, nn.ReLU(), layer))


def same_parameter():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    return bbb.bayesianize(nn.Sequential(first, nn.ReLU(), second))


class Gained(PyroModule):
    def __init__(self):
        super().__init__()
        self.linear = bbb.BayesianLinear(3, 3)
        self.gain = PyroSample(dist.LogNormal(0.0, 1.0))

    def forward(self, x):
        return self.linear(x) * self.gain


UNKNOWN_LAYER = "is not a layer that is known to act row by row"
INEXACT = {
    "hand-written": (Products, UNKNOWN_LAYER),
    "gain": (Gained, "'network.gain' is not a weight of independent Normals"),
    "twice": (tied, "a layer is used twice"),
    "tied": (same_parameter, UNKNOWN_LAYER),
    "convolution": (bbb.BayesianLeNet5, UNKNOWN_LAYER),
    "normalisation": (
        lambda: bbb.bayesianize(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)), where="*"),
        UNKNOWN_LAYER,
    ),
    "not normal": (
        lambda: bbb.BayesianLinear(3, 2, prior=dist.LogNormal(0.0, 1.0)),
        "'network.weight' is not a weight of independent Normals",
    ),
}


@pytest.mark.parametrize("name", INEXACT)
def test_what_is_not_exact_is_refused(name):
    network, match = INEXACT[name]
    model = bbb.BayesianModel(network(), bbb.likelihoods.Gaussian(), num_data=5)
    shape = (2, 1, 28, 28) if name == "convolution" else (2, 3)
    guide, x = bbb.AutoSoftplusNormal(model), torch.randn(shape)
    with pytest.raises(ValueError, match=f"not exact here, use 'reparam': .*{match}"):
        per_input(model, guide, x, 20)
    # and never chosen: one input's draws are those of drawn weights
    assert_draws_weights(model, guide, x[:1])


OTHER_POSTERIORS = {
    "full rank": lambda model: bbb.guides.make("full_rank", model),
    "ensemble": lambda model: bbb.guides.make("ensemble", model),
    "own": lambda model: OwnGuide(model),
    "draws": lambda model: bbb.AutoSoftplusNormal(model).sample_posterior(3),
}


@pytest.mark.parametrize("kind", OTHER_POSTERIORS)
def test_other_posteriors_are_refused(kind):
    model = bbb.BayesianModel(mlp(3, 2), bbb.likelihoods.Gaussian(), num_data=5)
    guide, x = OTHER_POSTERIORS[kind](model), torch.randn(2, 3)
    with pytest.raises(ValueError, match="not exact here.*guide must be an AutoSoftplusNormal"):
        per_input(model, guide, x, 4)
    assert_draws_weights(model, guide, x[:1])


def test_it_leaves_the_model_as_it_was():
    model, guide = posterior(partly_random())
    model.network[1].eval()
    modes = [m.training for m in model.modules()]
    with pytest.raises(ValueError, match=r"\[batch, 3\]|does not fit"):
        per_input(model, guide, torch.randn(2, 4), 3)
    prediction = per_input(model, guide, torch.randn(2, 3, requires_grad=True), 3)
    assert not prediction.sample_means.requires_grad
    assert [m.training for m in model.modules()] == modes
    assert not model._pyro_context.cache and not model._pyro_context.active
    assert not list(pyro.get_param_store().keys())


# What is chosen where no estimator is given


def converted():
    plain = nn.Sequential(nn.Flatten(), nn.Linear(3, 4), nn.Tanh(), nn.Dropout(), nn.Linear(4, 2))
    return bbb.bayesianize(plain)


def nested():
    return PyroModule[nn.Sequential](
        PyroModule[nn.Sequential](bbb.BayesianLinear(3, 4), nn.GELU(), nn.LayerNorm(4)), mlp(4, 2)
    )


DENSE = {
    "mlp": (lambda: mlp(3, 5, 2), (3,)),
    "layer": (lambda: bbb.BayesianLinear(3, 2, bias=False), (3,)),
    "hierarchical": (lambda: mlp(3, 5, 2, prior=horseshoe()), (3,)),
    "learned": (lambda: mlp(3, 5, 2, prior=bbb.priors.LearnedScaleMixture()), (3,)),
    "converted": (converted, (3,)),
    "converted image": (converted, (1, 3)),
    "partly": (partly_random, (3,)),
    "nested": (nested, (3,)),
}


@pytest.mark.parametrize("name", DENSE)
def test_one_input_of_a_dense_network_needs_no_weights(double, name):
    network, shape = DENSE[name]
    model, guide = posterior(network())
    x = torch.randn(2, *shape)
    for posterior_ in (guide, bbb.prune(guide, 0.3)):
        single = bbb.predict(model, posterior_, x[:1], num_samples=9, seed=1).sample_means
        assert torch.equal(single, per_input(model, posterior_, x[:1], 9, seed=1).sample_means)
        assert not torch.equal(single, per_draw(model, posterior_, x[:1], 9, seed=1).sample_means)
        two = bbb.predict(model, posterior_, x, num_samples=9, seed=1).sample_means
        assert torch.equal(two, per_draw(model, posterior_, x, 9, seed=1).sample_means)


class Doubled(bbb.BayesianLinear):
    def forward(self, x):
        return 2 * super().forward(x)


class Inherited(bbb.BayesianMLP):
    """Adds nothing, but could."""


class OwnLikelihood(bbb.likelihoods.Gaussian):
    """Scores outputs in another unit."""

    def arguments(self, outputs):
        return super().arguments(2 * outputs)


class OwnGuide(bbb.AutoSoftplusNormal):
    """Draws the mean network, though its scales are others."""

    def sample_posterior(self, num_samples):
        return {
            name: value.expand(num_samples, *value.shape) for name, value in self.median().items()
        }


class OwnPredictive(bbb.BayesianModel):
    """Predicts what no network says."""

    def predictive(self, x, draw=None):
        return {name: value + 1 for name, value in super().predictive(x, draw).items()}


def hooked(register="register_forward_hook"):
    network = mlp(3, 4, 2)
    getattr(network.fc1, register)(lambda *_: None)
    return network


def patched():
    network = mlp(3, 4, 2)
    network.fc1.forward = lambda x: torch.zeros(len(x), 4)
    return network


def parametrized():
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    parametrize.register_parametrization(plain[0], "weight", nn.Tanh())
    return bbb.bayesianize(plain, where="1")


UNKNOWN = {
    "own forward": lambda: Doubled(3, 2),
    "subclass": lambda: Inherited([3, 2]),
    "hook": hooked,
    "hook before": lambda: hooked("register_forward_pre_hook"),
    "patched": patched,
    "parametrized": parametrized,
    "softmax": lambda: mlp(3, 2, 2, activation=lambda: nn.Softmax(dim=0)),
    "flattened rows": lambda: PyroModule[nn.Sequential](mlp(3, 1), nn.Flatten(0)),
    "normalised rows": lambda: PyroModule[nn.Sequential](mlp(3, 2), nn.LayerNorm([1, 2])),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_weights_are_drawn_for_what_is_not_known(double, name):
    assert_draws_weights(*posterior(UNKNOWN[name]()), torch.randn(1, 3))


def test_weights_are_drawn_for_other_models_and_likelihoods():
    own = OwnPredictive(mlp(3, 2), bbb.likelihoods.Gaussian(), num_data=5)
    for model in (own, bbb.BayesianModel(mlp(3, 2), OwnLikelihood(), num_data=5)):
        assert_draws_weights(model, bbb.AutoSoftplusNormal(model), torch.randn(1, 3))
    with pytest.raises(ValueError, match="OwnPredictive overrides predictive"):
        per_input(own, bbb.AutoSoftplusNormal(own), torch.randn(4, 3))
