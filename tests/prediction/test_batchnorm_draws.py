# SPDX-License-Identifier: Apache-2.0
"""Draws with separate BatchNorm statistics, and the warning where an ensemble shares them."""

import warnings

import pytest
import torch
from torch import nn

import pyro_bbb as bbb


def trained(guide="ensemble", **options):
    torch.manual_seed(0)
    x = torch.randn(60, 3) + torch.tensor([1.0, -2.0, 0.0])
    y = (x[:, 0] * x[:, 1] > -2).long()
    layers = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)
    model = bbb.BayesianModel(
        bbb.bayesianize(nn.Sequential(*layers)), bbb.likelihoods.Categorical(), num_data=60
    )
    guide = bbb.guides.make(guide, model, **options)
    bbb.fit(model, guide, (x, y), epochs=5, batch_size=20, lr=0.01, progress=False, seed=0)
    return model, guide, x, y


def by_hand(draw, x, x_train, model):
    """Log-probabilities of the network at one draw, normalised by what its weights give x_train."""
    hidden, norm = (v @ draw["network.0.weight"].T + draw["network.0.bias"] for v in (x, x_train))
    z = (hidden - norm.mean(0)) / (norm.var(0) + model.network[1].eps).sqrt()
    z = torch.relu(z * model.network[1].weight + model.network[1].bias)
    return (z @ draw["network.3.weight"].T + draw["network.3.bias"]).log_softmax(-1)


@pytest.mark.parametrize("guide", ["ensemble", "softplus_normal"])
@pytest.mark.parametrize("rows", [5, 200])  # one batched pass of all draws, and one by one
def test_each_draw_is_normalised_by_its_own_weights(guide, rows):
    model, guide, x, _ = trained(guide, **({"size": 3} if guide == "ensemble" else {}))
    x_new = torch.randn(rows, 3)
    before = [buffer.clone() for buffer in model.buffers()]
    state = torch.random.get_rng_state()
    draws = bbb.batchnorm_draws(model, guide, x, num_samples=3, seed=1)
    assert torch.random.get_rng_state().equal(state) and model.network[1].training
    answer = bbb.predict(model, draws, x_new, num_samples=3).sample_log_probs
    for s in range(3):
        draw = {name: values[s] for name, values in draws.items()}
        torch.testing.assert_close(answer[s], by_hand(draw, x_new, x, model), atol=1e-5, rtol=1e-5)
    for buffer, value in zip(model.buffers(), before, strict=True):
        assert buffer.equal(value)
    again = bbb.batchnorm_draws(model, guide, x, num_samples=3, batch_size=60, seed=1)
    assert all(again[name].equal(values) for name, values in draws.items())


def test_an_exported_ensemble_keeps_the_statistics_of_each_draw():
    model, guide, x, _ = trained(size=3)
    draws = bbb.batchnorm_draws(model, guide, x, num_samples=3, seed=1)
    exported = bbb.to_ensemble(model, draws, num_samples=3)
    probs = bbb.predict(model, draws, x, num_samples=3).probs
    torch.testing.assert_close(exported(x)["probs"], probs)


def test_members_trained_together_predict_alone_as_they_were_trained():
    model, guide, x, y = trained(size=3)
    with pytest.warns(UserWarning, match=r"running statistics are averages .*batchnorm_draws"):
        shared = bbb.predict(model, guide, x, num_samples=3)
    own = bbb.predict(model, bbb.batchnorm_draws(model, guide, x, num_samples=3), x, num_samples=3)
    assert bbb.metrics.nll(own.probs, y) < bbb.metrics.nll(shared.probs, y)


def test_an_ensemble_of_heads_shares_the_statistics_of_its_trunk_without_a_warning():
    layers = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)
    network = bbb.bayesianize(nn.Sequential(*layers), where="3")
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=60)
    guide = bbb.guides.make("ensemble", model, size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bbb.predict(model, guide, torch.randn(4, 3), num_samples=2)
