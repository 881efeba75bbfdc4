# SPDX-License-Identifier: Apache-2.0
"""Ablation of the library's defaults: one change at a time, scored on validation data.

    python experiments/choose_defaults.py [--data-root ROOT]

The defaults (standard Normal prior, He initial means, initial rho -5, learning rate of 32 / steps
that falls along a cosine, temperature 1) are trained, and variants, on scikit-learn's digits, and
on Fashion-MNIST from ``--data-root``, ``$PYRO_BBB_DATA`` or torchvision's download. Every network
is scored on a fifth of the *training* part; no test data are read. Out-of-distribution inputs are
validation images with shuffled pixels for the digits, and MNIST's training images for
Fashion-MNIST.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import joblib
import torch
import tyro
from _helpers import tables as tabulate
from _helpers.images import digits, stratified
from _helpers.run import DataSettings, Picture, Run, SeveralSeeds
from _helpers.scores import scores
from _helpers.tables import Summary, Table
from _helpers.training import uniform_means
from pyro.distributions import Normal
from torch import Tensor

import pyro_bbb as bbb
from pyro_bbb import data, metrics

Scores: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Config(SeveralSeeds, DataSettings):
    """Settings of one run."""

    digits_epochs: int = 100
    """Passes over the digits."""
    fashion_epochs: int = 10
    """Passes over Fashion-MNIST; 0 leaves it out."""
    workers: int = 1
    """Processes, each of one thread; results are the same."""
    samples: int = 30
    """Networks drawn from the posterior for each prediction."""
    output: Path = Path("results/choose_defaults")
    """Folder for results."""


@dataclass(frozen=True)
class Variant:
    """Differences from the defaults."""

    prior: Callable[[], Any] = lambda: Normal(0.0, 1.0)
    guide: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)


COLD = {"kl_schedule": bbb.KLSchedule(temperature=0.1)}


def narrow() -> Any:
    """Return a mixture of a wide and a narrow Normal."""
    return bbb.ScaleMixtureNormal(0.5, 1.0, 0.1)


VARIANTS = {
    "defaults": Variant(),
    "temperature 0.1": Variant(fit=COLD),
    "learning rate 0.001": Variant(fit={"lr": 1e-3}),
    "prior: mixture, sigma 1 and 0.1": Variant(prior=narrow),
    "the same, temperature 0.1": Variant(prior=narrow, fit=COLD),
    "prior: mixture, sigma 1 and e^-6": Variant(
        prior=lambda: bbb.ScaleMixtureNormal(0.5, 1.0, math.exp(-6))
    ),
    "prior: by fan-in": Variant(prior=bbb.priors.FanInNormal),
    "prior: Normal, scale 0.1": Variant(prior=lambda: Normal(0.0, 0.1)),
    "initial rho -3": Variant(guide={"init_rho": -3.0}),
    "initial rho -6": Variant(guide={"init_rho": -6.0}),
    "initial means uniform in +-0.2": Variant(guide={"init_loc": uniform_means(0.2)}),
    "constant learning rate": Variant(fit={"lr_schedule": "constant"}),
}


@dataclass(frozen=True)
class Task:
    """One data set: training and validation parts, out-of-distribution inputs, network, length."""

    train: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    ood: Tensor
    sizes: tuple[int, ...]
    epochs: int


def digits_task(config: Config) -> Task:
    """Return the digits without the quarter that other experiments test on."""
    (x, y), _ = digits()
    train, valid = stratified(x, y, 0.2)
    order = torch.rand(valid[0].shape, generator=torch.Generator().manual_seed(0)).argsort(-1)
    epochs = 1 if config.smoke else config.digits_epochs
    return Task(train, valid, valid[0].gather(-1, order), (64, 100, 100, 10), epochs)


def fashion_task(config: Config) -> Task:
    """Fashion-MNIST's training part; MNIST's is out-of-distribution."""
    x, y = data.load_images("fashion_mnist", root=config.data_root)
    ood, _ = data.load_images("mnist", root=config.data_root)
    train, valid = data.split(x.flatten(1), y, fraction=0.2, seed=1)
    sizes = (784, 400, 400, 10)
    return Task(train, valid, ood[:10_000].flatten(1), sizes, config.fashion_epochs)


def score(task: Task, name: str, config: Config, seed: int) -> Scores:
    """Trains one network and scores its ensemble on the validation part."""
    variant = VARIANTS[name]
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    network = bbb.BayesianMLP(task.sizes, prior=variant.prior())
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=len(task.train[0]))
    guide = bbb.AutoSoftplusNormal(model, **variant.guide)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bbb.UndertrainedWarning)  # the table shows it
        history = bbb.fit(
            model, guide, task.train, epochs=task.epochs, progress=False, seed=seed, **variant.fit
        )
    x, y = task.valid
    inside = bbb.predict(model, guide, x, num_samples=config.samples, seed=config.seed)
    outside = bbb.predict(model, guide, task.ood, num_samples=config.samples, seed=config.seed)
    return scores(inside.probs, y) | {
        "auroc": metrics.auroc(outside.entropy, inside.entropy),
        "neg_elbo": (history.kl[-1] + history.nll[-1]) / len(task.train[0]),
        "baseline": history.baseline_per_example,
        "curve": history.neg_elbo_per_example,
    }


def compare(name: str, task: Task, config: Config, run: Run) -> dict[str, Summary]:
    """Scores of every variant, and their means over the seeds."""
    with joblib.parallel_config(n_jobs=config.workers):
        return {
            variant: run.repeat(partial(score, task, variant, config), name, variant)
            for variant in VARIANTS
        }


def table(name: str, results: dict[str, Summary]) -> Table:
    """One row per variant; with a temperature the baseline is of another ELBO."""
    for variant, figures in results.items():
        if "temperature" in variant:
            figures["mean"].pop("baseline", None)
    columns = [("neg. ELBO (nats)", "neg_elbo", 1, 2), ("data ignored", "baseline", 1, 2)]
    columns += [("accuracy (%)", "accuracy", 100, 2), ("NLL (nats)", "nll", 1, 3)]
    columns += [("ECE (%)", "ece", 100, 2), ("AUROC (%)", "auroc", 100, 1)]
    return tabulate.table(name, results, columns)


def draw_curves(run: Run, results: dict[str, dict[str, Summary]]) -> Picture:
    """Return the negative ELBO in training by two learning rates, and the baseline."""
    panels: dict[str, Any] = {}
    for name, figures in results.items():
        first = {v: next(iter(figures[v]["seeds"].values())) for v in figures}
        curves = {v: first[v]["curve"] for v in ("learning rate 0.001", "defaults")}
        panels[name] = {v: (range(1, len(c) + 1), c) for v, c in curves.items()}
        if (baseline := first["defaults"]["baseline"]) is not None:
            ends = [1, len(curves["defaults"])]
            panels[name]["posterior that ignores data"] = ends, [baseline, baseline]
    caption = "Below the level line the posterior has learned more from the data than it paid for."
    axes = {"xlabel": "epoch", "ylabel": "negative ELBO (nats per example)", "yscale": "log"}
    return run.curves("elbo", caption, panels, **axes)


def main(config: Config) -> dict[str, Any]:
    """Run the comparison, print the tables, write the results."""
    if config.smoke:
        config = replace(config, seeds=1)
    run = Run(config, free=("workers",))
    tasks = {"Digits": digits_task(config)}
    if config.fashion_epochs and not config.smoke:
        tasks["Fashion-MNIST"] = fashion_task(config)
    results = {name: compare(name, task, config, run) for name, task in tasks.items()}
    tables = [table(name, figures) for name, figures in results.items()]
    pictures = [draw_curves(run, results)]
    return run.report(__doc__, results, tables, pictures)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
