# SPDX-License-Identifier: Apache-2.0
"""One torch optimiser behind SVI: the same steps as torch's, and gradients that are checked."""

import math

import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from torch import nn

import pyro_bbb as bbb
from pyro_bbb import JointOptim, NonFiniteError
from pyro_bbb.training._flat_adam import FlatAdam


def parameters(n=3):
    return {f"p{i}": nn.Parameter(torch.randn(i + 1, 2)) for i in range(n)}


def set_gradients(params, scale=1.0):
    for parameter in params:
        parameter.grad = scale * torch.sin(parameter.detach() * 7 + 1)


def copies(params):
    return [nn.Parameter(parameter.detach().clone()) for parameter in params]


@pytest.mark.parametrize(
    ("kind", "args"), [(torch.optim.Adam, {}), (torch.optim.AdamW, {"fused": True})]
)
def test_steps_are_bit_by_bit_those_of_torch(kind, args):
    named = parameters()
    ours, theirs = list(named.values()), copies(named.values())
    optim = JointOptim(kind, {"lr": 0.05, **args}, parameters=named)
    reference = kind(theirs, lr=0.05, **args)
    for _ in range(5):
        set_gradients(ours)
        set_gradients(theirs)
        optim(set(ours))  # as SVI gives them: a set
        reference.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert all(parameter.grad is None for parameter in ours)


def test_there_is_one_torch_optimiser_under_raw_svi_and_it_learns():
    network = bbb.BayesianMLP([3, 8, 1], prior=dist.Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian.learned(2.0), num_data=50)
    guide = bbb.AutoSoftplusNormal(model)
    x = torch.randn(50, 3)
    y = x.sum(1)
    made = []

    def constructor(params, **kwargs):
        made.append(torch.optim.Adam(params, **kwargs))
        return made[-1]

    optim = JointOptim(constructor, {"lr": 0.02, "fused": True})
    assert optim.optimizer is None
    svi = SVI(model, guide, optim, Trace_ELBO())
    losses = [svi.step(x, y) for _ in range(150)]
    assert len(made) == 1 and made[0] is optim.optimizer
    assert len(optim.optim_objs) == 0  # Pyro's own, one per parameter
    held = [p for group in optim.optimizer.param_groups for p in group["params"]]
    assert set(held) == {*guide.parameters(), *model.parameters()} and len(held) == 9
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])


def test_parameters_met_late_join_the_same_optimiser():
    named = parameters(3)
    first, second, late = named.values()
    optim = JointOptim(torch.optim.SGD, {"lr": 0.5}, parameters={"p0": first})
    optimizer = optim.optimizer
    for met in ([first, second], [late, second]):
        before = {p: p.detach().clone() for p in met}
        set_gradients(met)
        expected = {p: before[p] - 0.5 * p.grad for p in met}
        optim(met)
        assert all(torch.equal(p, expected[p]) for p in met)
    assert optim.optimizer is optimizer
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1, 1]


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_clip_norm_bounds_the_norm_of_the_whole_gradient(scale):
    named = parameters()
    ours, theirs = list(named.values()), copies(named.values())
    optim = JointOptim(torch.optim.SGD, {"lr": 1.0}, {"clip_norm": 0.1}, parameters=named)
    before = [p.detach().clone() for p in ours]
    set_gradients(ours, scale)
    set_gradients(theirs, scale)
    optim(ours)
    norm = torch.cat([p.grad.flatten() for p in theirs]).norm()
    moves = [a - p.detach() for a, p in zip(before, ours, strict=True)]
    total = torch.cat([move.flatten() for move in moves]).norm().item()
    assert (norm > 0.1) == (scale == 1.0)
    assert total == pytest.approx(min(norm.item(), 0.1), rel=1e-3)  # rounding of p - grad
    factor = min(1.0, 0.1 / norm.item())
    for move, p in zip(moves, theirs, strict=True):
        torch.testing.assert_close(move, factor * p.grad, rtol=1e-5, atol=3e-7)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing_and_is_named(value):
    named = parameters()
    optim = JointOptim(torch.optim.Adam, {"lr": 0.1}, parameters=named)
    set_gradients(named.values())
    optim(named.values())
    before, state = copies(named.values()), optim.get_state()
    steps = [entry["step"].item() for entry in state["state"].values()]
    set_gradients(named.values())
    named["p1"].grad[1, 0] = value
    with pytest.raises(NonFiniteError, match="gradient is not finite in p1;") as caught:
        optim(named.values())
    assert (caught.value.what, caught.value.names) == ("gradient", ["p1"])
    assert all(torch.equal(a, b) for a, b in zip(named.values(), before, strict=True))
    state = optim.get_state()["state"].values()
    assert [entry["step"].item() for entry in state] == steps
    # the bad gradient is gone, so that training can go on
    set_gradients(named.values())
    optim(named.values())
    assert all(parameter.isfinite().all() for parameter in named.values())


@pytest.mark.parametrize("clip_args", [None, {"clip_norm": 0.5}])
def test_a_finite_gradient_whose_norm_overflows_is_no_error_and_can_be_clipped(clip_args):
    named = parameters()
    optim = JointOptim(torch.optim.SGD, {"lr": 0.1}, clip_args, parameters=named)
    before = copies(named.values())
    set_gradients(named.values(), 1e30)
    units = [p.grad / 1e30 for p in named.values()]
    size = 1e30 if clip_args is None else 0.5 / torch.cat([u.flatten() for u in units]).norm()
    optim(named.values())
    for old, p, unit in zip(before, named.values(), units, strict=True):
        torch.testing.assert_close(p.detach(), (old - 0.1 * size * unit).detach())


DECAYING = {
    "fused Adam": (torch.optim.Adam, {"weight_decay": 0.1, "fused": True}),
    "SGD": (torch.optim.SGD, {"weight_decay": 0.1, "momentum": 0.9}),
    "Adafactor": (torch.optim.Adafactor, {"weight_decay": 0.1}),  # steps by the tensor's norm
}


@pytest.mark.parametrize("name", DECAYING)
def test_weight_decay_leaves_removed_weights_alone_and_the_others_as_torch_moves_them(name):
    optimizer_type, options = DECAYING[name]
    ours, theirs = nn.Parameter(torch.randn(6)), nn.Parameter(torch.empty(6))
    removed = torch.tensor([False, True, False, True, True, False])
    with torch.no_grad():
        ours[removed] = -math.inf
        theirs.copy_(ours.where(~removed, 0.0))
    optim = JointOptim(optimizer_type, {"lr": 0.05, **options}, parameters={"rho": ours})
    reference = optimizer_type([theirs], lr=0.05, **options)
    for _ in range(4):
        for parameter in (ours, theirs):
            parameter.grad = torch.sin(theirs.detach() * 7 + 1).where(~removed, 0.0)
        optim([ours])
        reference.step()
        assert (ours[removed] == -math.inf).all()
        assert torch.equal(ours[~removed], theirs[~removed])
        assert all(
            torch.as_tensor(x).isfinite().all() for x in optim.optimizer.state[ours].values()
        )


@pytest.mark.parametrize("lr", [-0.1, math.nan, math.inf])
def test_the_learning_rate_reaches_every_group_and_is_checked(lr):
    named = parameters(2)
    optim = JointOptim(torch.optim.SGD, {"lr": 0.1}, parameters={"p0": named["p0"]})
    optim([named["p1"]])
    optim.set_lr(0.25)
    assert [group["lr"] for group in optim.optimizer.param_groups] == [0.25, 0.25]
    with pytest.raises(ValueError, match=f"lr must be a finite number of at least 0, got {lr}"):
        optim.set_lr(lr)


# --- on flat vectors ---


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_steps_on_flat_vectors_are_those_of_the_optimiser(kind):
    own = list(parameters().values())
    twins, memory = copies(own), [p.data_ptr() for p in own]
    optimizer, reference = (kind(params, lr=0.1, weight_decay=0.1) for params in (own, twins))
    flat = None
    for _ in range(4):
        set_gradients(own)
        set_gradients(twins)
        if flat is not None:
            flat.gather()
        (flat.optimizer if flat else optimizer).step()
        reference.step()
        flat = flat or FlatAdam(optimizer)  # from the second step on
        torch.testing.assert_close(own, twins)
        for p, twin in zip(own, twins, strict=True):
            torch.testing.assert_close(dict(optimizer.state[p]), dict(reference.state[twin]))
    assert own[0].data_ptr() not in memory
    flat.close()
    assert [p.data_ptr() for p in own] == memory
    torch.testing.assert_close(own, twins)
