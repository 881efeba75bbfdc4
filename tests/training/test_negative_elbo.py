# SPDX-License-Identifier: Apache-2.0
"""`negative_elbo`: what `fit` minimises, as a module; and weights in checkpointed parts."""

import threading

import pytest
import torch
from pyro.distributions import Normal
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroSample
from torch import nn
from torch.utils.checkpoint import checkpoint

import pyro_bbb as bbb
from pyro_bbb._utils.locking import GLOBAL_LOCK
from pyro_bbb.elbo import MinibatchELBO

X, Y = torch.randn(32, 5), torch.arange(32) % 3
GUIDES = ["softplus_normal", "low_rank", "delta", "rank1_ensemble", "ensemble"]
CASES = [
    *((guide, "reparam", None, 1) for guide in GUIDES),
    *(("softplus_normal", name, None, 1) for name in ("local_reparam", "flipout", "stl")),
    ("softplus_normal", "reparam", "mean_field", 1),
    ("softplus_normal", "reparam", None, 3),
    ("ensemble", "reparam", None, 2),
    ("vbll", "reparam", None, 1),
]


def problem(guide="softplus_normal"):
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    network = bbb.bayesianize(layers, where="2" if guide == "vbll" else None)
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=32)
    return model, bbb.guides.make(guide, model)


@pytest.fixture
def steps(monkeypatch):
    """Random states and arguments of the steps of `fit`."""
    seen, run = [], MinibatchELBO.loss_and_grads

    def noted(self, model, guide, *args):
        seen.append((torch.get_rng_state(), args))
        return run(self, model, guide, *args)

    monkeypatch.setattr(MinibatchELBO, "loss_and_grads", noted)
    return seen


@pytest.mark.parametrize(("guide", "estimator", "loss", "particles"), CASES)
def test_it_is_the_loss_of_a_step_of_fit(steps, guide, estimator, loss, particles):
    options = {"estimator": estimator, "loss": loss, "num_particles": particles}
    model, trained = problem(guide)
    sgd = {"optimizer": torch.optim.SGD, "lr": 1e-3, "lr_schedule": "constant"}
    how = {"epochs": 1, "batch_size": 16, "progress": False, **sgd, **options}
    history = bbb.fit(model, trained, (X, Y), **how)
    own, fresh = problem(guide)
    objective = bbb.negative_elbo(own, fresh, **options)
    optimizer = torch.optim.SGD(objective.parameters(), lr=1e-3)
    for (state, (x, y, weight)), expected in zip(steps, history.steps.loss, strict=True):
        torch.set_rng_state(state)
        value = objective(x, y)
        assert value.item() == pytest.approx(expected, rel=1e-6)
        assert objective.parts.kl_weight == weight == 0.5
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    for ours, theirs in ((own, model), (fresh, trained)):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


def test_the_mean_is_by_example_and_the_temperature_weighs_the_kl():
    model, guide = problem("delta")
    losses = {
        name: bbb.negative_elbo(model, guide, **options)(X, Y)
        for name, options in {
            "sum": {},
            "mean": {"reduction": "mean"},
            "cold": {"temperature": 0.0},
        }.items()
    }
    assert losses["mean"].item() == pytest.approx(losses["sum"].item() / 32)
    nll = bbb.negative_elbo(model, guide)
    nll(X, Y)
    assert losses["cold"].item() == pytest.approx(nll.parts.nll)
    weighed = bbb.negative_elbo(model, guide)(X, Y, kl_weight=0.25).item()
    assert weighed == pytest.approx(nll.parts.nll + 0.25 * nll.parts.kl)


def test_each_parameter_is_there_once_and_frozen_ones_stay():
    model, guide = problem()
    module = bbb.adapt(nn.Sequential(nn.Linear(5, 3)), 2)
    model = bbb.BayesianModel(module, bbb.likelihoods.Categorical(), 32)
    objective = bbb.negative_elbo(model, bbb.AutoSoftplusNormal(model))
    trained = [x for x in objective.parameters() if x.requires_grad]
    assert sum(x.numel() for x in trained) == 2 * 2 * 5 + 3 * 2  # loc and rho of A, and B
    objective(X, Y).backward()
    assert all(x.grad is not None for x in trained)
    assert module[0]._parameters["weight"].grad is None


def test_a_stock_guide_works_after_its_first_call():
    model, _ = problem()
    guide = AutoNormal(model)
    guide(X[:2], Y[:2])
    objective = bbb.negative_elbo(model, guide)
    objective(X, Y).backward()
    assert all(x.grad is not None for x in objective.parameters())


# --- gradient checkpointing ---


class Checkpointed(nn.Module):
    """A network whose inner part is computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 8))
        self.last = nn.Linear(8, 3)
        self.run = lambda layer, h: layer(h)

    def forward(self, x):
        return self.last(self.run(self.inner, self.first(x).relu()))


def again(**options):
    return lambda layer, h: checkpoint(layer, h, use_reentrant=False, **options)


def checkpointed(convert, run=None):
    torch.manual_seed(1)
    model = bbb.BayesianModel(convert(Checkpointed()), bbb.likelihoods.Categorical(), 32)
    model.network.run = run(model) if run else model.network.run
    return model, bbb.AutoSoftplusNormal(model, init_rho=0.0)


CONVERT = {"all weights": bbb.bayesianize, "adapters": lambda net: bbb.adapt(net, 2, random="both")}


@pytest.mark.parametrize("convert", CONVERT.values(), ids=CONVERT)
@pytest.mark.parametrize("estimator", ["reparam", "flipout"])
def test_what_is_computed_again_has_the_same_weights_and_noise(convert, estimator):
    losses = []
    for run in (None, lambda model: again(context_fn=model.checkpoint_contexts)):
        model, guide = checkpointed(convert, run)
        options = {"estimator": estimator, "engine": "eager", "progress": False, "seed": 0}
        history = bbb.fit(model, guide, (X, Y), epochs=5, batch_size=16, lr=1e-2, **options)
        losses.append(list(history.steps.loss))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("estimator", ["reparam", "local_reparam", "flipout"])
def test_so_in_a_loop_of_ones_own_where_the_estimator_is_gone(estimator):
    gradients = []
    for run in (None, lambda model: again(context_fn=model.checkpoint_contexts)):
        model, guide = checkpointed(bbb.bayesianize, run)
        objective = bbb.negative_elbo(model, guide, estimator=estimator)
        torch.manual_seed(2)
        first = objective(X, Y)
        (first + objective(X, Y)).backward()  # two passes are under way
        gradients.append([x.grad for x in objective.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_the_second_run_may_be_in_another_thread_of_a_training():
    """The backward pass runs in another thread on a GPU, while `fit` holds the lock."""
    model, _ = checkpointed(bbb.bayesianize)
    second = model.checkpoint_contexts()[1]

    def run():
        with second:
            pass

    thread = threading.Thread(target=run, daemon=True)
    with GLOBAL_LOCK:
        thread.start()
        thread.join(timeout=20)
    assert not thread.is_alive()


def test_without_the_contexts_it_is_an_error():
    model, guide = checkpointed(bbb.bayesianize, lambda model: again())
    with pytest.raises(RuntimeError, match="pass context_fn=model.checkpoint_contexts"):
        bbb.fit(model, guide, (X, Y), epochs=1, engine="eager", progress=False)


def test_a_call_that_raised_leaves_nothing_in_the_next_ones_parts():
    model = bbb.BayesianModel(bbb.BayesianMLP([5, 1]), bbb.likelihoods.Gaussian(1.0), num_data=32)
    objective = bbb.negative_elbo(model, bbb.AutoSoftplusNormal(model))
    with pytest.raises(bbb.NonFiniteError):
        objective(X * 1e30, Y[:, None].float() * 1e30)
    loss = objective(X, Y[:, None].float())
    assert objective.parts.loss == pytest.approx(loss.item())
    with pytest.raises(ValueError, match=r"kl_weight must be a non-negative number, got -1\.0"):
        objective(X, Y[:, None].float(), kl_weight=-1.0)


def test_a_prior_that_is_set_between_two_calls_is_that_of_the_second():
    def kl(prior, second=None):
        model = bbb.BayesianModel(
            bbb.BayesianMLP([5, 3], prior=prior), bbb.likelihoods.Categorical(), num_data=32
        )
        objective = bbb.negative_elbo(model, bbb.AutoSoftplusNormal(model, init_loc=0.1))
        if second is not None:
            objective(X, Y)
            model.network.fc1.weight = PyroSample(second.expand([3, 5]).to_event(2))
            model.network.fc1.bias = PyroSample(second.expand([3]).to_event(1))
        torch.manual_seed(0)
        objective(X, Y)
        return objective.parts.kl

    wide, narrow = Normal(0.0, 1.0), Normal(0.0, 0.01)
    assert kl(wide, narrow) == pytest.approx(kl(narrow)) != kl(wide)
