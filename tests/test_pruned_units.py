# SPDX-License-Identifier: Apache-2.0
"""Networks without some of their units: which ones go, and the predictions of what is left."""

import copy

import numpy as np
import pyro
import pyro.distributions as dist
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
    kept = sum(len(narrow.loc(f"network.{name}.bias")) == 1 for name, _, _ in pairs)
    assert round(0.5 * units) - kept <= units - left <= round(0.5 * units)
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


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Sigmoid])  # 0 at 0, and not
def test_the_lowest_ratios_of_all_layers_go_and_a_layer_keeps_one_unit(activation):
    _, guide = trained(mlp(activation)())
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
            incoming = ((w[i] / s[i]) ** 2).sum() + (b[i] / t[i]) ** 2
            outgoing = ((v[:, i] / r[:, i]) ** 2).sum()
            ratio = np.sqrt(min(incoming, outgoing) if activation is nn.ReLU else outgoing)
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

    best = {name: max(r for r in ratios if r[1] == name)[1:] for name in ("fc1", "fc2")}
    for count in (0, 1, 6, 10):
        expected = {(name, i) for _, name, i in ranked[count:]} | set(best.values())
        assert left(fraction=count / 15) == expected
        assert left(threshold=ranked[count][0] * (1 - 1e-6)) == expected
    assert left(fraction=1) == left(threshold=100) == set(best.values())


@pytest.mark.parametrize(
    ("activation", "sizes"), [(nn.ReLU, (4, 7, 4, 3)), (nn.Sigmoid, (4, 8, 4, 3))]
)
def test_without_fraction_and_threshold_only_dead_units_go_and_predictions_stay(activation, sizes):
    model, guide = trained(mlp(activation)())
    masks = {name: torch.zeros_like(guide.loc(name), dtype=torch.bool) for name in guide.site_names}
    masks["network.fc1.weight"][[0, 2]] = True
    masks["network.fc1.bias"][0] = True  # unit 0 is 0, unit 2 a constant
    masks["network.fc3.weight"][:, [1, 4, 5]] = True  # three that nobody reads
    pruned = guide.without(masks)
    narrow_model, narrow = bbb.prune(pruned, units=True)
    assert narrow_model.network.sizes == sizes
    x = torch.randn(5, 4).double()
    before, after = bbb.predict_mean(model, pruned, x), bbb.predict_mean(narrow_model, narrow, x)
    torch.testing.assert_close(after.probs, before.probs)
    assert narrow.unpruned and not narrow.unpruned["network.fc1.weight"][sizes[1] - 6].any()
    again, dense = bbb.prune(guide, units=True)
    assert again.network.sizes == (4, 8, 7, 3) and not dense.unpruned


def test_channels_without_weights_stay_where_batch_normalisation_makes_them_constants():
    model, guide = trained(bbb.bayesianize(ConvNet()))
    names = ("network.conv1.weight", "network.conv1.bias")
    masks = {name: torch.ones_like(guide.loc(name), dtype=torch.bool) for name in names}
    pruned, x = guide.without(masks), torch.randn(5, 2, 8, 8).double()
    narrow_model, narrow = bbb.prune(pruned, units=True, x=x)
    constants = model.network.norm.eval()(torch.zeros(1, 6, 1, 1).double()) > 0  # after the ReLU
    assert 0 < len(narrow.loc("network.conv1.bias")) == constants.sum() < 6
    before, after = bbb.predict_mean(model, pruned, x), bbb.predict_mean(narrow_model, narrow, x)
    torch.testing.assert_close(after.probs, before.probs)


def layers(*widths):
    pairs = zip(widths[:-1], widths[1:], strict=True)
    modules = [m for a, b in pairs for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*modules[:-1])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.c.weight = self.b.weight
        self.e, self.top = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        for layer in (self.a, self.b, self.c, self.d, self.d, self.e):
            x = torch.tanh(layer(x))
        return self.top(x)


@pytest.mark.parametrize("prior", ["normal", "horseshoe", "learned_normal", "normal_jeffreys"])
@pytest.mark.parametrize("where", ["*", "conv2"])
def test_a_narrow_network_of_an_own_class_loads_into_one_as_wide_as_before(where, prior, tmp_path):
    wide = bbb.bayesianize(ConvNet(), prior=prior, where=where)
    _, guide = trained(copy.deepcopy(wide))
    x = torch.randn(5, 2, 8, 8).double()
    model, guide = bbb.prune(guide, 0.5, units=True, x=x)
    for compressed in (False, True):
        bbb.save(tmp_path / "narrow", model, guide, compressed=compressed)
        loaded = bbb.load(tmp_path / "narrow", network=wide)
        bbb.save(tmp_path / "narrow", *loaded)
        loaded = bbb.load(tmp_path / "narrow", network=wide)
        assert loaded.model.latent_shapes() == model.latent_shapes()
        expected, probs = (
            bbb.predict(*of, x, num_samples=9, seed=0).probs for of in ((model, guide), loaded)
        )
        torch.testing.assert_close(probs, expected, rtol=0, atol=0.1 * compressed)
    bbb.fit(*loaded, (x.repeat(2, 1, 1, 1)[:6], torch.arange(6) % 3), epochs=1, progress=False)
    assert wide.conv2.out_channels == 5
    with pytest.raises(bbb.LoadError, match="pass a network of the saved layers"):
        bbb.load(tmp_path / "narrow", network=bbb.bayesianize(Residual(), prior=prior))


STAYING = {  # networks, inputs, and the layers whose number of outputs falls
    "tied and repeated": (Tied, torch.randn(5, 4), {"e"}),
    "grouped": (
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 6, 1), nn.PReLU(6), nn.Conv2d(6, 6, 3, groups=2), nn.PReLU()),
            *(nn.Conv2d(6, 8, 1), nn.PReLU(8), nn.ConvTranspose2d(8, 6, 1), nn.PReLU()),
            *(nn.Conv2d(6, 3, 2), nn.Flatten()),
        ),
        torch.randn(5, 2, 4, 4),
        {"4", "6"},
    ),
    "transformer": (
        lambda: nn.Sequential(
            nn.Linear(4, 8),
            nn.TransformerEncoderLayer(8, 2, 12, batch_first=True),
            nn.Flatten(),
            nn.Linear(56, 3),
        ),
        torch.randn(5, 7, 4),
        {"1.linear1"},
    ),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), *layers(8, 6, 3)),
        torch.randint(9, (5, 2)),
        {"2"},
    ),
}


@pytest.mark.parametrize("case", STAYING)
def test_units_that_cannot_be_separated_stay(case):
    build, x, narrower = STAYING[case]
    network = bbb.bayesianize(build())
    model, guide = trained(network)
    narrow_model, narrow = bbb.prune(guide, 1.0, units=True, x=x)
    biases = {k: (guide.loc(k), narrow.loc(k)) for k in guide.site_names if k.endswith("bias")}
    fallen = {k for k, (wide, left) in biases.items() if len(left) < len(wide)}
    assert fallen == {f"network.{layer}.bias" for layer in narrower}
    assert bbb.predict(narrow_model, narrow, x, num_samples=2).probs.shape[0] == 5


@pytest.mark.parametrize("where", ["0", "2", "4"])
def test_ordinary_layers_become_narrower_too(where):
    """The units of two ordinary layers have no ratio and stay."""
    model, guide = trained(bbb.bayesianize(layers(4, 8, 6, 3), where=where))
    narrow_model, narrow = bbb.prune(guide, 0.5, units=True)
    network, wide = narrow_model.network, model.network
    widths = [network[0].out_features, network[2].out_features]
    assert (widths[0] < 8) == (where in "02") and (widths[1] < 6) == (where in "24")
    draw = guide.median()
    for reader in (2, 4):  # columns of units that went, as 0 in the wide network
        units = (
            wide[reader - 2].bias
            if where != str(reader - 2)
            else guide.loc(f"network.{where}.bias")
        )
        left = (
            network[reader - 2].bias
            if where != str(reader - 2)
            else narrow.loc(f"network.{where}.bias")
        )
        goes = ~torch.isin(units, left)
        weight = (
            draw[f"network.{where}.weight"] if where == str(reader) else wide[reader].weight.data
        )
        weight[:, goes] = 0
    x = torch.randn(5, 4).double()
    before = bbb.predict(model, {k: v[None] for k, v in draw.items()}, x).probs
    after = bbb.predict_mean(narrow_model, narrow, x).probs
    torch.testing.assert_close(after, before)
    bbb.fit(
        narrow_model, narrow, (x.repeat(2, 1)[:6], torch.arange(6) % 3), epochs=1, progress=False
    )


PRIORS = ["horseshoe", "learned_normal", "learned_scale_mixture", "inverse_gamma", "log_uniform"]
BY_NAME = {"*.weight": "horseshoe", "*": "laplace"}
PER_INPUT = {"*": bbb.priors.make("horseshoe", per="input")}


@pytest.mark.parametrize("prior", [*PRIORS, "normal_jeffreys", BY_NAME, PER_INPUT])
def test_a_prior_becomes_narrower_with_its_weights(prior, tmp_path):
    model, guide = trained(bbb.BayesianMLP([4, 8, 6, 3], prior=prior))
    locs = {k: v for k, v in model.named_parameters() if k.endswith("_prior_loc")}
    with torch.no_grad():
        for loc in locs.values():
            loc.normal_()
    narrow_model, narrow = bbb.prune(guide, 0.5, units=True)
    shapes = narrow_model.latent_shapes()
    assert shapes == narrow.latent_shapes() != guide.latent_shapes()
    stays = torch.isin(guide.loc("network.fc1.bias"), narrow.loc("network.fc1.bias"))
    left = dict(narrow_model.named_parameters())
    if locs:
        assert torch.equal(
            left["network.fc1.weight_prior_loc"], locs["network.fc1.weight_prior_loc"][stays]
        )
    # scales of the rows of one layer, or of the columns of the next
    scales = f"network.{'fc2' if prior is PER_INPUT else 'fc1'}.weight_prior_scale"
    if scales in shapes:
        assert torch.equal(narrow.loc(scales), guide.loc(scales)[stays])
    loss = "mean_field" if prior in ("log_uniform", "normal_jeffreys") else None
    data = torch.randn(6, 4), torch.arange(6) % 3
    bbb.fit(narrow_model, narrow, data, epochs=1, progress=False, loss=loss)
    bbb.save(tmp_path / "narrow", narrow_model, narrow)
    loaded, _ = bbb.load(tmp_path / "narrow")
    assert loaded.latent_shapes() == shapes


def test_the_posterior_as_prior_and_the_noise():
    wide = trained(bbb.BayesianMLP([4, 8, 6, 3]))[1]
    network = bbb.BayesianMLP([4, 8, 6, 3], prior=bbb.priors.from_guide(wide))
    likelihood = bbb.likelihoods.Gaussian(dist.Gamma(2.0, 2.0))
    model = bbb.BayesianModel(network, likelihood, num_data=6).double()
    guide = bbb.AutoSoftplusNormal(
        model, init_loc=wide.median() | {"likelihood.scale": torch.tensor(1.0).double()}
    )
    narrow_model, narrow = bbb.prune(guide, 0.5, units=True)
    assert narrow.loc("likelihood.scale") == guide.loc("likelihood.scale")
    # where the guide is the prior, the KL of the weights is 0, of all and of those left
    for name, site in narrow_model.latent_sites().items():
        if name != "likelihood.scale":
            torch.testing.assert_close(site["fn"].mean, narrow.loc(name))


class Stated(ConvNet):
    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv1(x))), 2)
        return self.fc(F.max_pool2d(F.relu(self.conv2(x)), 2).view(-1, 20))


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.shift = nn.Linear(4, 5), nn.Parameter(torch.zeros(5))
        self.top = nn.Linear(5, 3)

    def forward(self, x):
        return self.top(F.relu(self.first(x) + self.shift))


IMAGES = torch.randn(2, 2, 8, 8)
REFUSED = {
    "x must be given .* the network's first layer, a PyroConv2d: pass": (ConvNet, None),
    "x must be given as inputs of the network.*but got input of size": (
        ConvNet,
        torch.randn(2, 4),
    ),
    "runs at any width.*it fails: shape .* is invalid": (Stated, IMAGES),
    "runs at any width.*it fails: The size of tensor": (Shifted, torch.randn(2, 4)),
    "a network with units that can be removed, got one without": (lambda: nn.Linear(4, 3), None),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_become_narrower_is_refused(message):
    build, x = REFUSED[message]
    _, guide = trained(bbb.bayesianize(build()))
    with pytest.raises(ValueError, match=message):
        bbb.prune(guide, 0.5, units=True, x=x)


def test_a_model_without_a_network_is_refused():
    def model():
        pyro.sample("w", dist.Normal(0.0, 1.0))

    guide = bbb.AutoSoftplusNormal(model)
    guide()
    with pytest.raises(TypeError, match="units=True needs the guide of a BayesianModel"):
        bbb.prune(guide, units=True)
