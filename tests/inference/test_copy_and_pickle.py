# SPDX-License-Identifier: Apache-2.0
"""Copies, pickles and other devices leave what they came from as it was."""

import copy
import pickle
from dataclasses import fields

import pytest
import torch
from torch import nn

import pyro_bbb as bbb
from pyro_bbb import guides, likelihoods
from pyro_bbb.likelihoods import Gaussian
from tests._support.guide_names import ANY_MODEL

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
NETWORKS = {
    "mlp": lambda: bbb.BayesianMLP([3, 4, 2], prior="learned_scale_mixture"),
    "converted": lambda: bbb.bayesianize(
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)), "horseshoe"
    ),
}
every_network = pytest.mark.parametrize("network", NETWORKS)


def make(network, guide="softplus_normal"):
    model = bbb.BayesianModel(NETWORKS[network](), Gaussian.learned(0.5), num_data=len(X))
    return model, guides.make(guide, model)


def draws(model, guide):
    return bbb.predict(model, guide, X, num_samples=5, seed=3).mean


def state(*modules):
    return [value.clone() for module in modules for value in module.state_dict().values()]


def equal(before, after):
    return len(before) == len(after) and all(map(torch.equal, before, after))


@every_network
def test_a_copied_model_is_independent(network):
    model, guide = make(network)
    before, expected = state(model), draws(model, guide)
    twin = copy.deepcopy(model)
    assert equal(state(twin), before)
    assert torch.equal(draws(twin, guide), expected)
    data = X, torch.randn(6, 2)
    bbb.fit(twin, bbb.AutoSoftplusNormal(twin), data, epochs=1, lr=0.1, progress=False)
    assert not equal(state(twin), before)
    assert equal(state(model), before)
    assert torch.equal(draws(model, guide), expected)


# the members share the statistics of BatchNorm, which this test does not score
@pytest.mark.filterwarnings("ignore:BatchNorm's running statistics")
@every_network
@pytest.mark.parametrize("guide", sorted(ANY_MODEL))
def test_moving_a_copy_of_both_leaves_the_original(network, guide):
    pair = make(network, guide)
    for module in pair[1].modules():
        if isinstance(module, guides.Laplace):
            module.parts[0].set(scale_tril=torch.eye(module.latent_dim))
        if isinstance(module, guides.SWAG):
            module.collect()
            ones = torch.ones(module.latent_dim, 1)
            module.parts[0].set(factor=ones, scale=ones[:, 0])
    before, expected = state(*pair), draws(*pair)
    for move in (lambda module: module.double(), lambda module: module.to("meta")):
        for module in (twins := copy.deepcopy(pair)):
            move(module)
        assert twins[1].model is twins[0]
        moved = [x for module in twins for x in module.state_dict().values()]
        assert all(x.is_meta or x.dtype in (torch.float64, torch.int64) for x in moved)
        assert equal(state(*pair), before)
        assert torch.equal(draws(*pair), expected)


def test_a_history_pickles():
    data = X, torch.randn(6, 2)
    history = bbb.fit(*make("mlp"), data, epochs=2, batch_size=3, progress=False)
    for twin in (copy.deepcopy(history), pickle.loads(pickle.dumps(history))):
        assert twin == history and twin.steps is not history.steps
        twin.loss.append(0.0)
        assert len(history) == 2


@pytest.mark.parametrize(
    ("likelihood", "y"),
    [
        (likelihoods.Categorical(), torch.arange(6) % 2),
        (Gaussian.learned(0.5), torch.randn(6, 2)),
        (likelihoods.Poisson(), torch.ones(6, 2)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_predictions_pickle(likelihood, y):
    model = bbb.BayesianModel(NETWORKS["mlp"](), likelihood, num_data=len(X))
    prediction = bbb.predict(model, bbb.AutoSoftplusNormal(model), X, num_samples=5, seed=0)
    before = prediction.log_prob(y)
    for twin in (copy.deepcopy(prediction), pickle.loads(pickle.dumps(prediction))):
        assert type(twin) is type(prediction)
        assert [f.name for f in fields(twin)] == [f.name for f in fields(prediction)]
        assert torch.equal(twin.log_prob(y), before)
    assert torch.equal(prediction.log_prob(y), before)


def test_copies_of_chains_are_independent():
    model, _ = make("mlp")
    data = X, torch.zeros(6, 2)
    options = {"num_samples": 2, "warmup_steps": 2, "thin": 1, "lr": 1e-4, "progress": False}
    chains = bbb.run_sgmcmc(model, data, **options)
    for twin in (copy.deepcopy(chains), pickle.loads(pickle.dumps(chains))):
        assert all(torch.equal(twin[name], chains[name]) for name in chains)
        twin.by_chain["network.fc1.bias"].zero_()
        assert chains["network.fc1.bias"].any()
