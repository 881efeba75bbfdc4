"""Prediction: the class probabilities of many posterior draws, for one input, a few, and many."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pyro
import torch
from _effort import Effort
from _peers import bayesian_torch_network, torch_blue_network
from _pyro import guided
from _timing import Action, Comparison, interleave, repeated, timed
from _work import Work, images, prepare
from pyro.infer import Predictive
from torch import Tensor

import pyro_bbb as bbb

OURS = "pyro_bbb.predict"
LOCAL = "pyro_bbb.predict, local_reparam"
Predictor = Callable[[Tensor], Tensor]  # from inputs [n, ...] to mean probabilities [n, classes]


def floor_of(samples: int) -> str:
    """What the floor is called: so many passes of one network and nothing else."""
    return f"{samples} deterministic passes"


def predict(effort: Effort, device: str) -> list[Comparison]:
    """Predictions of all contenders; the network's width is the first of the steps'."""
    work, samples = Work(hidden=effort.widths[0], device=device), effort.samples
    prepared = {
        floor_of(samples): _passes(work, samples),
        OURS: _ours(work, samples),
        LOCAL: _ours_local(work, samples),
        f"{samples} ordinary networks in a loop": _networks(work, samples),
        "torch_blue": prepare("torch_blue", lambda: _torch_blue(work, samples, True)),
        "torch_blue, outputs drawn": prepare(
            "torch_blue", lambda: _torch_blue(work, samples, False)
        ),
        "bayesian-torch in a loop": prepare(
            "bayesian-torch", lambda: _bayesian_torch(work, samples)
        ),
        "Pyro's Predictive": _predictive(work, samples),
    }
    absent = {name: each for name, each in prepared.items() if isinstance(each, str)}
    return [
        _compare(effort, {n: p for n, p in prepared.items() if callable(p)}, count, device, absent)
        for count in effort.predictions
    ]


def _compare(
    effort: Effort, predictors: dict[str, Any], count: int, device: str, absent: dict[str, str]
) -> Comparison:
    x, _ = images(count, device=device)
    actions = {
        name: Action(timed(repeated(_without_gradients(predictor, x)), device))
        for name, predictor in predictors.items()
    }
    rounds = interleave(
        actions,
        seconds=effort.seconds / 2,
        min_rounds=effort.slow_rounds,
        warmup=1,
    )
    title = f"{count} input{'s' * (count > 1)}, {effort.samples} draws, width {effort.widths[0]}"
    return Comparison("predict", title, floor_of(effort.samples), rounds, absent)


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


def _ours_local(work: Work, samples: int) -> Predictor | str:
    if "estimator" not in inspect.signature(bbb.predict).parameters:
        return "predict takes no estimator"
    return _ours(work, samples, estimator="local_reparam")


def _torch_blue(work: Work, samples: int, log_probs: bool) -> Predictor:
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
