# SPDX-License-Identifier: Apache-2.0
"""Memory that steps use again: lent to one tensor at a time, and without an effect on numbers."""

import math

import pyro
import pytest
import torch
from torch import Size

import pyro_bbb as bbb
from pyro_bbb._ops import buffers as _memory
from pyro_bbb._ops.buffers import Memory, empty_from_pool
from pyro_bbb._ops.step_context import StepOptions, step_context


def place(x):
    return x.untyped_storage().data_ptr()


def test_memory_is_lent_again_when_no_tensor_lies_on_it():
    memory = Memory()
    first, other = memory.lend(1000), memory.lend(1000)
    at = place(first)
    assert place(other) != at and len(first) == 1000
    view = first.view(torch.float32)[10:]
    del first
    assert place(memory.lend(1000)) not in (at, place(other))  # the view lies on it still
    del view
    assert place(memory.lend(1000)) == at


def test_what_autograd_keeps_is_in_use():
    memory, w = Memory(), torch.ones(250, requires_grad=True)
    x = memory.lend(1000).view(torch.float32).fill_(2.0)
    y, at = (w * x).sum(), place(x)
    del x
    assert place(memory.lend(1000)) != at
    y.backward()
    assert torch.equal(w.grad, torch.full((250,), 2.0))
    del y
    assert place(memory.lend(1000)) == at


@pytest.mark.parametrize("size", [2**17, 2**17 + 4, 10**6])
def test_it_begins_where_a_line_of_the_cache_does(size):
    assert all(place(x) % 64 == 0 for x in [Memory().lend(size) for _ in range(20)])


def test_blank_is_like_another_tensor_on_reused_memory_if_large():
    memory = Memory()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.zeros(300, 500, dtype=dtype)
        with step_context(StepOptions(memory=memory)):
            y = empty_from_pool(x)
            assert y.shape == x.shape and y.dtype == dtype and y.is_contiguous()
            assert empty_from_pool(x, Size([7])).shape == (7,)
            at = place(y)
            del y
            assert place(empty_from_pool(x)) == at
    meta = torch.zeros(300, 500, device="meta")
    with step_context(StepOptions(memory=memory)):
        assert empty_from_pool(meta).device.type == "meta"
    assert sum(map(len, memory._blocks.values())) == 3


def trained(particles, dtype, steps=4):
    """Losses and parameters of a short training."""
    pyro.set_rng_seed(0)
    prior = bbb.ScaleMixtureNormal(pi=0.5, sigma1=1.0, sigma2=math.exp(-6))
    network = bbb.BayesianMLP([5, 6, 3], prior=prior)
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=16).to(dtype)
    guide = bbb.AutoSoftplusNormal(model).to(dtype)
    x, y = torch.randn(16, 5, dtype=dtype), torch.randint(3, (16,))
    options = {"num_particles": particles, "batch_size": 8, "lr": 0.1, "progress": False}
    history = bbb.fit(model, guide, (x, y), epochs=steps, **options)
    return history.loss, [p.detach().clone() for p in guide.parameters()]


@pytest.mark.parametrize("particles", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_are_those_of_fresh_memory(monkeypatch, particles, dtype):
    monkeypatch.setattr(_memory, "LEAST", math.inf)
    losses, parameters = trained(particles, dtype)
    monkeypatch.setattr(_memory, "LEAST", 1)
    again, same = trained(particles, dtype)
    assert again == losses and all(map(torch.equal, parameters, same))


def test_steps_use_the_same_memory(monkeypatch):
    monkeypatch.setattr(_memory, "LEAST", 1)
    made, lend = [], Memory.lend

    def counted(memory, size):
        x = lend(memory, size)
        made.append(place(x))
        return x

    monkeypatch.setattr(Memory, "lend", counted)
    trained(1, torch.float32, steps=1)
    few, made[:] = len(set(made)), []
    trained(1, torch.float32, steps=20)
    assert len(made) > 20 * len(set(made)) / 2
    assert len(set(made)) <= few + 2


def test_what_a_user_keeps_of_a_step_is_not_written_over(monkeypatch):
    monkeypatch.setattr(_memory, "LEAST", 1)
    unpruned, copies = [], []
    network = bbb.BayesianMLP([5, 6, 3], prior=bbb.ScaleMixtureNormal(0.5, 1.0, 0.01))

    def note(module, inputs, output):
        unpruned.append(network.fc1.weight)
        copies.append(network.fc1.weight.detach().clone())

    network.register_forward_hook(note)
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=16)
    guide = bbb.AutoSoftplusNormal(model)
    data = torch.randn(16, 5), torch.randint(3, (16,))
    bbb.fit(model, guide, data, epochs=5, batch_size=8, progress=False)
    assert len(unpruned) >= 10 and all(map(torch.equal, unpruned, copies))
