# SPDX-License-Identifier: Apache-2.0
"""Steps captured once and replayed: the same run as operation by operation, for all training.

A CPU replays a list of operations. Where a GPU would replay a graph, these tests run the function
that it is captured from, and forbid it to read a number.
"""

import copy
import math
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

import pyro_bbb as bbb
from pyro_bbb import likelihoods
from pyro_bbb.training import _captured, _fit

READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_linalg_check_errors"}
SERIES = ("loss", "kl", "log_prior", "log_guide", "nll", "kl_weight", "lr")
MIXTURE = partial(bbb.ScaleMixtureNormal, 0.5, 1.0, math.exp(-3))
pytestmark = pytest.mark.filterwarnings("ignore::pyro_bbb.UndertrainedWarning")


class NoReading(TorchDispatchMode):
    """Raises where a GPU would have to wait for the host, or the host for it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(
            getattr(x, "dtype", None) in (torch.bool, torch.uint8) for x in tree_leaves(args[1:])
        )
        from_host = name == "lift_fresh" and args[0].numel() > 0
        if name in READS or by_mask or from_host:
            raise AssertionError(f"{name} inside the captured step")
        return func(*args, **(kwargs or {}))


class OnTheCPU:
    """Runs what a GPU would, and keeps what it is to capture; a replay may read no number."""

    asynchronous, warm_up = True, 3

    def __init__(self):
        self.runs, self.replays = 0, 0

    def run(self, step):
        self.runs += 1
        step()

    def capture(self, step, *tensors):
        return partial(self.replay, step)

    def replay(self, step):
        self.replays += 1
        with NoReading():
            step()


def use(monkeypatch, device):
    monkeypatch.setattr(_fit, "capture_device", lambda *_: device)
    return device


@pytest.fixture
def graph(monkeypatch):
    return use(monkeypatch, OnTheCPU())


@pytest.fixture
def captured(monkeypatch):
    """One entry for each step that was captured on the CPU."""
    done, capture = [], _captured.TracingDevice.capture

    def watched(self, *step):
        run = capture(self, *step)
        done.append(run)
        return run

    monkeypatch.setattr(_captured.TracingDevice, "capture", watched)
    return done


def make(likelihood=None, *, prior=None, layers=None, outputs=1, guide=bbb.AutoSoftplusNormal):
    pyro.set_rng_seed(0)
    prior = prior() if prior else dist.Normal(0.0, 1.0)
    layers = (
        layers() if layers else nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, outputs))
    )
    likelihood = likelihood() if likelihood else likelihoods.Gaussian(0.5)
    model = bbb.BayesianModel(bbb.bayesianize(layers, prior), likelihood, num_data=40)
    return model, guide(model)


def data():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    return x.to(torch.get_default_dtype()), x.sum(1).to(torch.get_default_dtype())


def labels():
    return data()[0], torch.arange(40) % 2


def fit(modules, pairs=None, **options):
    """Three steps an epoch, the last of them of fewer examples."""
    options = {"epochs": 3, "batch_size": 16, "seed": 1, "lr": 0.01, "progress": False, **options}
    return bbb.fit(*modules, pairs or data(), **options)


def state(modules):
    """Parameters and buffers by name."""
    named = [(*module.named_parameters(), *module.named_buffers()) for module in modules]
    return {f"{i}.{name}": x for i, tensors in enumerate(named) for name, x in tensors}


def run(build, pairs=None, **options):
    """State, record and random state after a run."""
    torch.manual_seed(2)
    modules = build()
    history = fit(modules, pairs, **options)
    return state(modules), history, torch.rand(3)


def assert_same(first, second, rel):
    (before, history, random), (after, twin, same_random) = first, second
    for a, b in ((history, twin), (history.steps, twin.steps)):
        for name in SERIES:
            assert getattr(a, name) == pytest.approx(getattr(b, name), rel=rel), name
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(value, after[name], rtol=10 * rel, atol=rel)
    assert torch.equal(random, same_random)


def assert_captured_as_eager(build, *, rel=1e-6, pairs=None, **options):
    runs = (run(build, pairs, engine=engine, **options) for engine in ("eager", "compiled"))
    assert_same(*runs, rel)


# --- the same run ---


def batch_norm():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))


def guide(name, **options):
    return {"guide": partial(bbb.guides.make, name, **options)}


def pruned(model):
    return bbb.prune(bbb.AutoSoftplusNormal(model), 0.5)


COOLING = bbb.KLSchedule(
    temperature=0.5, initial_temperature=2.0, cooling_epochs=2, warmup_epochs=2
)
OBJECTIVES = {
    f"{loss}, {estimator}": {"loss": loss, "estimator": estimator, "num_particles": (1, 3)[i % 2]}
    for i, (loss, estimator) in enumerate(
        (loss, estimator)
        for loss in ("trace", "mean_field")
        for estimator in ("reparam", "local_reparam", "stl", "flipout")
    )
}
OPTIONS = {
    "schedules": {"kl_schedule": COOLING},
    "no weight": {"kl_schedule": lambda i, m: 1.0 if i == 1 else 0.0},
    "AdamW": {"optimizer": partial(torch.optim.AdamW, weight_decay=0.1)},
    "amsgrad": {"optimizer": partial(torch.optim.Adam, amsgrad=True)},
    "early stop": {"callbacks": [lambda event: event.epoch == 1]},
    "one batch": {"batch_size": 64},
}
MODELS = {
    "learned prior": {"prior": bbb.priors.LearnedScaleMixture},
    "latent scales": {"prior": partial(bbb.priors.HierarchicalNormal, dist.HalfNormal(1.0))},
    "learned noise": {"likelihood": partial(likelihoods.Gaussian.learned, 2.0)},
    "batch norm": {"layers": batch_norm},
    "categorical": {"likelihood": likelihoods.Categorical, "outputs": 2},
    "poisson": {"likelihood": likelihoods.Poisson},
    "ensemble": guide("ensemble", size=2),
    "ensemble of Normals": guide("ensemble", size=3, guide="softplus_normal"),
    "points": guide("delta"),
    "flow": guide("flow"),
    "stock guide": {"guide": pyro.infer.autoguide.AutoNormal},
    "pruned": {"guide": pruned},
}
CASES = {
    **{name: ({"prior": MIXTURE}, options) for name, options in OBJECTIVES.items()},
    **{name: ({}, options) for name, options in OPTIONS.items()},
    **{name: (make_options, {}) for name, make_options in MODELS.items()},
    "ensemble by layer": (
        MODELS["ensemble of Normals"],
        {"estimator": "local_reparam", "num_particles": 2},
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("double")
def test_a_captured_run_is_the_eager_one(monkeypatch, captured, name):
    make_options, options = CASES[name]
    build = partial(make, **make_options)
    pairs = labels() if name in ("categorical", "poisson") else None
    eager = run(build, pairs, engine="eager", **options)
    assert_same(eager, run(build, pairs, engine="compiled", **options), rel=1e-10)
    assert len(captured) == (1 if name == "one batch" else 2)  # and the smaller last minibatch
    graph = use(monkeypatch, OnTheCPU())
    as_graph = run(build, pairs, cuda_graph=True, **options)
    assert_same(eager, as_graph, rel=1e-12)
    assert graph.runs == 3 * len(captured) and graph.replays == len(eager[1].steps)


def test_so_it_is_in_lower_precision(captured):
    assert_captured_as_eager(make, autocast=torch.bfloat16)
    assert captured


@pytest.mark.parametrize("where", [None, "3"])
def test_so_it_is_where_the_first_layer_is_a_convolution(captured, where):
    """Nobody needs the gradient of its input, which is None among the results of the operation."""
    pairs = torch.randn(40, 1, 4, 4), torch.arange(40) % 2
    layers = nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)

    def build():
        network = bbb.bayesianize(nn.Sequential(*copy.deepcopy(layers)), where=where)
        model = bbb.BayesianModel(network, likelihoods.Categorical(), num_data=40)
        return model, bbb.AutoSoftplusNormal(model, init_loc=0.1)

    assert_captured_as_eager(build, pairs=pairs)
    assert captured


class Drawing(nn.Module):
    """Draws a number that it does not use."""

    def forward(self, x):
        torch.rand(())
        return x


def with_layer(layer):
    return lambda: nn.Sequential(layer(), nn.Linear(3, 8), nn.Linear(8, 1))


def student():
    return likelihoods.StudentT(4.0, 0.3)


@pytest.mark.parametrize("parts", [{"layers": with_layer(Drawing)}, {"likelihood": student}])
def test_so_it_is_where_a_draw_is_not_used_or_a_number_made(captured, parts):
    assert_captured_as_eager(partial(make, **parts))
    assert captured


# --- what is not captured ---


class Counting(nn.Module):
    """Scales by what it counts, as a schedule inside a network would."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


class Noting(nn.Module):
    """Keeps what it has seen, as one looks into a network."""

    def __init__(self):
        super().__init__()
        self.seen, self.last = [], {}

    def forward(self, x):
        self.seen.append(x.detach().mean())
        self.last[len(self.seen)] = x.shape
        return x


class Branching(nn.Module):
    def forward(self, x):
        return 2 * x if x.sum() > 0 else 3 * x


class Hidden(nn.Module):
    """Reads numbers in a way that a trace cannot see."""

    def forward(self, x):
        return x * float(x.detach().numpy().max())


@pytest.mark.parametrize("layer", [Counting, Branching, Hidden])
def test_a_step_that_cannot_be_repeated_runs_as_it_is(captured, layer):
    assert_captured_as_eager(partial(make, layers=with_layer(layer)))
    assert not captured


def test_such_attempts_leave_no_trace():
    seen = []
    for engine in ("eager", "compiled"):
        layer = Noting()
        fit(make(layers=with_layer(lambda layer=layer: layer)), engine=engine)
        seen.append([len(layer.seen), [*layer.last]])
    assert seen[0] == seen[1]


def test_what_no_capture_serves_runs_eagerly(captured):
    for options in (
        {"optimizer": torch.optim.SGD, "lr": 1e-4},
        {"optimizer": pyro.optim.Adam({"lr": 0.01})},
        {"accumulate": 2},
        {"pairs": DataLoader(TensorDataset(*data()), 16)},
    ):
        assert_captured_as_eager(make, **options)
    assert not captured


def test_auto_captures_long_runs_without_callbacks(monkeypatch, captured):
    fit(make())
    assert not captured
    monkeypatch.setattr(_captured, "_WORTH_IT", 9)
    fit(make(), callbacks=[lambda event: None])
    fit(make(), engine="eager")
    assert not captured
    fit(make())
    assert len(captured) == 2


# --- CUDA graphs ---


def test_what_no_graph_could_repeat_is_refused():
    model, guide = make()
    loader = DataLoader(TensorDataset(*data()), 16)
    for modules, pairs, options, message in (
        ((model, guide), None, {}, "a CUDA device, got cpu"),
        ((model, lambda *_: None), None, {}, "a guide that is a module"),
        ((model, guide), loader, {}, "data in memory.*got a DataLoader"),
        ((model, guide), None, {"optimizer": pyro.optim.Adam({})}, "a torch.*got a PyroOptim"),
        ((model, guide), None, {"nonfinite": "skip"}, "nonfinite='raise'"),
        ((model, guide), None, {"accumulate": 2}, "accumulate=1"),
        ((model, guide), None, {"engine": "eager"}, "an engine other than 'eager'"),
    ):
        with pytest.raises(ValueError, match=f"cuda_graph=True needs {message}"):
            fit(modules, pairs, cuda_graph=True, **options)


def test_an_optimiser_that_cannot_skip_a_step_is_refused(graph):
    with pytest.raises(ValueError, match="needs Adam or AdamW.*got optimizer SGD"):
        fit(make(), cuda_graph=True, optimizer=torch.optim.SGD)


class Uncapturable(OnTheCPU):
    def capture(self, step, *tensors):
        raise RuntimeError("operation not permitted when stream is capturing")


def test_a_capture_that_fails_says_why_and_leaves_no_trace(monkeypatch):
    use(monkeypatch, Uncapturable())
    modules = make(layers=batch_norm)
    before = {name: x.clone() for name, x in state(modules).items()}
    with pytest.raises(RuntimeError, match=r"no \.item\(\).*The capture failed: operation not"):
        fit(modules, cuda_graph=True)
    assert all(torch.equal(x, before[name]) for name, x in state(modules).items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_captured_run_is_the_ordinary_one():
    build = partial(make, prior=MIXTURE)
    losses = [
        fit(build(), device="cuda", engine="eager", cuda_graph=False).steps.loss,
        fit(build(), device="cuda", cuda_graph=True).steps.loss,
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
