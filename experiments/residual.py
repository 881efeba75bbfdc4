# SPDX-License-Identifier: Apache-2.0
"""Posteriors of networks with BatchNorm, residual branches and attention.

    python experiments/residual.py [--seeds 3] [--data-root ROOT]

A residual network with BatchNorm and a small transformer, on the first training images of
Fashion-MNIST and MNIST: MAP (weight decay by the prior), Bayes by Backprop, IVON, the variational
last layer, and an ensemble of three by MAP. Each draw has its own BatchNorm statistics
(`pyro_bbb.batchnorm_draws`). Settings were chosen on images of the training part that no training
sees (``--scored validation``). Questions, stated before the run:

1. Is no method's accuracy behind MAP's? Are NLL and ECE of each lower?
2. Over several short trainings of each method, is no output constant, and no score NaN?
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
import tyro
from _helpers.images import images, train_and_validation
from _helpers.residual import ResNet, Transformer
from _helpers.run import Data, DataSettings, Run, SeveralSeeds
from _helpers.scores import SCORES, scores
from _helpers.tables import Table, table
from torch import nn

import pyro_bbb as bbb
from pyro_bbb import guides


@dataclass(frozen=True, kw_only=True)
class Method:
    """Posterior of the random weights, and how `pyro_bbb.fit` trains it."""

    guide: Callable[[Any], Any] = bbb.AutoSoftplusNormal
    gain: float = 2**0.5  # of the prior by fan-in
    where: str | None = None  # weights that are random
    temperature: float = 1.0
    warm: float = 0.0  # part of the epochs by MAP before, from which the means start
    draws: int = 16  # for a prediction
    fit: dict[str, Any] = field(default_factory=dict)  # further arguments


MAP = Method(guide=guides.Delta, gain=20**0.5, draws=1)  # a tenth of He's weight decay
RESIDUAL = {
    "MAP": MAP,
    "BBB": Method(temperature=0.1, warm=0.6),
    "IVON": Method(temperature=0.1, warm=0.6, fit={"optimizer": "ivon", "lr": 0.03}),
    "last layer": Method(guide=guides.LastLayer, where="last", draws=100),
    "ensemble of 3": replace(MAP, guide=partial(guides.ensemble, size=3), draws=3),
}
ATTENTION = RESIDUAL | {
    "BBB": Method(temperature=0.1),
    "IVON": Method(temperature=0.03, fit={"optimizer": "ivon", "lr": 0.1}),
}
LR = {ResNet: 0.01, Transformer: 0.003}
PROBLEMS = {
    "Fashion-MNIST, residual": ("fashion_mnist", ResNet, RESIDUAL),
    "Fashion-MNIST, attention": ("fashion_mnist", Transformer, ATTENTION),
    "MNIST, residual": ("mnist", ResNet, RESIDUAL),
}


@dataclass(frozen=True)
class Config(SeveralSeeds, DataSettings):
    """Settings of one run."""

    images: int = 3_000
    """Training images."""
    epochs: int = 16
    """Passes over them."""
    short: int = 1_000
    """Training images of the short trainings, six passes each."""
    short_seeds: int = 10
    """Short trainings of each method, on Fashion-MNIST."""
    problems: tuple[str, ...] = tuple(PROBLEMS)
    """Problems: data set and network."""
    scored: Literal["test", "validation"] = "test"
    """Images that are scored; settings were chosen on validation images."""


def train(network: nn.Module, method: Method, data: Data, epochs: int, seed: int) -> Any:
    """Return a model and its trained guide."""
    lr, prior = LR[type(network)], bbb.priors.FanInNormal(method.gain)
    network = bbb.bayesianize(network, prior, where=method.where)
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=len(data[0]))
    guide, schedule = method.guide(model), bbb.KLSchedule(temperature=method.temperature)
    options = {"lr": lr, "kl_schedule": schedule, "seed": seed, "progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bbb.UndertrainedWarning)  # of short trainings
        bbb.fit(model, guide, data, epochs=epochs, **options | method.fit)
    return model, guide


def one(
    make: type[nn.Module], data: Data, scored: Data, epochs: int, method: Method, seed: int
) -> dict[str, float]:
    """Train a new network, and score its prediction."""
    torch.manual_seed(seed)
    network, begin, warm = make(), time.process_time(), round(method.warm * epochs)
    if warm:
        network = bbb.to_module(*train(network, MAP, data, warm, seed)).train()
    model, guide = train(network, method, data, epochs - warm, seed)
    seconds, draws = time.process_time() - begin, {"num_samples": method.draws, "seed": seed}
    if make is ResNet and method.where is None:
        guide = bbb.batchnorm_draws(model, guide, data[0][:1024], **draws)
    probs, y = bbb.predict(model, guide, scored[0], **draws).probs, scored[1]
    commonest = float(probs.argmax(-1).flatten().bincount().max()) / len(y)
    return scores(probs, y) | {"commonest": commonest, "seconds": seconds}


COLUMNS = (*SCORES, ("seconds", "seconds", 1, 0))


def tables(record: dict[str, Any]) -> list[Table]:
    """Return the scores of every problem, and the worst of the short trainings."""
    results = [table(title, found, COLUMNS) for title, found in record["problems"].items()]
    rows = []
    for problem, method in ((p, m) for p, found in record["short"].items() for m in found):
        seeds = record["short"][problem][method]["seeds"].values()
        accuracies, commonest = zip(*((x["accuracy"], x["commonest"]) for x in seeds), strict=True)
        cells = (f"{100 * x:.1f}" for x in (min(accuracies), max(accuracies), max(commonest)))
        rows.append((f"{problem}, {method}", str(len(accuracies)), *cells))
    names = ("trainings", "lowest accuracy (%)", "highest (%)", "commonest class, at most (%)")
    return [*results, Table(("short trainings", *names), rows)]


def main(config: Config) -> dict[str, Any]:
    """Trains and scores every method, prints the tables and writes the results."""
    if config.smoke:
        config = replace(config, images=64, epochs=2, seeds=1, short=64, short_seeds=1)
        config = replace(config, problems=config.problems[:2])
    short = Run(replace(config, seeds=config.short_seeds), ("problems",))
    run = Run(config, ("problems",))
    record: dict[str, Any] = {"problems": {}, "short": {}}
    for problem in config.problems:
        dataset, make, methods = PROBLEMS[problem]
        get = partial(images, dataset, root=config.data_root, smoke=config.smoke)
        data, valid = train_and_validation(get(train=True), 1 / 12)
        x, y = get(train=False) if config.scored == "test" else valid
        if config.smoke:
            x, y = x[:16], y[:16]
        kinds = [("problems", config.images, config.epochs, len(x), run)]
        kinds += [("short", config.short, 6, 1000, short)] if dataset == "fashion_mnist" else []
        for kind, number, epochs, many, its_run in kinds:
            some = data[0][:number], data[1][:number]
            score = partial(one, make, some, (x[:many], y[:many]), epochs)
            record[kind][problem] = {
                name: its_run.repeat(partial(score, method), kind, problem, name)
                for name, method in methods.items()
            }
    return run.report(__doc__, record, tables(record))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
