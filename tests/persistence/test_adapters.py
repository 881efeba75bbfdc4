# SPDX-License-Identifier: Apache-2.0
"""Saves of adapted networks: the adapters alone, and only back onto the same frozen weights."""

import signal

import pytest
import torch
from torch import nn

import pyro_bbb as bbb

X, Y = torch.randn(12, 64), torch.arange(12) % 3


def base(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 500), nn.ReLU(), nn.Linear(500, 500), nn.Linear(500, 3))


def adapted(module, seed=1, **options):
    torch.manual_seed(seed)
    return bbb.adapt(module, 2, **{"where": "0|2", "trainable": "3", **options})


def in_model(network):
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=12)
    return model, bbb.AutoSoftplusNormal(model)


def trained(module, **options):
    model, guide = in_model(adapted(module))
    how = {"epochs": 6, "batch_size": 4, "progress": False, "seed": 0}
    bbb.fit(model, guide, (X, Y), **how, **options)
    return model, guide


def probs(model, guide):
    return bbb.predict(model, guide, X, num_samples=3, seed=0).probs


def size(folder):
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def test_a_save_has_the_adapters_alone_and_comes_back_onto_their_network(tmp_path):
    module = base()
    model, guide = trained(module)
    bbb.save(tmp_path, model, guide)
    kept = 2 * 3 * (64 + 500) + 2 * (500 + 500) + 500 * 3 + 3  # A, twice, and initial; B; the head
    assert size(tmp_path) < 4 * kept + 4096 < 4 * 250_000 / 10
    loaded = bbb.load(tmp_path, network=adapted(module, seed=2))
    assert torch.equal(probs(loaded.model, loaded.guide), probs(model, guide))
    own = dict(loaded.model.network.named_parameters())
    assert own["2.weight"].data_ptr() == module[2].weight.data_ptr()
    assert not own["2.weight"].requires_grad and own["3.weight"].requires_grad
    bbb.fit(loaded.model, loaded.guide, (X, Y), epochs=1, progress=False)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (lambda: adapted(base(seed=5)), "network must have the frozen weights that the adapters"),
        (lambda: adapted(base(), alpha=4), "an adapter of alpha / rank 1.0 on 'model.network.0'"),
        (lambda: adapted(base(), where="0"), "on 'model.network.2', got None"),
        (lambda: bbb.adapt(base(), 3, where="0|2", trainable="3"), "alpha|shape"),
        (base, "an adapter of alpha / rank 1.0 on 'model.network.0', got None"),
        (lambda: nn.Linear(64, 3), "network must have the frozen parameters"),
        (lambda: None, "construct it and pass it"),
    ],
)
def test_another_network_is_refused(tmp_path, network, message):
    bbb.save(tmp_path, *trained(base()))
    with pytest.raises(bbb.LoadError, match=message):
        bbb.load(tmp_path, network=network())


def test_a_checkpoint_has_the_adapters_alone_and_goes_on(tmp_path):
    at_once, left = trained(base()), [True]

    def interrupt(end):
        """Do as Ctrl-C does, once."""
        if end.epoch == 2 and left:
            left.pop()
            signal.raise_signal(signal.SIGINT)

    options = {"callbacks": [interrupt], "checkpoint": tmp_path / "run"}
    trained(base(), **options)
    assert not left and size(tmp_path) < 4 * 250_000 / 5
    resumed = trained(base(), **options)
    for a, b in zip(at_once, resumed, strict=True):
        for x, y in zip(a.parameters(), b.parameters(), strict=True):
            assert torch.equal(x, y)
