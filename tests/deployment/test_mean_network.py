# SPDX-License-Identifier: Apache-2.0
"""Exported networks: the mean network's outputs, and nothing of Pyro."""

import pickle
import subprocess
import sys

import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import nn
from torch.distributions import constraints

import pyro_bbb as bbb
from pyro_bbb.deployment import sparse_where_faster


def make(network, fraction=0.0):
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(), num_data=5)
    guide = bbb.AutoSoftplusNormal(model, init_rho=-2.0)
    with torch.no_grad():
        for name in guide.site_names:
            guide.loc(name).normal_()  # distinct values everywhere, biases too
    return model, bbb.prune(guide, fraction) if fraction else guide


def outputs(model, guide, x):
    return bbb.predict_mean(model, guide, x).mean


def random_linear(module, n_in, n_out):
    """Samples for the weight and bias of a `PyroModule[nn.Linear]`."""
    layer = module(n_in, n_out)
    layer.weight = PyroSample(dist.Normal(0.0, 1.0).expand([n_out, n_in]).to_event(2))
    layer.bias = PyroSample(dist.Normal(0.0, 1.0).expand([n_out]).to_event(1))
    return layer


class Decorated(PyroModule):
    """A hand-written network with every way to declare random and learned quantities."""

    def __init__(self):
        super().__init__()
        self.first = random_linear(PyroModule[nn.Linear], 3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.gain = PyroParam(torch.tensor(2.0), constraint=constraints.positive)
        self.shift = nn.Parameter(torch.randn(4))
        self.spread = PyroSample(dist.LogNormal(0.0, 1.0))
        self.register_buffer("offset", torch.randn(4))
        self.hidden = 4

    @PyroSample
    def kernel(self):
        return dist.Normal(0.0, self.spread).expand([2, self.hidden]).to_event(2)

    @PyroParam(constraint=constraints.unit_interval)
    def share(self):
        return torch.tensor(0.25)

    @property
    def scaling(self):
        return self.gain * self.share

    @staticmethod
    def activation(x):
        return x.tanh()

    def forward(self, x):
        h = self.activation(self.norm(self.first(x)) * self.scaling + self.shift + self.offset)
        return F.linear(h, self.kernel) / self.spread


class Nested(PyroModule):
    """Modules in modules and in lists, with helper methods, a base class and torch parts."""

    def __init__(self):
        super().__init__()
        self.body = PyroModule[nn.Sequential](bbb.BayesianMLP([3, 5, 4]), nn.Tanh())
        self.parts = PyroModule[nn.ModuleList]([bbb.BayesianLinear(4, 4, bias=False)] * 1)
        self.parts.append(random_linear(PyroModule[nn.Linear], 4, 4))
        self.last = nn.Linear(4, 2)

    def mix(self, h):
        return sum(layer(h) for layer in self.parts)

    def forward(self, x):
        return self.last(self.mix(self.body(x)))


class Inherited(Nested):
    """Its forward goes on from its parent's."""

    def forward(self, x):
        return super().forward(x).exp()


class Residual(bbb.BayesianMLP):
    """A library network with another forward pass."""

    def forward(self, x):
        return super().forward(x) + x[:, :2]


class PyroFirst(PyroModule, nn.Sequential):
    """Bases in an order that torch's classes alone would not have."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = bbb.BayesianLinear(3, 4), bbb.BayesianLinear(4, 2)


class Squared:
    """A mix-in that is not a module."""

    def forward(self, x):
        return super().forward(x).square()


class Mixed(Squared, nn.Sequential, PyroModule):
    """Inherits its forward pass from the mix-in."""


NETWORKS = {
    "mlp": lambda: bbb.BayesianMLP([3, 16, 16, 2]),
    "learned-prior": lambda: bbb.BayesianMLP([3, 2], prior={"*": bbb.priors.FanInNormal()}),
    "decorated": Decorated,
    "nested": Nested,
    "inherited": Inherited,
    "residual": lambda: Residual([3, 6, 2]),
    "pyro-first": PyroFirst,
    "mixed": lambda: Mixed(bbb.BayesianLinear(3, 2)),
}
every_network = pytest.mark.parametrize("name", NETWORKS)


def assert_ordinary(module):
    for layer in module.modules():
        for cls in type(layer).__mro__:
            assert not cls.__module__.startswith("pyro."), cls
            assert not any(isinstance(v, (PyroSample, PyroParam)) for v in vars(cls).values())
        assert not isinstance(layer, bbb.priors.Prior)
        assert not [key for key in vars(layer) if "pyro" in key]
    assert not [name for name in module.state_dict() if "prior" in name or "unconstr" in name]


@pytest.mark.parametrize(
    ("fraction", "dtype"), [(0.0, torch.float32), (0.75, torch.float64), (1.0, torch.float32)]
)
@every_network
def test_has_the_mean_networks_outputs_and_nothing_of_pyro(name, fraction, dtype):
    torch.set_default_dtype(dtype)
    model, guide = make(NETWORKS[name](), fraction)
    x = torch.randn(7, 3)
    expected = outputs(model, guide, x)
    module = bbb.to_module(model, guide)
    assert not any(m.training for m in module.modules())
    actual = module(x)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected)
    assert fraction or actual.std() > 0
    assert_ordinary(module)
    assert list(module.parameters())
    state = torch.get_rng_state()
    assert torch.equal(module(x), actual) and torch.equal(torch.get_rng_state(), state)


@every_network
def test_the_bayesian_model_stays_as_it_is(name):
    model, guide = make(NETWORKS[name](), 0.75)
    x = torch.randn(7, 3)
    before = bbb.predict(model, guide, x, num_samples=3, seed=1).sample_means
    state = {key: value.clone() for key, value in model.state_dict().items()}
    classes = [type(m) for m in model.modules()]
    module = bbb.to_module(model, guide)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.zero_()
    assert torch.equal(bbb.predict(model, guide, x, num_samples=3, seed=1).sample_means, before)
    assert [type(m) for m in model.modules()] == classes
    assert model.training and list(model.state_dict()) == list(state)
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])


def test_parameters_are_the_means_by_the_layers_names():
    model, guide = make(bbb.BayesianMLP([3, 4, 2]))
    module = bbb.to_module(model, guide)
    assert type(module) is nn.Sequential and type(module.fc1) is nn.Linear
    parameters = dict(module.named_parameters())
    assert list(parameters) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    for name, value in parameters.items():
        assert value.requires_grad and torch.equal(value, guide.loc(f"network.{name}"))


def test_hand_written_parts_are_kept():
    model, guide = make(Decorated())
    model.network.norm.running_mean.fill_(3.0)
    module = bbb.to_module(model, guide)
    expected = {"first.weight", "first.bias", "kernel", "spread", "gain", "share", "shift"}
    expected |= {"norm.weight", "norm.bias"}
    assert {name for name, _ in module.named_parameters()} == expected
    assert (module.norm.running_mean == 3).all() and torch.equal(
        module.offset, model.network.offset
    )
    assert module.gain.item() == pytest.approx(2) and module.share.item() == pytest.approx(0.25)
    assert torch.equal(module.spread, guide.median()["network.spread"])
    assert module.scaling.item() == pytest.approx(0.5) and module.hidden == 4


def test_stock_guides_export_their_medians():
    model, _ = make(Nested())
    guide, x = AutoNormal(model), torch.randn(7, 3)
    guide(x, torch.zeros(7, 2))
    torch.testing.assert_close(bbb.to_module(model, guide)(x), outputs(model, guide, x))


# Saving, compiling, exporting


@every_network
def test_networks_can_be_pickled(name):
    module, x = bbb.to_module(*make(NETWORKS[name](), 0.75)), torch.randn(7, 3)
    assert torch.equal(pickle.loads(pickle.dumps(module))(x), module(x))


@pytest.mark.slow
def test_a_pruned_network_of_the_library_loads_without_it(tmp_path):
    module, x = bbb.to_module(*make(bbb.BayesianMLP([3, 9, 2]), 0.75)), torch.randn(7, 3)
    torch.save((module, x, module(x)), tmp_path / "module.pt")
    code = (
        "import sys; sys.modules.update(pyro_bbb=None, pyro=None);"
        "import torch; module, x, y = torch.load(sys.argv[1], weights_only=False);"
        "import warnings; warnings.simplefilter('error');"
        "torch.testing.assert_close(module(x), y); print(type(module[0]).__name__)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "module.pt")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "Linear", result.stderr


@pytest.mark.parametrize(
    ("name", "fraction"), [("mlp", 0.0), ("decorated", 0.75), ("inherited", 0.75), ("mixed", 0.75)]
)
def test_torch_exports_it_with_the_same_outputs(name, fraction):
    module = bbb.to_module(*make(NETWORKS[name](), fraction))
    x, dynamic = torch.randn(7, 3), {0: torch.export.Dim("batch", min=2)}
    program = torch.export.export(module, (x,), dynamic_shapes=(dynamic,))
    for inputs in (x, torch.randn(4, 3)):
        torch.testing.assert_close(program.module()(inputs), module(inputs))


@pytest.mark.parametrize("name", ["decorated", "inherited"])
def test_torch_compiles_it_whole_with_the_same_outputs(name):
    module, x = bbb.to_module(*make(NETWORKS[name](), 0.75)), torch.randn(7, 3)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x))


# Pruned networks


def large_and_pruned(fraction):
    """784-2000-10: of its first layer hardly anything is left, where the fraction is large."""
    return bbb.to_module(*make(bbb.BayesianMLP([784, 2000, 10]), fraction))


def test_weights_become_sparse_in_the_layers_that_they_make_faster():
    x = torch.randn(100, 784)
    for fraction, layout in ((0.0, torch.strided), (0.999, torch.sparse_csr)):
        dense = large_and_pruned(fraction)
        sparse = sparse_where_faster(dense, x)
        assert type(sparse.fc1) is nn.Linear and sparse.fc1.weight.layout == layout
        assert dense.fc1.weight.layout == torch.strided
        with torch.no_grad():
            torch.testing.assert_close(sparse(x), dense(x))
            torch.testing.assert_close(sparse(x[:1]), dense(x[:1]))
