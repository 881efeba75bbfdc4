# SPDX-License-Identifier: Apache-2.0
"""The captured training step, all but the capture itself: the same run, and nothing read inside.

Where a GPU would replay a graph, these tests run the function that it is captured from.
"""

import math
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

import pyro_bbb as bbb
from pyro_bbb import likelihoods
from pyro_bbb.training import _fit
from pyro_bbb.training._schedules import cosine
from pyro_bbb.training.objectives import NonFiniteError

READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_linalg_check_errors"}


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
        self.runs, self.replays, self.captured = 0, 0, []

    def run(self, step):
        self.runs += 1
        step()

    def capture(self, step, *tensors):
        self.captured.append(step)
        return partial(self.replay, step)

    def replay(self, step):
        self.replays += 1
        with NoReading():
            step()


@pytest.fixture
def device(monkeypatch):
    device = OnTheCPU()
    monkeypatch.setattr(_fit, "capture_device", lambda *_: device)
    return device


MIXTURE = partial(bbb.ScaleMixtureNormal, 0.5, 1.0, math.exp(-3))


def make(likelihood=None, *, n=40, prior=None, layers=None, guide=bbb.AutoSoftplusNormal):
    prior = prior or dist.Normal(0.0, 1.0)
    network = bbb.bayesianize(layers, prior) if layers else bbb.BayesianMLP([3, 8, 1], prior=prior)
    model = bbb.BayesianModel(network, likelihood or likelihoods.Gaussian(0.5), num_data=n)
    return model, guide(model)


def data(n=40):
    x = torch.randn(n, 3)
    return x, x.sum(1)


def single(progress):
    """The cosine in single precision, in which a captured step has its learning rate."""
    return torch.tensor(cosine(progress), dtype=torch.float32).item()


def fit(model, guide, pairs, **options):
    """Three steps an epoch, the last of them of fewer examples."""
    options = {"epochs": 3, "batch_size": 16, "seed": 1, "progress": False, **options}
    return bbb.fit(model, guide, pairs, lr=2.0**-7, **{"lr_schedule": single, **options})


def both(options, describe=dict):
    """State and history of the ordinary run and of the captured one."""
    pairs, runs = data(), []
    for cuda_graph in (False, True):
        pyro.set_rng_seed(0)
        parts = make(**describe())
        history = fit(*parts, pairs, cuda_graph=cuda_graph, **options)
        runs.append(([state(part) for part in parts], history))
    return runs


def state(module):
    """Parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def assert_same(runs):
    (ordinary, history), (captured, other) = runs
    for before, after in zip(ordinary, captured, strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    for record, twin in ((history, other), (history.steps, other.steps)):
        for name in ("loss", "kl", "log_prior", "log_guide", "nll", "kl_weight", "lr"):
            assert getattr(record, name) == pytest.approx(getattr(twin, name), rel=1e-12), name


# --- the same run ---


# Each pair of loss, estimator and number of particles.
OBJECTIVES = [
    (loss, estimator, (1, 3)[(i + j) % 2])
    for i, loss in enumerate(("trace", "mean_field"))
    for j, estimator in enumerate(("reparam", "local_reparam", "flipout", "stl"))
]


@pytest.mark.parametrize(("loss", "estimator", "num_particles"), OBJECTIVES)
def test_a_captured_run_is_the_ordinary_run_to_the_bit(device, loss, estimator, num_particles):
    options = {"loss": loss, "estimator": estimator, "num_particles": num_particles}
    assert_same(both(options, lambda: {"prior": MIXTURE()}))
    assert len(device.captured) == 2  # of the full minibatches, and of the last of each epoch
    assert device.replays == 6 + 3
    assert device.runs == 2 * 3  # warm-up


OPTIONS = {
    "float64": {},
    "blundell": {"kl_schedule": "blundell"},
    "warm-up": {"kl_schedule": bbb.KLSchedule("uniform", temperature=0.5, warmup_epochs=2)},
    "cooling": {
        "kl_schedule": bbb.KLSchedule(temperature=0.5, initial_temperature=2.0, cooling_epochs=2)
    },
    "no weight": {"kl_schedule": lambda i, m: 1.0 if i == 1 else 0.0},
    "AdamW": {"optimizer": partial(torch.optim.AdamW, weight_decay=0.1)},
    "amsgrad": {"optimizer": partial(torch.optim.Adam, amsgrad=True)},
    "early stop": {"callbacks": [lambda event: event.epoch == 1]},
    "one batch": {"batch_size": 64},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_so_it_is_with_every_option(device, name):
    torch.set_default_dtype(torch.float64)
    runs = both(OPTIONS[name])
    assert_same(runs)
    assert len(runs[1][1]) == (2 if name == "early stop" else 3)


def test_so_it_is_in_lower_precision(device):
    assert_same(both({"autocast": torch.bfloat16}))


def batch_norm():
    return torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
    )


MODELS = {
    "mixture prior": lambda: {"prior": MIXTURE()},
    "learned prior": lambda: {"prior": bbb.priors.LearnedScaleMixture()},
    "latent scales": lambda: {"prior": bbb.priors.HierarchicalNormal(dist.HalfNormal(1.0))},
    "learned noise": lambda: {"likelihood": likelihoods.Gaussian.learned(2.0)},
    "latent noise": lambda: {"likelihood": likelihoods.Gaussian(dist.LogNormal(0.0, 1.0))},
    "batch norm": lambda: {"layers": batch_norm()},
    "ensemble": lambda: {"guide": partial(bbb.guides.make, "ensemble", size=2)},
    "ensemble of Normals": lambda: {
        "guide": partial(bbb.guides.make, "ensemble", size=3, guide="softplus_normal")
    },
    "points": lambda: {"guide": partial(bbb.guides.make, "delta")},
    "normal": lambda: {"guide": partial(bbb.guides.make, "normal")},
    "full rank": lambda: {"guide": partial(bbb.guides.make, "full_rank")},
    "flow": lambda: {"guide": partial(bbb.guides.make, "flow")},
    "stock guide": lambda: {"guide": pyro.infer.autoguide.AutoNormal},
    "pruned": lambda: {"guide": lambda model: bbb.prune(bbb.AutoSoftplusNormal(model), 0.5)},
}


@pytest.mark.parametrize("name", MODELS)
def test_so_it_is_with_every_kind_of_model_and_guide(device, name):
    assert_same(both({}, MODELS[name]))


# --- nothing is read, and nothing moves ---


def test_the_guard_itself_sees_a_number_that_is_read():
    for read in (
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: x[x > 0],
        lambda x: x.equal(x),
        lambda x: x + torch.tensor(1.0),
        lambda x: torch.linalg.cholesky(torch.outer(x, x) + torch.eye(3)),
    ):
        with pytest.raises(AssertionError, match="inside the captured step"), NoReading():
            read(torch.randn(3))


LIKELIHOODS = {
    "categorical": (likelihoods.Categorical, 2),
    "bernoulli": (likelihoods.Bernoulli, 1),
    "heteroscedastic": (likelihoods.HeteroscedasticGaussian, 2),
    "poisson": (likelihoods.Poisson, 1),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_no_number_is_read_with_every_likelihood(device, name):
    likelihood, outputs = LIKELIHOODS[name]
    model = bbb.BayesianModel(bbb.BayesianMLP([3, 8, outputs]), likelihood(), num_data=40)
    pairs = torch.randn(40, 3), torch.arange(40) % 2
    fit(model, bbb.AutoSoftplusNormal(model), pairs, cuda_graph=True)
    assert device.replays == 9


def test_what_reads_numbers_by_itself_is_found_out(device):
    """A tensor made from a number in Student t, the check of a Cholesky root in low rank."""
    for parts in (
        make(likelihoods.StudentT(4.0, 0.3)),
        make(guide=partial(bbb.guides.make, "low_rank")),
    ):
        with pytest.raises(AssertionError, match="inside the captured step"):
            fit(*parts, data(), cuda_graph=True)


# --- what is not finite ---


class Poisoned(likelihoods.Gaussian):
    """The loss is NaN in a step that has an example with a target above 100."""

    def prepare(self, y, outputs):
        y = super().prepare(y, outputs)
        return torch.where(y > 100, math.nan, y) if torch.is_grad_enabled() else y


class Impossible(likelihoods.Gaussian):
    """There the loss is infinite, though its gradient is not."""

    class family(dist.Normal):
        def log_prob(self, value):
            return super().log_prob(value) - torch.where(value > 100, math.inf, 0.0)


class PoisonedGradient(likelihoods.Gaussian):
    def arguments(self, outputs):
        arguments = super().arguments(outputs)
        if outputs.requires_grad:
            # a root at 0: finite, of infinite slope
            arguments["loc"] = arguments["loc"] + 0 * (outputs - outputs.detach()).abs().sqrt()
        return arguments


@pytest.mark.filterwarnings("ignore:targets have mean")
@pytest.mark.parametrize("kind", [Poisoned, Impossible])
@pytest.mark.parametrize(("place", "step"), [(16, 2), (39, 3)])
def test_from_the_step_that_is_not_finite_no_parameter_moves(device, kind, place, step):
    """In the second minibatch of the first epoch, or in its last and uncaptured one."""
    x, y = data()
    healthy = y.clone()
    y[example_at(place, y)] = 1e3
    pyro.set_rng_seed(0)
    model, guide = make(kind(0.5))
    with pytest.raises(NonFiniteError, match=f"loss is not finite at step {step} in the") as caught:
        fit(model, guide, (x, y), cuda_graph=True)
    assert (caught.value.what, caught.value.step) == ("loss", step)
    history = caught.value.history
    assert len(history) == 0 and len(history.steps) == step - 1
    expected, losses = reference(kind, x, y, step - 1)
    assert history.steps.loss == pytest.approx(losses, rel=1e-12)
    assert all(torch.equal(value, expected[name]) for name, value in guide.named_parameters())
    assert all(parameter.grad is None for parameter in guide.parameters())
    assert all(map(math.isfinite, fit(model, guide, (x, healthy), cuda_graph=True).loss))


def example_at(place, y):
    """Which example has a place in the first epoch's order."""
    pyro.set_rng_seed(1)  # that of `fit`
    order = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    return torch.randperm(len(y), generator=order)[place]


def reference(kind, x, y, steps):
    """Parameters and losses after some steps of an ordinary run that fails at the next."""
    pyro.set_rng_seed(0)
    model, guide = make(kind(0.5))
    with pytest.raises(NonFiniteError) as caught:
        fit(model, guide, (x, y))
    assert caught.value.step == steps + 1
    return dict(guide.named_parameters()), caught.value.history.steps.loss


def test_a_gradient_that_is_not_finite_moves_no_parameter(device):
    model, guide = make(PoisonedGradient(0.5))
    before = {name: value.clone() for name, value in guide.named_parameters()}
    with pytest.raises(NonFiniteError, match="gradient is not finite at step 1 in the objective"):
        fit(model, guide, data(), cuda_graph=True)
    assert all(torch.equal(value, before[name]) for name, value in guide.named_parameters())


def test_a_learning_rate_out_of_range_is_refused(device):
    with pytest.raises(ValueError, match="lr must be a finite number of at least 0, got nan"):
        fit(*make(), data(), cuda_graph=True, lr_schedule=lambda progress: math.nan)


# --- what cannot be captured ---


def test_it_needs_a_gpu():
    with pytest.raises(ValueError, match="cuda_graph=True needs a CUDA device, got cpu"):
        fit(*make(), data(), cuda_graph=True)


def test_what_no_graph_could_repeat_is_refused():
    model, guide = make()
    loader = DataLoader(TensorDataset(*data()), 16)
    cases = [
        ((model, lambda *_: None, data()), {}, "a guide that is a module"),
        ((model, guide, loader), {}, "data in memory.*got a DataLoader"),
        ((model, guide, data()), {"optimizer": pyro.optim.Adam({"lr": 0.1})}, "got a PyroOptim"),
    ]
    for args, options, message in cases:
        with pytest.raises(ValueError, match=f"cuda_graph=True needs .*{message}"):
            fit(*args, cuda_graph=True, **options)


def test_an_optimiser_that_cannot_skip_a_step_is_refused(device):
    with pytest.raises(ValueError, match="needs Adam or AdamW.*got optimizer SGD"):
        fit(*make(), data(), cuda_graph=True, optimizer=torch.optim.SGD)


class Uncapturable(OnTheCPU):
    def capture(self, step, *tensors):
        raise RuntimeError("operation not permitted when stream is capturing")


def test_a_capture_that_fails_says_why_and_leaves_no_trace(monkeypatch):
    monkeypatch.setattr(_fit, "capture_device", lambda *_: Uncapturable())
    model, guide = make(layers=batch_norm())
    before = [{k: v.clone() for k, v in state(part).items()} for part in (model, guide)]
    with pytest.raises(RuntimeError, match=r"no \.item\(\).*The capture failed: operation not"):
        fit(model, guide, data(), cuda_graph=True)
    for part, old in zip((model, guide), before, strict=True):
        assert all(torch.equal(state(part)[name], value) for name, value in old.items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_captured_run_is_the_ordinary_one():
    runs = []
    for cuda_graph in (False, True):
        pyro.set_rng_seed(0)
        model, guide = make(prior=MIXTURE())
        pairs = data()
        runs.append(fit(model, guide, pairs, device="cuda", cuda_graph=cuda_graph).steps.loss)
    assert runs[0] == pytest.approx(runs[1], rel=1e-4)
