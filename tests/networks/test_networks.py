# SPDX-License-Identifier: Apache-2.0
"""Layers and networks with random weights: shapes, names, one draw per call, and outputs."""

import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.nn import PyroModule, PyroParam, PyroSample
from pyro.nn.module import to_pyro_module_
from torch import nn

import pyro_bbb as bbb
from pyro_bbb import AutoSoftplusNormal, BayesianLinear, BayesianMLP, BayesianModel, likelihoods
from pyro_bbb.networks import BayesianConv2d, BayesianLeNet5


def sample_sites(function, *args):
    """Event shapes by site name, in order."""
    trace = poutine.trace(function).get_trace(*args)
    return {name: node["fn"].event_shape for name, node in trace.iter_stochastic_nodes()}


def model_of(network, num_data=5):
    return BayesianModel(network, likelihoods.Gaussian(0.5), num_data)


def latents(model, x):
    """Names of the latents, in order."""
    trace = poutine.trace(model).get_trace(x)
    return [name for name in trace.stochastic_nodes if name not in ("data", "obs")]


# --- BayesianLinear ---


@pytest.mark.parametrize("shape", [(7, 3), (7, 2, 3), (3,)])
def test_a_linear_layer_computes_with_the_weights_drawn(shape):
    layer, x = BayesianLinear(3, 2), torch.randn(shape)
    trace = poutine.trace(layer).get_trace(x)
    weight, bias = (trace.nodes[name]["value"] for name in ("weight", "bias"))
    assert (weight.shape, bias.shape) == ((2, 3), (2,))
    expected = torch.einsum("...i,oi->...o", x, weight) + bias
    torch.testing.assert_close(trace.nodes["_RETURN"]["value"], expected)


# --- BayesianMLP ---


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, lambda: nn.LeakyReLU(0.3)])
def test_an_mlp_computes_with_the_weights_drawn(activation):
    network, x = BayesianMLP([3, 5, 4, 2], activation=activation), torch.randn(7, 3)
    trace = poutine.trace(network).get_trace(x)
    names = [f"fc{i}.{name}" for i in (1, 2, 3) for name in ("weight", "bias")]
    assert list(sample_sites(network, x)) == names and network.sizes == (3, 5, 4, 2)
    assert network(torch.randn(7, 6, 3)).shape == (7, 6, 2)
    h = x
    for i in (1, 2, 3):
        weight, bias = (trace.nodes[f"fc{i}.{name}"]["value"] for name in ("weight", "bias"))
        h = h @ weight.T + bias
        h = activation()(h) if i < 3 else h  # none after the last layer
    torch.testing.assert_close(trace.nodes["_RETURN"]["value"], h)


# --- hand-written networks ---


class Twice(PyroModule):
    """Calls one layer twice."""

    def __init__(self):
        super().__init__()
        self.layer = BayesianLinear(3, 3)

    def forward(self, x):
        first, second = self.layer(x), self.layer(x)
        return torch.stack([first, second], 1)


def test_a_layer_called_twice_in_a_forward_pass_has_one_draw():
    network, x = Twice(), torch.randn(4, 3)
    assert list(sample_sites(network, x)) == ["layer.weight", "layer.bias"]
    for function in (network, model_of(network).network):
        outputs = function(x)
        assert torch.equal(outputs[:, 0], outputs[:, 1])
    assert not torch.equal(network(x), network(x))


class HandWritten(PyroModule):
    """All ways to declare, with a weight scale that is random itself."""

    def __init__(self):
        super().__init__()
        self.scale = PyroSample(dist.LogNormal(0.0, 0.1))
        self.weight = PyroSample(lambda self: dist.Normal(0.0, self.scale).expand([2]).to_event(1))
        self.slope = PyroParam(torch.tensor(1.5), constraint=dist.constraints.positive)
        self.offset = nn.Parameter(torch.tensor(0.5))
        self.plain = nn.Linear(2, 2)

    @PyroSample
    def bias(self):
        return dist.Normal(self.weight.sum(), 1e-6)  # depends on a draw

    def forward(self, x):
        h = self.slope * self.plain(x) + self.offset
        return (h * self.weight).sum(-1, keepdim=True) + self.bias


def test_a_hand_written_network_in_a_model():
    model, x, y = model_of(HandWritten()), torch.randn(5, 2), torch.randn(5, 1)
    guide = AutoSoftplusNormal(model)
    assert sorted(guide.site_names) == ["network.bias", "network.scale", "network.weight"]
    trace = poutine.trace(model).get_trace(x, y)
    names = [name for name in trace.stochastic_nodes if name != "data"]
    assert sorted(names) == ["network.bias", "network.scale", "network.weight"]
    value = {name: trace.nodes[name]["value"] for name in names}
    torch.testing.assert_close(
        value["network.bias"], value["network.weight"].sum(), rtol=0.0, atol=1e-5
    )
    assert torch.equal(trace.nodes["network.weight"]["fn"].stddev, value["network.scale"].expand(2))
    network = model.network
    with torch.no_grad():
        h = 1.5 * (x @ network.plain.weight.T + network.plain.bias) + 0.5
    expected = h @ value["network.weight"][:, None] + value["network.bias"]
    observed = trace.nodes["obs"]["fn"]
    torch.testing.assert_close(observed.mean.detach(), expected)
    parameters = set(trace.param_nodes)
    assert parameters >= {"network.offset", "network.plain.weight", "network.plain.bias"}


class Unordered(PyroModule):
    """Uses its latents in another order than it declares them, and one of them not at all."""

    def __init__(self):
        super().__init__()
        self.b = PyroSample(dist.Normal(0.0, 1.0))
        self.a = PyroSample(dist.Normal(0.0, 1.0))
        self.unused = PyroSample(dist.Normal(0.0, 1.0))

    def forward(self, x):
        return x * self.a + self.b


def test_sites_are_those_declared_whatever_the_forward_pass_uses():
    sites = latents(model_of(Unordered()), torch.randn(5, 1))
    assert sites == ["network.b", "network.a", "network.unused"]


# --- ordinary modules that hold Bayesian layers ---


class Enclosing(nn.Module):
    """Bayesian layers, and an ordinary one that is trained alongside."""

    def __init__(self):
        super().__init__()
        self.first = bbb.BayesianLinear(3, 6)
        self.rest = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), bbb.BayesianLinear(6, 2))

    def forward(self, x):
        return self.rest(torch.tanh(self.first(x)))


def sequential():
    return nn.Sequential(bbb.BayesianLinear(3, 6), nn.Tanh(), bbb.BayesianLinear(6, 2))


def of_pyro(network):
    """Return the network with Pyro mixed into every module."""
    to_pyro_module_(network)
    return network


def train_and_use(network, estimator):
    """All that a user does with it, as numbers."""
    x, y = torch.randn(12, 3), torch.randn(12, 2)
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(0.5), num_data=12)
    guide = bbb.AutoSoftplusNormal(model)
    history = bbb.fit(model, guide, (x, y), epochs=2, estimator=estimator, progress=False)
    prediction = bbb.predict(model, guide, x, num_samples=3)
    pruned = bbb.to_module(model, bbb.prune(guide, fraction=0.5))
    ensemble = bbb.to_ensemble(model, guide, num_samples=2)
    chains = bbb.run_nuts(model, (x, y), num_samples=2, warmup_steps=2, progress=False)
    used = [prediction.mean, bbb.predict_mean(model, guide, x).mean, pruned(x)]
    return history.loss, used + [ensemble(x), bbb.predict(model, chains, x).mean]


@pytest.mark.parametrize(("make", "estimator"), [(sequential, "reparam"), (Enclosing, "flipout")])
def test_an_ordinary_module_that_holds_bayesian_layers_is_a_network(make, estimator):
    """Its outputs are those of the network of Pyro modules, to the bit."""
    results = []
    for wrap in (of_pyro, lambda network: network):
        torch.manual_seed(0)
        results.append(train_and_use(wrap(make()), estimator))
    (loss, used), (expected_loss, expected) = results
    assert loss == expected_loss
    torch.testing.assert_close(used, expected, rtol=0, atol=0)


# --- convolutions ---


def draws(function, *args):
    """Values by site name, in order, and what the function returned."""
    trace = poutine.trace(function).get_trace(*args)
    values = {name: site["value"] for name, site in trace.iter_stochastic_nodes()}
    return values, trace.nodes["_RETURN"]["value"]


# --- BayesianConv2d ---


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": 1},
        {"padding": "same", "dilation": 2},
        {"groups": 2, "bias": False},
        {"kernel_size": (3, 2), "stride": (1, 2), "padding": (2, 0)},
    ],
)
def test_a_convolution_computes_with_the_weights_drawn(options):
    options = {"kernel_size": 3} | options
    layer, x = BayesianConv2d(4, 6, **options), torch.randn(2, 4, 7, 7)
    values, outputs = draws(layer, x)
    original = nn.Conv2d(4, 6, **options)
    assert {n: v.shape for n, v in values.items()} == {
        n: p.shape for n, p in original.named_parameters()
    }
    del options["kernel_size"]
    bias = values.get("bias") if options.pop("bias", True) else None
    torch.testing.assert_close(outputs, F.conv2d(x, values["weight"], bias, **options))
    assert not torch.equal(layer(x), layer(x))


# --- BayesianLeNet5 ---

SHAPES = {
    "conv1": (6, 1, 5, 5),
    "conv2": (16, 6, 5, 5),
    "conv3": (120, 16, 5, 5),
    "fc1": (84, 120 * 7 * 7),
    "fc2": (10, 84),
}


def test_sites_and_outputs_of_lenet():
    network, x = BayesianLeNet5(prior=dist.Normal(0.0, 0.1)), torch.randn(3, 1, 28, 28)
    values, outputs = draws(network, x)
    expected = {}
    for name, shape in SHAPES.items():
        expected |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    assert {name: tuple(value.shape) for name, value in values.items()} == expected
    assert list(values) == list(expected)
    h = x
    for i in (1, 2, 3):
        weight, bias = values[f"conv{i}.weight"], values[f"conv{i}.bias"]
        h = F.conv2d(h, weight, bias, padding=2).relu()
        h = F.max_pool2d(h, 2) if i < 3 else h.flatten(1)
    h = F.linear(h, values["fc1.weight"], values["fc1.bias"]).relu()
    h = F.linear(h, values["fc2.weight"], values["fc2.bias"])
    torch.testing.assert_close(outputs, h)
    assert BayesianLeNet5(7)(x).shape == (3, 7)
