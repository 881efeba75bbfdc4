# SPDX-License-Identifier: Apache-2.0
"""Steps captured once and replayed: the same run as operation by operation, whatever is trained."""

import copy
import math
import warnings
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import pyro_bbb as bbb
from pyro_bbb import likelihoods
from pyro_bbb.training import _captured
from pyro_bbb.training._captured import TracingDevice
from tests.training.test_cuda_graph import (
    LIKELIHOODS,
    MODELS,
    OBJECTIVES,
    OPTIONS,
    data,
    make,
    state,
)

SERIES = ("loss", "kl", "log_prior", "log_guide", "nll", "kl_weight", "lr")


@pytest.fixture
def captured(monkeypatch):
    """One entry for each step that was captured."""
    done, capture = [], TracingDevice.capture

    def watched(self, *step):
        run = capture(self, *step)
        done.append(run)
        return run

    monkeypatch.setattr(TracingDevice, "capture", watched)
    return done


def fit(parts, engine, pairs=None, **options):
    """Three steps an epoch, the last of them of fewer examples."""
    options = {"epochs": 4, "batch_size": 16, "seed": 1, "progress": False, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bbb.UndertrainedWarning)
        return bbb.fit(*parts, data() if pairs is None else pairs, engine=engine, **options)


def assert_same(make_parts, *, rel=1e-6, pairs=None, **options):
    """Losses of every step, parameters, buffers and random state of both engines."""
    pairs = data() if pairs is None else pairs
    runs = []
    for engine in ("eager", "compiled"):
        pyro.set_rng_seed(0)
        parts = make_parts()
        history = fit(parts, engine, pairs, **options)
        runs.append(([state(part) for part in parts], history, torch.rand(3)))
    (before, history, random), (after, other, same_random) = runs
    for record, twin in ((history, other), (history.steps, other.steps)):
        for name in SERIES:
            assert getattr(record, name) == pytest.approx(getattr(twin, name), rel=rel), name
    for one, twin in zip(before, after, strict=True):
        assert one.keys() == twin.keys()
        for name, value in one.items():
            torch.testing.assert_close(value, twin[name], rtol=10 * rel, atol=rel)
    assert torch.equal(random, same_random)


@pytest.mark.parametrize(("loss", "estimator", "num_particles"), OBJECTIVES)
def test_a_captured_run_is_the_eager_one(captured, loss, estimator, num_particles):
    assert_same(make, loss=loss, estimator=estimator, num_particles=num_particles)
    assert len(captured) == 2  # a minibatch, and the smaller last one


@pytest.mark.parametrize("name", OPTIONS)
def test_so_it_is_with_every_option(captured, name):
    torch.set_default_dtype(torch.float64)
    assert_same(make, rel=1e-10, **OPTIONS[name])
    assert captured


def test_so_it_is_in_lower_precision(captured):
    assert_same(make, autocast=torch.bfloat16)
    assert captured


@pytest.mark.parametrize("name", MODELS)
def test_so_it_is_with_every_kind_of_model_and_guide(captured, name):
    assert_same(lambda: make(**MODELS[name]()))
    assert captured


@pytest.mark.parametrize("name", [*LIKELIHOODS, "student"])
def test_so_it_is_with_every_likelihood(name):
    make_one, outputs = {**LIKELIHOODS, "student": (lambda: likelihoods.StudentT(4.0, 0.3), 1)}[
        name
    ]

    def parts():
        model = bbb.BayesianModel(bbb.BayesianMLP([3, 8, outputs]), make_one(), num_data=40)
        return model, bbb.AutoSoftplusNormal(model)

    pairs = torch.randn(40, 3), torch.arange(40) % 2
    assert_same(parts, pairs=pairs)


def test_so_it_is_where_an_operation_gives_no_gradient_of_its_first_argument(captured):
    """A convolution of the inputs has three results backwards, the first of them none."""
    pairs = torch.randn(40, 1, 4, 4), torch.arange(40) % 2
    layers = torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8, 2)

    def parts():
        network = bbb.bayesianize(torch.nn.Sequential(*copy.deepcopy(layers)), where="3")
        model = bbb.BayesianModel(network, likelihoods.Categorical(), num_data=40)
        return model, bbb.AutoSoftplusNormal(model)

    assert_same(parts, pairs=pairs)
    assert captured


class Drawing(torch.nn.Module):
    """Draws a number that it does not use."""

    def forward(self, x):
        torch.rand(())
        return x


def test_so_it_is_where_a_draw_is_not_used(captured):
    layers = [torch.nn.Linear(3, 8), torch.nn.Linear(8, 1)]
    assert_same(lambda: make(layers=torch.nn.Sequential(Drawing(), *copy.deepcopy(layers))))
    assert captured


def test_so_it_is_where_the_first_layer_is_a_convolution(captured):
    """Nobody needs the gradient of its input, which is None among the results of the operation."""
    pairs = torch.rand(40, 1, 6, 6), torch.arange(40) % 3

    def parts():
        layers = torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(32, 3)
        network = bbb.bayesianize(torch.nn.Sequential(*layers), dist.Normal(0.0, 1.0))
        model = bbb.BayesianModel(network, likelihoods.Categorical(), num_data=40)
        return model, bbb.AutoSoftplusNormal(model, init_loc=0.1)

    assert_same(parts, pairs=pairs)
    assert captured


def test_so_it_is_with_the_larger_networks_of_the_paper(captured):
    """Where tensors are not joined, and large ones come from the pool."""
    pairs = torch.rand(40, 784), torch.arange(40) % 10

    def parts():
        network = bbb.BayesianMLP([784, 100, 10], prior=bbb.ScaleMixtureNormal(0.5, 1.0, 0.01))
        model = bbb.BayesianModel(network, likelihoods.Categorical(), num_data=40)
        return model, bbb.AutoSoftplusNormal(model)

    assert_same(parts, pairs=pairs)
    assert len(captured) == 2


# --- what is not captured ---


class Counting(torch.nn.Module):
    """Scales by what it counts, as a schedule inside a network would."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


class Noting(torch.nn.Module):
    """Keeps what it has seen, as one looks into a network."""

    def __init__(self):
        super().__init__()
        self.seen, self.last = [], {}

    def forward(self, x):
        self.seen.append(x.detach().mean())
        self.last[len(self.seen)] = x.shape
        return x


class Branching(torch.nn.Module):
    def forward(self, x):
        return 2 * x if x.sum() > 0 else 3 * x


class Hidden(torch.nn.Module):
    """Reads numbers in a way that a trace cannot see."""

    def forward(self, x):
        return x * float(x.detach().numpy().max())


@pytest.mark.parametrize("layer", [Counting, Noting, Branching, Hidden])
def test_a_step_that_cannot_be_repeated_runs_as_it_is(captured, layer):
    def parts():
        return make(
            layers=torch.nn.Sequential(layer(), torch.nn.Linear(3, 8), torch.nn.Linear(8, 1))
        )

    assert_same(parts)
    assert not captured


def test_such_attempts_leave_no_trace():
    seen = []
    for engine in ("eager", "compiled"):
        layer = Noting()
        layers = torch.nn.Sequential(layer, torch.nn.Linear(3, 8), torch.nn.Linear(8, 1))
        fit(make(layers=layers), engine)
        seen.append([len(layer.seen), [*layer.last]])
    assert seen[0] == seen[1]


def test_what_no_capture_serves_runs_eagerly(captured):
    pyro.set_rng_seed(0)
    pairs = data()
    for options in (
        {"optimizer": torch.optim.SGD},
        {"optimizer": pyro.optim.Adam({"lr": 0.01})},
        {"accumulate": 2},
        {"pairs": DataLoader(TensorDataset(*pairs), 16)},
    ):
        assert_same(make, pairs=options.pop("pairs", pairs), **options)
    assert not captured


def test_auto_captures_long_runs_without_callbacks(monkeypatch, captured):
    fit(make(), "auto")
    assert not captured
    monkeypatch.setattr(_captured, "_WORTH_IT", 12)
    fit(make(), "auto", callbacks=[lambda event: None])
    fit(make(), "eager")
    assert not captured
    fit(make(), "auto")
    assert len(captured) == 2


# --- what is not finite ---


class Poisoned(likelihoods.Gaussian):
    """The loss is NaN where an example has a target above 100."""

    def prepare(self, y, outputs):
        y = super().prepare(y, outputs)
        return torch.where(y > 100, math.nan, y) if torch.is_grad_enabled() else y


@pytest.mark.filterwarnings("ignore:targets have mean")
def test_a_loss_that_is_not_finite_is_found_as_eagerly(captured):
    x, y = data()
    y[7] = 1e3
    found = []
    for engine in ("eager", "compiled"):
        pyro.set_rng_seed(0)
        parts = make(Poisoned(0.5))
        with pytest.raises(bbb.NonFiniteError) as caught:
            fit(parts, engine, (x, y))
        found.append((str(caught.value), caught.value.history.steps.loss, state(parts[1])))
    (message, losses, before), (other, same, after) = found
    assert message == other and losses == pytest.approx(same, rel=1e-6)
    torch.testing.assert_close(before, after)


@pytest.mark.filterwarnings("ignore:targets have mean")
def test_such_steps_are_skipped_as_eagerly(captured):
    x, y = data()
    y[7] = 1e3
    skipped = []
    for engine in ("eager", "compiled"):
        pyro.set_rng_seed(0)
        history = fit(make(Poisoned(0.5)), engine, (x, y), nonfinite="skip")
        skipped.append((history.skipped, history.steps.loss))
    assert skipped[0][0] == skipped[1][0] and len(skipped[0][0]) == 4
    assert skipped[0][1] == pytest.approx(skipped[1][1], rel=1e-6)
    assert captured


@pytest.mark.parametrize("estimator", ["reparam", "local_reparam"])
def test_an_ensemble_is_captured_with_any_estimator(captured, estimator):
    guide = partial(bbb.guides.make, "ensemble", size=3, guide="softplus_normal")
    assert_same(lambda: make(guide=guide), estimator=estimator, num_particles=2)
    assert captured
