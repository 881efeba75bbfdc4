# SPDX-License-Identifier: Apache-2.0
"""A loss or gradient that is not finite: no parameter moves; the step is named or skipped."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_bbb as bbb
from pyro_bbb import NonFiniteError, likelihoods
from pyro_bbb.training import _fit, _step
from tests.training.test_captured import OnTheCPU

pytestmark = pytest.mark.filterwarnings("ignore:targets have mean")
X = torch.sin(torch.arange(120.0).view(40, 3) ** 2)
Y = X.sum(1)


class Poisoned(likelihoods.Gaussian):
    """Loss or gradient is not finite at the given uses in training, from 1."""

    def __init__(self, what="loss", uses=()):
        super().__init__(0.5)
        self.what, self._uses, self.count = what, tuple(uses), 0

    def arguments(self, outputs):
        arguments = super().arguments(outputs)
        if outputs.requires_grad:
            self.count += 1
            if self.count in self._uses:
                if self.what == "loss":
                    return arguments | {"loc": arguments["loc"] * math.nan}
                arguments["loc"].register_hook(lambda grad: grad * math.inf)
        return arguments


class NaNLoss(likelihoods.Gaussian):
    """The loss is NaN in a step that has an example with a target above 100."""

    def prepare(self, y, outputs):
        y = super().prepare(y, outputs)
        return torch.where(y > 100, math.nan, y) if torch.is_grad_enabled() else y


class InfiniteLoss(likelihoods.Gaussian):
    """There the loss is infinite, though its gradient is not."""

    class family(dist.Normal):
        def log_prob(self, value):
            return super().log_prob(value) - torch.where(value > 100, math.inf, 0.0)


class InfiniteGradient(likelihoods.Gaussian):
    """The gradient is not finite at all."""

    def arguments(self, outputs):
        arguments = super().arguments(outputs)
        if outputs.requires_grad:  # a root at 0: finite, of infinite slope
            arguments["loc"] = arguments["loc"] + 0 * (outputs - outputs.detach()).abs().sqrt()
        return arguments


def plain():
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))


def batch_norm():
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 1))


def make(likelihood, layers=plain):
    pyro.set_rng_seed(0)
    network = bbb.bayesianize(layers(), dist.Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, likelihood, num_data=40)
    return model, bbb.AutoSoftplusNormal(model)


def poisoned(what="loss", uses=(5,), **options):
    return make(Poisoned(what, uses), **options)


def fit(pair, y=Y, **options):
    """Four epochs of three steps, the last of them of fewer examples."""
    options = {"epochs": 4, "batch_size": 16, "lr": 0.01, "progress": False, "seed": 1, **options}
    return bbb.fit(*pair, (X, y), **options)


def state(modules):
    """Parameters and buffers."""
    return [value.detach().clone() for module in modules for value in module.state_dict().values()]


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


# --- stopped ---


@pytest.fixture
def seen(monkeypatch):
    """State before and after each step that is taken or tried: parameters, buffers, moments."""
    seen, real = [], _step.StepRunner.step

    def whole(runner):
        moments = [
            x for entry in runner.optim.get_state()["state"].values() for x in entry.values()
        ]
        return [*state(runner.modules), *(x.clone() for x in moments)]

    def watched(self, parts, lr):
        before = whole(self)
        try:
            real(self, parts, lr)
        finally:
            seen.append((before, whole(self)))

    monkeypatch.setattr(_step.StepRunner, "step", watched)
    return seen


@pytest.mark.parametrize(
    ("what", "names"), [("loss", "obs;"), ("gradient", "locs.network.0.weight, ")]
)
def test_training_stops_at_the_step_with_the_last_good_state(seen, what, names):
    calm = fit(poisoned(uses=(), layers=batch_norm))
    pair = poisoned(what, (5,), layers=batch_norm)
    with pytest.raises(
        NonFiniteError, match=f"{what} is not finite at step 5 in {names}"
    ) as caught:
        fit(pair)
    error = caught.value
    assert (error.what, error.step) == (what, 5) and same(*seen[-1])
    assert error.history.steps.loss == calm.steps.loss[:4]
    assert error.history.loss == calm.loss[:1]
    assert all(parameter.grad is None for module in pair for parameter in module.parameters())
    assert all(map(math.isfinite, fit(pair).loss))  # it can go on


# --- skipped ---


@pytest.mark.parametrize("num_particles", [1, 2])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_such_a_step_is_skipped_and_counted(seen, what, num_particles):
    """The second of two draws, one by one, is bad; the first has left a gradient."""
    pair = poisoned(what, (6,), layers=batch_norm)
    history = fit(pair, nonfinite="skip", num_particles=num_particles, estimator="flipout")
    skipped = 6 // num_particles
    assert history.skipped == [skipped]
    assert len(history) == 4 and len(history.steps) == 11
    assert all(map(math.isfinite, [*history.steps.loss, *history.loss]))
    for number, (before, after) in enumerate(seen, start=1):
        assert same(before, after) == (number == skipped)


def test_what_a_skipped_step_computed_is_in_no_later_one():
    """Losses and gradients are those of a calm run, for tiny steps and one batch."""
    options = {"batch_size": 40, "num_particles": 2, "estimator": "flipout", "lr": 1e-30}
    gradients, losses = [], []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            gradients[-1].append(self.param_groups[0]["params"][0].grad.clone())

    for uses in ((), (4,)):  # in the second of four steps
        gradients.append([])
        history = fit(poisoned("loss", uses), nonfinite="skip", optimizer=Watched, **options)
        losses.append(history.steps.loss)
    assert losses[0][:1] + losses[0][2:] == losses[1]
    assert same(gradients[0][:1] + gradients[0][2:], gradients[1])


def test_skipped_steps_go_through_a_checkpoint(tmp_path):
    def stop(event):
        if event.epoch == 2:
            raise InterruptedError

    calm = fit(poisoned(), nonfinite="skip")
    with pytest.raises(InterruptedError):
        fit(poisoned(), checkpoint=tmp_path, nonfinite="skip", callbacks=[stop])
    again = fit(poisoned(uses=()), checkpoint=tmp_path, nonfinite="skip")
    assert again.steps == calm.steps and again.skipped == [5]


def test_steps_are_not_skipped_for_ever():
    pair = poisoned(uses=range(5, 1000))
    with pytest.raises(NonFiniteError, match="at step 105") as caught:
        fit(pair, nonfinite="skip", epochs=1000)
    assert caught.value.__notes__ == ["100 steps before it were skipped in a row."]
    assert caught.value.history.skipped == list(range(5, 105))
    assert all(value.isfinite().all() for value in state(pair))


def test_an_epoch_without_a_step_has_no_numbers():
    history = fit(poisoned(uses=(4, 5, 6)), nonfinite="skip")
    assert [math.isnan(value) for value in history.loss] == [False, True, False, False]
    assert history.skipped == [4, 5, 6] and len(history.seconds) == 4


# --- captured ---


def with_outlier(place):
    """Targets of which the one at a place in the first epoch's order is above 100."""
    pyro.set_rng_seed(1)  # that of `fit`
    order = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    y = Y.clone()
    y[torch.randperm(40, generator=order)[place]] = 1e3
    return y


@pytest.mark.parametrize(("kind", "place", "step"), [(NaNLoss, 16, 2), (InfiniteLoss, 39, 3)])
def test_captured_steps_stop_as_eager_ones_do(monkeypatch, kind, place, step):
    """The outlier is in the second minibatch of the first epoch, or in the last, smaller one."""
    results, y = {}, with_outlier(place)
    for engine in ("eager", "compiled", "graph"):
        pair = make(kind(0.5))
        if engine == "graph":
            monkeypatch.setattr(_fit, "capture_device", lambda *_: OnTheCPU())
        options = {"cuda_graph": True} if engine == "graph" else {"engine": engine}
        with pytest.raises(
            NonFiniteError, match=f"loss is not finite at step {step} in "
        ) as caught:
            fit(pair, y, **options)
        assert all(parameter.grad is None for parameter in pair[1].parameters())
        assert len(caught.value.history) == 0
        results[engine] = caught.value.history.steps.loss, state(pair)
        assert all(map(math.isfinite, fit(pair, **options).loss))
    for losses, end in results.values():
        assert losses == pytest.approx(results["eager"][0], rel=1e-6) and len(losses) == step - 1
        torch.testing.assert_close(end, results["eager"][1])


def test_in_a_graph_a_gradient_that_is_not_finite_moves_no_parameter(monkeypatch):
    monkeypatch.setattr(_fit, "capture_device", lambda *_: OnTheCPU())
    pair = make(InfiniteGradient(0.5))
    before = state(pair)
    with pytest.raises(NonFiniteError, match="gradient is not finite at step 1 in the objective"):
        fit(pair, cuda_graph=True)
    assert same(state(pair), before)
    with pytest.raises(ValueError, match="lr must be a finite number of at least 0, got nan"):
        fit(pair, cuda_graph=True, lr_schedule=lambda progress: math.nan)
