# SPDX-License-Identifier: Apache-2.0
"""Suites of the paper's networks and of tables: steps, epochs, predictions, fits of estimators."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pyro
import torch
import torch.nn.functional as F
from pyro.infer import Predictive
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, WhiteKernel
from sklearn.neural_network import MLPRegressor
from torch import Tensor

import pyro_bbb as bbb
from _parts.budget import Budget
from _parts.methods import (
    BATCH,
    ESTIMATORS,
    FLOOR,
    LIBRARIES,
    METHODS,
    OURS,
    OURS_GAUSSIAN,
    Work,
    bayesian_torch_network,
    fused_adam,
    guided,
    images,
    metered_steps,
    prepare,
    torch_blue_network,
    training,
)
from _parts.timing import Comparison, Make, Meter, Methods, Take, repeated
from pyro_bbb.sklearn import BayesianRegressor

MANY = 10  # draws of the slower epoch


def steps(budget: Budget, device: str) -> Iterator[Comparison]:
    """Time training steps by width, gradient estimator and draws of the weights."""
    limits: dict[str, Any] = {"seconds": budget.seconds, "min_rounds": budget.min_rounds}
    limits |= {"warmup": 3, "burst": budget.burst, "unseen": budget.unseen}
    first = Work(hidden=budget.widths[0], device=device)
    cases = {
        f"width {hidden}, batch {BATCH}": {
            name: (name, Work(hidden=hidden, device=device)) for name in LIBRARIES
        }
        for hidden in budget.widths
    }
    ours = (FLOOR, OURS, OURS_GAUSSIAN, *ESTIMATORS)
    cases[f"gradient estimators of pyro_bbb, width {first.hidden}"] = {n: (n, first) for n in ours}
    several = {f"{OURS} x {n}": (OURS, replace(first, draws=n)) for n in budget.draws}
    title = f"draws per step, width {first.hidden}, batch {BATCH}"
    cases[title] = {FLOOR: (FLOOR, first)} | several
    makes = {name: partial(training, name) for name in METHODS}
    with Methods(makes, one_process=budget.one_process, device=device) as methods:
        for title, jobs in cases.items():
            yield Comparison("steps", title, FLOOR, *methods.compare(jobs, **limits))


# --- an epoch of fit, and the sum of its steps ---

LOOP, STEPS, FIT = "deterministic loop", "pyro_bbb, sum of its steps", "pyro_bbb.fit"
FIT_MANY = f"pyro_bbb.fit, {MANY} draws per step"
Epoch: TypeAlias = tuple[Work, int]  # one pass over so many examples


def epoch(budget: Budget, device: str) -> Iterator[Comparison]:
    """Time epochs, and the sum of the steps of `fit`."""
    once = Work(hidden=budget.widths[0], device=device), budget.rows
    jobs = {name: (name, once) for name in EPOCHS}
    with Methods(EPOCHS, one_process=budget.one_process, device=device) as methods:
        rounds, absent = methods.compare(jobs, min_rounds=budget.epochs, warmup=0)
    turns = rounds[FIT]  # its steps, and it
    rounds[STEPS] = [[sum(steps)] for *steps, _ in turns]
    rounds[FIT] = [[total] for *_, total in turns]
    title = f"{budget.rows} examples, width {budget.widths[0]}, batch {BATCH}"
    yield Comparison("epoch", title, LOOP, rounds, absent)


def _training_set(rows: int, device: str) -> tuple[Tensor, Tensor]:
    """Load MNIST from ``PYRO_BBB_DATA``, else make random pixels of its shape."""
    if not os.environ.get("PYRO_BBB_DATA"):
        return images(rows, device)
    x, y = bbb.data.load_images("mnist", device=device)
    return x[:rows].flatten(1), y[:rows]


def _fit_epoch(once: Epoch, draws: int = 1) -> Callable[[], Any]:
    work, rows = once
    training(OURS, work)  # loads what a first optimiser has torch import
    x, y = _training_set(rows, work.device)
    model, guide = guided(work, num_data=len(x))
    options: dict[str, Any] = {"batch_size": work.batch, "num_particles": draws}
    return lambda: bbb.fit(model, guide, (x, y), epochs=1, progress=False, **options)


def _epoch_and_its_steps(once: Epoch) -> Take:
    fit = _fit_epoch(once)

    def take(count: int, meter: Meter) -> None:
        for _ in range(count):
            with metered_steps(meter):
                meter(fit)

    return take


def _epoch_of_many(once: Epoch) -> Take:
    return repeated(_fit_epoch(once, MANY))


def _deterministic_epoch(once: Epoch) -> Take:
    work, rows = once
    x, y = _training_set(rows, work.device)
    network = work.network()
    adam = fused_adam(network.parameters(), work.lr)

    def run() -> None:
        for rows in torch.randperm(len(x), device=x.device).split(work.batch):
            adam.zero_grad()
            F.cross_entropy(network(x[rows]), y[rows]).backward()
            adam.step()

    return repeated(run)


EPOCHS: dict[str, Make] = {
    LOOP: _deterministic_epoch,
    FIT: _epoch_and_its_steps,
    FIT_MANY: _epoch_of_many,
}


# --- class probabilities of many posterior draws for few and many inputs ---

PASSES = "{samples} deterministic passes"  # of one network and nothing else
PREDICT, PREDICT_LOCAL = "pyro_bbb.predict", "pyro_bbb.predict, local_reparam"
LONG = 1000  # inputs from which a prediction has its data in the caches soon enough
Predictor: TypeAlias = Callable[[Tensor], Tensor]  # of inputs [n, 784]: probabilities [n, classes]


def predict(budget: Budget, device: str) -> Iterator[Comparison]:
    """Time predictions; the network's width is the first of the steps'."""
    work, samples = Work(hidden=budget.widths[0], device=device), budget.samples
    shown = {name: name.format(samples=samples) for name in PREDICTORS}
    makes = {name: partial(_answers, name) for name in PREDICTORS}
    limits: dict[str, Any] = {"seconds": budget.seconds / 2, "min_rounds": budget.slow_rounds}
    with Methods(makes, one_process=budget.one_process, device=device) as methods:
        for count in budget.predictions:
            again = {} if count >= LONG else {"burst": budget.burst, "unseen": budget.unseen}
            jobs = {shown[name]: (name, (work, samples, count)) for name in PREDICTORS}
            found = methods.compare(jobs, **limits, **again)
            title = f"{count} input{'s' * (count > 1)}, {samples} draws, width {work.hidden}"
            yield Comparison("predict", title, shown[PASSES], *found)


def _answers(name: str, question: tuple[Work, int, int]) -> Take | str:
    """Return a method's predictions, or the reason why it is unavailable."""
    work, samples, count = question
    package, make = PREDICTORS[name]
    x, _ = images(count, work.device)

    def predictions() -> Take:
        predictor = make(work, samples)
        with torch.no_grad():
            predictor(x[:1])  # whether it runs at all
        return repeated(torch.no_grad()(lambda: predictor(x)))

    return prepare(package, predictions)


def _mean(outputs: Iterable[Tensor]) -> Tensor:
    return torch.stack([each.softmax(-1) for each in outputs]).mean(0)


def _passes(work: Work, samples: int) -> Predictor:
    network = work.network()
    return lambda x: [network(x) for _ in range(samples)][-1]


def _networks(work: Work, samples: int) -> Predictor:
    networks = [work.network() for _ in range(samples)]
    return lambda x: _mean(network(x) for network in networks)


def _ours(work: Work, samples: int, **options: Any) -> Predictor:
    predict: Any = partial(bbb.predict, *guided(work), num_samples=samples, **options)
    return lambda x: predict(x).probs


def _torch_blue(work: Work, samples: int, *, log_probs: bool) -> Predictor:
    network: Any = torch_blue_network(work)
    network.return_log_probs = log_probs  # without them it may draw outputs instead of weights
    return lambda x: network(x, samples=samples).softmax(-1).mean(0)


def _bayesian_torch(work: Work, samples: int) -> Predictor:
    network = bayesian_torch_network(work, "Reparameterization")
    return lambda x: _mean(network(x)[0] for _ in range(samples))


def _predictive(work: Work, samples: int) -> Predictor:
    model, guide = guided(work)

    def logits(x: Tensor) -> Tensor:
        return pyro.deterministic("logits", model.network(x), event_dim=1)

    predictive = Predictive(logits, guide=guide, num_samples=samples, return_sites=("logits",))
    return lambda x: predictive(x)["logits"].softmax(-1).mean(0)


PREDICTORS: dict[str, tuple[str | None, Callable[[Work, int], Predictor]]] = {
    PASSES: (None, _passes),
    PREDICT: (None, _ours),
    PREDICT_LOCAL: (None, partial(_ours, estimator="local_reparam")),
    "{samples} ordinary networks in a loop": (None, _networks),
    "torch_blue": ("torch_blue", partial(_torch_blue, log_probs=True)),
    "torch_blue, outputs drawn": ("torch_blue", partial(_torch_blue, log_probs=False)),
    "bayesian-torch in a loop": ("bayesian-torch", _bayesian_torch),
    "Pyro's Predictive": (None, _predictive),
}


# --- whole fits of estimators, with their default settings ---

BOOSTING, MLP, PROCESS = (
    "HistGradientBoostingRegressor",
    "MLPRegressor",
    "GaussianProcessRegressor",
)
LIMITS = {MLP: 10_000, PROCESS: 1000}  # rows; more take minutes


def _fits(estimator: Any, rows: int) -> Take:
    """Fit a table of ten columns with a nonlinear target and noise."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 10))
    signal = np.sin(x[:, 0]) * x[:, 1] + 0.3 * x[:, 2] ** 2
    y = signal + 0.3 * rng.normal(size=rows)

    def run() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            estimator.fit(x, y)

    return repeated(run)


def tables(budget: Budget, device: str) -> Iterator[Comparison]:
    """Time fits of estimators to tables."""
    kernel = RBF(np.ones(10)) + WhiteKernel()
    process = GaussianProcessRegressor(kernel, normalize_y=True, random_state=0)
    makes: dict[str, Make] = {
        BOOSTING: partial(_fits, HistGradientBoostingRegressor(random_state=0)),
        "BayesianRegressor": partial(
            _fits, BayesianRegressor(epochs=budget.table_epochs, random_state=0)
        ),
        MLP: partial(_fits, MLPRegressor(hidden_layer_sizes=(50,), random_state=0)),
        PROCESS: partial(_fits, process),
    }
    with Methods(makes, one_process=budget.one_process) as methods:
        for rows in budget.table_rows:
            jobs = {name: (name, rows) for name in makes if rows <= LIMITS.get(name, rows)}
            found = methods.compare(jobs, min_rounds=budget.small_rounds)
            yield Comparison("tables", f"a fit of {rows} rows, 10 columns", BOOSTING, *found)
