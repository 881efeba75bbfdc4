# SPDX-License-Identifier: Apache-2.0
"""Prediction suite: class probabilities of many posterior draws for few and many inputs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import pyro
import torch
from pyro.infer import Predictive
from torch import Tensor

import pyro_bbb as bbb
from _parts.budget import Budget
from _parts.isolated_workers import Entry, compare, start_workers
from _parts.other_libraries import bayesian_torch_network, torch_blue_network
from _parts.pyro_methods import guided
from _parts.tasks import Work, images, prepare
from _parts.timing import Comparison, Take, repeated

FLOOR = "{samples} deterministic passes"  # of one network and nothing else
OURS = "pyro_bbb.predict"
LOCAL = "pyro_bbb.predict, local_reparam"
LONG = 1000  # inputs from which a prediction has its data in the caches soon enough
Predictor: TypeAlias = Callable[[Tensor], Tensor]  # of inputs [n, ...]: probabilities [n, classes]


@dataclass(frozen=True)
class Question:
    """Prediction of a number of inputs by a number of draws."""

    work: Work
    samples: int
    """Draws of the weights."""
    count: int
    """Inputs."""

    @property
    def device(self) -> str:
        """Device of the prediction."""
        return self.work.device


def predict(budget: Budget, device: str) -> list[Comparison]:
    """Time predictions of all methods, each in a process of its own.

    The network's width is the first of the steps'.
    """
    work, samples = Work(hidden=budget.widths[0], device=device), budget.samples
    shown = {name: name.format(samples=samples) for name in PREDICTORS}
    makes = {name: partial(_answers, name) for name in PREDICTORS}
    limits: dict[str, Any] = {"seconds": budget.seconds / 2, "min_rounds": budget.slow_rounds}
    comparisons = []
    with start_workers(makes, one_process=budget.one_process) as workers:
        for count in budget.predictions:
            again = {} if count >= LONG else {"burst": budget.burst, "unseen": budget.unseen}
            question = Question(work, samples, count)
            entries = {shown[name]: Entry(name, question, **again) for name in PREDICTORS}
            found = compare(entries, workers, **limits, warmup=1)
            title = f"{count} input{'s' * (count > 1)}, {samples} draws, width {work.hidden}"
            comparisons.append(Comparison("predict", title, shown[FLOOR], *found))
    return comparisons


def _answers(name: str, question: Question) -> Take | str:
    """Return a method's predictions, or the reason why it is unavailable."""
    package, make = PREDICTORS[name]
    predictor = prepare(package, lambda: make(question.work, question.samples))
    if isinstance(predictor, str):
        return predictor
    x, _ = images(question.count, device=question.device)
    return repeated(_without_gradients(predictor, x))


def _without_gradients(predictor: Predictor, x: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.no_grad():
            return predictor(x)

    return run


def _passes(work: Work, samples: int) -> Predictor:
    network = work.network()

    def run(x: Tensor) -> Tensor:
        for _ in range(samples):
            outputs = network(x)
        return outputs

    return run


def _networks(work: Work, samples: int) -> Predictor:
    networks = [work.network() for _ in range(samples)]
    return lambda x: _mean(network(x) for network in networks)


def _mean(outputs: Iterator[Tensor]) -> Tensor:
    return torch.stack([each.softmax(-1) for each in outputs]).mean(0)


def _ours(work: Work, samples: int, **options: Any) -> Predictor:
    model, guide = guided(work)

    def run(x: Tensor) -> Tensor:
        prediction: Any = bbb.predict(model, guide, x, num_samples=samples, **options)
        probs: Tensor = prediction.probs
        return probs

    return run


def _torch_blue(work: Work, samples: int, *, log_probs: bool) -> Predictor:
    network: Any = torch_blue_network(work)
    network.return_log_probs = log_probs  # without them it may draw outputs instead of weights
    network(images(1, device=work.device)[0], samples=1)  # whether it runs at all
    return lambda x: network(x, samples=samples).softmax(-1).mean(0)


def _bayesian_torch(work: Work, samples: int) -> Predictor:
    network = bayesian_torch_network(work, "Reparameterization")
    network(images(1, device=work.device)[0])  # whether it runs at all
    return lambda x: _mean(network(x)[0] for _ in range(samples))


def _predictive(work: Work, samples: int) -> Predictor:
    model, guide = guided(work)

    def logits(x: Tensor) -> Tensor:
        return pyro.deterministic("logits", model.network(x), event_dim=1)

    predictive = Predictive(logits, guide=guide, num_samples=samples, return_sites=("logits",))
    return lambda x: predictive(x)["logits"].softmax(-1).mean(0)


PREDICTORS: dict[str, tuple[str | None, Callable[[Work, int], Predictor]]] = {
    FLOOR: (None, _passes),
    OURS: (None, _ours),
    LOCAL: (None, partial(_ours, estimator="local_reparam")),
    "{samples} ordinary networks in a loop": (None, _networks),
    "torch_blue": ("torch_blue", partial(_torch_blue, log_probs=True)),
    "torch_blue, outputs drawn": ("torch_blue", partial(_torch_blue, log_probs=False)),
    "bayesian-torch in a loop": ("bayesian-torch", _bayesian_torch),
    "Pyro's Predictive": (None, _predictive),
}
