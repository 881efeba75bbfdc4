# SPDX-License-Identifier: Apache-2.0
"""What is frozen is not trained, and what is known of one draw holds for several."""

import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroSample
from torch import nn

import pyro_bbb as bbb
from pyro_bbb.priors import Prior

X = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
Y = X.sum(1)


def fit(model, guide, **options):
    return bbb.fit(model, guide, (X, Y), **{"epochs": 2, "progress": False, "seed": 0} | options)


def in_model(network, **options):
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(), num_data=len(X))
    return model, bbb.AutoSoftplusNormal(model, **options)


# --- frozen ---


class Half(PyroModule):
    """An ordinary layer as Pyro's module, which Pyro announces, and a Bayesian one."""

    def __init__(self):
        super().__init__()
        self.first = PyroModule[nn.Linear](2, 3)
        self.last = bbb.BayesianLinear(3, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD])
def test_a_frozen_parameter_of_a_hand_written_network_is_not_trained(optimizer):
    model, guide = in_model(Half())
    first = model.network.first
    first.weight.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in first.named_parameters()}
    fit(model, guide, optimizer=optimizer)
    assert torch.equal(first.weight, before["weight"])
    assert not first.weight.requires_grad and first.weight.grad is None
    assert first.bias.requires_grad and not torch.equal(first.bias, before["bias"])


@pytest.mark.parametrize("family", ["full_rank", "low_rank", "softplus_normal"])
def test_a_frozen_parameter_of_a_guide_is_not_trained(family):
    model, _ = in_model(bbb.BayesianMLP([2, 3, 1]))
    guide = bbb.guides.make(family, model)
    frozen, *trained = guide.parameters()
    frozen.requires_grad_(False)
    before = [p.detach().clone() for p in guide.parameters()]
    fit(model, guide)
    assert torch.equal(frozen, before[0]) and not frozen.requires_grad
    assert not any(torch.equal(p, old) for p, old in zip(trained, before[1:], strict=True))


def test_callbacks_freeze_and_unfreeze():
    model, guide = in_model(Half())
    weight, bias = model.network.first.weight, model.network.first.bias
    bias.requires_grad_(False)
    seen = []

    def swap(end):
        seen.append((weight.detach().clone(), bias.detach().clone()))
        weight.requires_grad_(end.epoch % 2 == 1)
        bias.requires_grad_(end.epoch % 2 == 0)

    fit(model, guide, epochs=4, callbacks=[swap])
    moved = [
        tuple(not torch.equal(a, b) for a, b in zip(old, new, strict=True))
        for old, new in zip(seen, seen[1:], strict=False)
    ]
    assert moved == [(False, True), (True, False), (False, True)]


# --- several draws ---


class Dependent(PyroModule):
    """A bias that is the sum of the weights, to 0.1."""

    def __init__(self):
        super().__init__()
        self.weight = PyroSample(dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        self.bias = PyroSample(lambda self: dist.Normal(self.weight.sum(), 0.1))

    def forward(self, x):
        return x @ self.weight.unsqueeze(-1) + self.bias


class OfUser(Prior):
    """Standard deviations that a bias has from its layer's weights."""

    def forward(self, module, name, shape):
        scale = module.weight.square().mean() if name == "bias" else 1.0
        return dist.Normal(torch.zeros(shape), scale).to_event(len(shape))


def by_function(module, name, shape):
    return OfUser()(module, name, shape)


class Summed(bbb.BayesianModel):
    """A model whose program does more with its weights."""

    def forward(self, x, y=None, kl_weight=1.0):
        obs = super().forward(x, y, kl_weight)
        self.total = self.network.weight.sum()
        return obs


DEPENDENT = {
    "PyroSample": Dependent,
    "prior of the user's": lambda: bbb.BayesianLinear(2, 1, prior=OfUser()),
    "function": lambda: bbb.BayesianLinear(2, 1, prior=by_function),
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_a_prior_that_depends_on_other_latents_does_so_within_each_draw(name):
    """The posterior is all but a point, so that each draw has the log-prior of one."""
    network = DEPENDENT[name]()
    start = {"weight": torch.ones(2), "bias": torch.tensor(2.0)}
    if name != "PyroSample":
        start = {"weight": torch.ones(1, 2), "bias": torch.tensor([2.0])}
    log_prior = {}
    for num_particles in (1, 4):
        model, guide = in_model(network, init_loc=start, init_rho=-20.0)
        options = {"epochs": 1, "lr": 1e-12, "num_particles": num_particles}
        log_prior[num_particles] = fit(model, guide, **options).log_prior[0]
    assert log_prior[4] == pytest.approx(log_prior[1], rel=1e-5)


def test_a_model_with_a_program_of_its_own_sees_one_draw():
    model = Summed(bbb.BayesianLinear(2, 1), bbb.likelihoods.Gaussian(), num_data=len(X))
    fit(model, bbb.AutoSoftplusNormal(model), num_particles=3)
    assert model.total.shape == ()
