# SPDX-License-Identifier: Apache-2.0
"""Networks without some of their units: which ones go, and the predictions of what is left."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyro_bbb as bbb


def trained(network):
    """Return a model and a guide of scattered means and scales, in double precision."""
    torch.manual_seed(0)
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=6).double()
    guide = bbb.AutoSoftplusNormal(model)
    with torch.no_grad():
        for name, parameter in guide.named_parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter) - 2 * name.startswith("rhos"))
        for layer in network.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_mean.normal_()
                layer.running_var.uniform_(0.5, 2)
    return model, guide


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.fc = nn.Conv2d(6, 5, 3, padding=1), nn.Linear(5 * 4, 3)

    def forward(self, x):
        x = F.avg_pool2d(F.relu(self.norm(self.conv1(x))), 2)
        return self.fc(F.max_pool2d(F.gelu(self.conv2(x)), 2).flatten(1))


class Residual(nn.Module):
    """The units of ``inner`` are separate; those of ``first`` and ``last`` are summed."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 5)
        self.top = nn.Linear(5, 3)

    def forward(self, x):
        x = self.first(x)
        return self.top(torch.tanh(x + self.last(F.relu(self.inner(x)))))


def normed():
    """The units of the first layer are normalised together, those of the second are separate."""
    layers = nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 7), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(7, 3))


def mlp(activation):
    return lambda: bbb.BayesianMLP([4, 8, 7, 3], activation=activation, prior="fan_in_normal")


CASES = {  # network, shape of an input, and pairs of layers: units, their reader, entries by unit
    "relu": (mlp(nn.ReLU), (4,), [("fc1", "fc2", 1), ("fc2", "fc3", 1)]),
    "sigmoid": (mlp(nn.Sigmoid), (4,), [("fc1", "fc2", 1), ("fc2", "fc3", 1)]),
    "lenet": (
        bbb.BayesianLeNet5,
        (1, 28, 28),
        [("conv1", "conv2", 1), ("conv2", "conv3", 1), ("conv3", "fc1", 49), ("fc1", "fc2", 1)],
    ),
    "convnet": (
        lambda: bbb.bayesianize(ConvNet()),
        (2, 8, 8),
        [("conv1", "conv2", 1), ("conv2", "fc", 4)],
    ),
    "residual": (lambda: bbb.bayesianize(Residual()), (4,), [("inner", "last", 1)]),
    "layernorm": (lambda: bbb.bayesianize(normed()), (4,), [("3", "5", 1)]),
}


def removed_by(guide, narrow, pairs):
    """Return masks by site of all weights of the units that are missing in the narrower guide."""
    masks = {name: torch.zeros_like(guide.loc(name), dtype=torch.bool) for name in guide.site_names}
    for units, reader, entries in pairs:
        goes = ~torch.isin(guide.loc(f"network.{units}.bias"), narrow.loc(f"network.{units}.bias"))
        masks[f"network.{units}.bias"] |= goes
        masks[f"network.{units}.weight"][goes] = True
        masks[f"network.{reader}.weight"][:, goes.repeat_interleave(entries)] = True
    return masks


@pytest.mark.parametrize("case", CASES)
def test_predicts_as_the_wide_network_without_the_weights_of_these_units(case):
    build, shape, pairs = CASES[case]
    model, guide = trained(build())
    x = torch.randn(5, *shape).double()
    narrow_model, narrow = bbb.prune(guide, 0.5, units=True, x=x)
    masks = removed_by(guide, narrow, pairs)
    pruned = guide.without(masks)

    units = sum(len(guide.loc(f"network.{name}.bias")) for name, _, _ in pairs)
    left = sum(len(narrow.loc(f"network.{name}.bias")) for name, _, _ in pairs)
    assert units - left == round(0.5 * units)
    for name, mask in masks.items():  # exactly the other weights are left, in their order
        for moment in ("loc", "scale"):
            was, now = (getattr(g, moment)(name) for g in (guide, narrow))
            torch.testing.assert_close(now.flatten(), was[~mask], rtol=1e-6, atol=0)

    before = bbb.predict_mean(model, pruned, x)
    after = bbb.predict_mean(narrow_model, narrow, x)
    torch.testing.assert_close(after.probs, before.probs)
    draws = pruned.sample_posterior(4)
    shapes = narrow_model.latent_shapes()
    same = {k: v[:, ~masks[k]].view(4, *shapes[k]) for k, v in draws.items()}
    before, after = bbb.predict(model, draws, x), bbb.predict(narrow_model, same, x)
    torch.testing.assert_close(after.sample_probs, before.sample_probs)


@pytest.mark.parametrize("case", ["relu", "lenet", "convnet"])
def test_the_narrower_network_is_a_network_like_any_other(case, tmp_path):
    build, shape, _ = CASES[case]
    _, guide = trained(build())
    x, y = torch.randn(6, *shape).double(), torch.arange(6) % 3
    model, guide = bbb.prune(guide, 0.5, units=True, x=x)
    before = guide.loc(guide.site_names[0]).clone()
    bbb.fit(model, guide, (x, y), epochs=1, progress=False)
    assert not torch.equal(guide.loc(guide.site_names[0]), before)
    loading = {"network": model.network} if case == "convnet" else {}  # of a class of its own
    bbb.save(tmp_path / "narrow", model, guide)
    loaded = bbb.load(tmp_path / "narrow", **loading)
    probs = bbb.predict(model, guide, x, num_samples=3, seed=0).probs
    assert torch.equal(bbb.predict(*loaded, x, num_samples=3, seed=0).probs, probs)
    mean, plain = bbb.predict_mean(model, guide, x).probs, bbb.to_module(model, guide)
    torch.testing.assert_close(plain(x).softmax(-1), mean)
    ensemble = bbb.to_ensemble(model, guide, num_samples=3, seed=0)
    naive = bbb.predict(model, guide, x, num_samples=3, seed=0, estimator="reparam").probs
    torch.testing.assert_close(ensemble(x)["probs"], naive)
    smaller, _ = bbb.prune(loaded.guide, 0.5, units=True, x=x)
    assert sum(map(torch.Size.numel, smaller.latent_shapes().values())) < sum(
        map(torch.Size.numel, model.latent_shapes().values())
    )


def test_the_lowest_ratios_of_all_layers_go_and_a_layer_keeps_one_unit():
    _, guide = trained(mlp(nn.ReLU)())
    moments = {
        name.removeprefix("network."): (guide.loc(name).numpy(), guide.scale(name).numpy())
        for name in guide.site_names
    }
    ratios = []
    for units, reader in (("fc1", "fc2"), ("fc2", "fc3")):
        (w, s), (b, t), (v, r) = (
            moments[k] for k in (f"{units}.weight", f"{units}.bias", f"{reader}.weight")
        )
        for i in range(len(b)):
            incoming = (w[i] ** 2).sum() + b[i] ** 2, (s[i] ** 2).sum() + t[i] ** 2
            outgoing = (v[:, i] ** 2).sum(), (r[:, i] ** 2).sum()
            ratio = min(np.sqrt(mean / variance) for mean, variance in (incoming, outgoing))
            ratios.append((ratio, units, i))
    ranked = sorted(ratios)

    def left(**options):
        _, narrow = bbb.prune(guide, units=True, **options)
        biases = {n: guide.loc(f"network.{n}.bias").tolist() for n in ("fc1", "fc2")}
        return {
            (name, biases[name].index(b))
            for name in biases
            for b in narrow.loc(f"network.{name}.bias").tolist()
        }

    for count in (0, 1, 6, 10):
        expected = {(name, i) for _, name, i in ranked[count:]}
        assert left(fraction=count / 15) == expected
        assert left(threshold=ranked[count][0] * (1 - 1e-6)) == expected
    best = {name: max(r for r in ratios if r[1] == name)[1:] for name in ("fc1", "fc2")}
    assert left(fraction=1) == left(threshold=100) == set(best.values())


def test_without_fraction_and_threshold_only_dead_units_go_and_predictions_stay():
    model, guide = trained(mlp(nn.ReLU)())
    masks = {name: torch.zeros_like(guide.loc(name), dtype=torch.bool) for name in guide.site_names}
    masks["network.fc1.weight"][[0, 2]] = True
    masks["network.fc1.bias"][0] = True  # unit 0 is 0, unit 2 a constant
    masks["network.fc3.weight"][:, [1, 4, 5]] = True  # three that nobody reads
    pruned = guide.without(masks)
    narrow_model, narrow = bbb.prune(pruned, units=True)
    assert narrow_model.network.sizes == (4, 7, 4, 3)
    x = torch.randn(5, 4).double()
    before, after = bbb.predict_mean(model, pruned, x), bbb.predict_mean(narrow_model, narrow, x)
    torch.testing.assert_close(after.probs, before.probs)
    assert narrow.unpruned and not narrow.unpruned["network.fc1.weight"][1].any()
    again, dense = bbb.prune(guide, units=True)
    assert again.network.sizes == (4, 8, 7, 3) and not dense.unpruned
