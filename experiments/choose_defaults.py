# SPDX-License-Identifier: Apache-2.0
"""Comparison of the library's defaults with one change at a time, scored on validation data.

    python experiments/choose_defaults.py [--data-root ROOT] [--tasks digits airfoil]

One recipe (standard Normal prior, temperature 1, He initial means, initial rho -5, learning
rate of 32 / steps that falls along a cosine) trains every network, and variants of it: on
scikit-learn's digits, with two and with eight hidden layers; on 5,000 images of MNIST and 10,000 of
Fashion-MNIST; and on tables of numbers. Networks are scored on a fifth of the *training* part, and
on 5,000 further training images; no test data are read. Out-of-distribution inputs are digits with
shuffled pixels, and images of the other set.
"""

import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import torch
import tyro
from _helpers import tables as tabulate
from _helpers.images import digits, stratified
from _helpers.run import DataSettings, Picture, Run, SeveralSeeds
from _helpers.scores import scores
from _helpers.tables import Scores, Summary, Table
from _helpers.training import uniform_means
from pyro.distributions import Normal
from sklearn.model_selection import train_test_split
from torch import Tensor

import pyro_bbb as bbb
from pyro_bbb import data, metrics

UCI = ("bostonHousing", "energy", "yacht", "wine-quality-red")


@dataclass(frozen=True)
class Config(SeveralSeeds, DataSettings):
    """Settings of one run."""

    tasks: tuple[str, ...] = ("digits", "deep", "mnist", "fashion", "lenet", "airfoil", *UCI)
    """Networks and data to compare on."""
    workers: int = 1
    """Processes, each of one thread; results are the same."""
    samples: int = 30
    """Networks drawn from the posterior for each prediction."""


@dataclass(frozen=True)
class Variant:
    """Differences from the defaults."""

    prior: Callable[[], Any] = lambda: Normal(0.0, 1.0)
    guide: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    chains: bool = False  # five of SGHMC, 20 samples each, in place of a guide


COLD = {"kl_schedule": bbb.KLSchedule(temperature=0.1)}
VARIANTS = {
    "defaults": Variant(),
    "temperature 0.1": Variant(fit=COLD),
    "prior: by fan-in": Variant(prior=bbb.priors.FanInNormal),
    "prior: mixture, sigma 1 and 0.1": Variant(prior=lambda: bbb.ScaleMixtureNormal(0.5, 1.0, 0.1)),
}
FURTHER = {  # on the digits
    "local reparameterisation": Variant(fit={"estimator": "local_reparam"}),
    "a third of the epochs": Variant(fit={"epochs": 100}),
    "five chains of SGHMC": Variant(chains=True),
    "learning rate 0.001": Variant(fit={"lr": 1e-3}),
    "prior: mixture, sigma 1 and e^-6": Variant(
        prior=lambda: bbb.ScaleMixtureNormal(0.5, 1.0, math.exp(-6))
    ),
    "initial rho -3": Variant(guide={"init_rho": -3.0}),
    "initial rho -6": Variant(guide={"init_rho": -6.0}),
    "initial means uniform in +-0.2": Variant(guide={"init_loc": uniform_means(0.2)}),
    "constant learning rate": Variant(fit={"lr_schedule": "constant"}),
}


@dataclass(frozen=True)
class Task:
    """One data set: training and validation parts, network, length, out-of-distribution inputs."""

    title: str
    train: tuple[Tensor, Tensor]
    valid: tuple[Tensor, Tensor]
    network: Callable[..., Any]
    epochs: int
    ood: Tensor | None = None  # None for numbers


def digits_task(name: str, config: Config) -> Task:
    """Return the digits without the quarter that other experiments test on."""
    (x, y), _ = digits()
    train, valid = stratified(x, y, 0.2)
    order = torch.rand(valid[0].shape, generator=torch.Generator().manual_seed(0)).argsort(-1)
    hidden, epochs = (2, 300) if name == "digits" else (8, 200)
    network = partial(bbb.BayesianMLP, [64, *[100] * hidden, 10])
    title = f"digits, {hidden} hidden layers of 100, {epochs} epochs"
    return Task(title, train, valid, network, epochs, valid[0].gather(-1, order))


def images_task(name: str, config: Config) -> Task:
    """Return some training images of one set, validation images, and some of the other set."""
    names = ("mnist", "fashion_mnist") if name == "mnist" else ("fashion_mnist", "mnist")
    (x, y), (ood, _) = (data.load_images(each, root=config.data_root) for each in names)
    if name != "lenet":
        x, ood = x.flatten(1), ood.flatten(1)
    rows, epochs = {"mnist": (5_000, 40), "fashion": (10_000, 20), "lenet": (10_000, 6)}[name]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    train, valid = order[:rows], order[-5_000:]
    mlp = partial(bbb.BayesianMLP, [784, 400, 400, 10])
    network = bbb.BayesianLeNet5 if name == "lenet" else mlp
    kind = "LeNet-5" if name == "lenet" else "784-400-400-10"
    title = f"{rows:,} images of {names[0].replace('_', '-')}, {kind}, {epochs} epochs"
    return Task(title, (x[train], y[train]), (x[valid], y[valid]), network, epochs, ood[:2_000])


def numbers_task(name: str, config: Config) -> Task:
    """Return a table of numbers, standardised, without the rows that other experiments test on."""
    if name == "airfoil":
        root = config.data_root or os.environ.get("PYRO_BBB_DATA", "")
        path = Path(root) / "airfoil" / "airfoil.csv"
        table = torch.from_numpy(np.loadtxt(path, delimiter=",", skiprows=1)).float()
        rows, _ = train_test_split(table, test_size=0.2, random_state=0)
        x, y = rows[:, :-1], rows[:, -1]
    else:
        (x, y), _ = data.load_uci(name, root=config.data_root).split(0)
    (x, y), (x_valid, y_valid) = data.split(x, y[:, None], fraction=0.2, seed=1)
    (x, scale_x), (y, scale_y) = data.standardize(x), data.standardize(y)
    train, valid = (x, y), (scale_x(x_valid), scale_y(y_valid))
    epochs = round(6_000 / math.ceil(len(x) / 128))
    network = partial(bbb.BayesianMLP, [x.shape[1], 50, 1])
    return Task(f"{name}, 50 units, {epochs} epochs", train, valid, network, epochs)


TASKS: dict[str, Callable[[str, Config], Task]] = {
    **dict.fromkeys(("digits", "deep"), digits_task),
    **dict.fromkeys(("mnist", "fashion", "lenet"), images_task),
    **dict.fromkeys(("airfoil", *UCI), numbers_task),
}


def score(task: Task, variant: Variant, config: Config, seed: int) -> Scores:
    """Train one network and score its predictions on the validation part."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    likelihood = (
        bbb.likelihoods.Gaussian.learned(torch.ones(1))
        if task.ood is None
        else bbb.likelihoods.Categorical()
    )
    network = task.network(prior=variant.prior())
    model = bbb.BayesianModel(network, likelihood, num_data=len(task.train[0]))
    figures: Scores = {}
    posterior: Any = bbb.AutoSoftplusNormal(model, **variant.guide)
    options = {"epochs": task.epochs} | variant.fit | ({"epochs": 2} if config.smoke else {})
    if variant.chains:
        steps = {"warmup_steps": 30, "thin": 1} if config.smoke else {"warmup_steps": 3000}
        chains = {"lr": 0.01, "num_chains": 5, "num_samples": 20, "progress": False} | steps
        posterior = bbb.run_sgmcmc(model, task.train, seed=seed, **chains)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", bbb.UndertrainedWarning)  # the table shows it
            history = bbb.fit(model, posterior, task.train, progress=False, seed=seed, **options)
        figures = {
            "neg_elbo": (history.kl[-1] + history.nll[-1]) / len(task.train[0]),
            "baseline": history.baseline_per_example,
            "curve": history.neg_elbo_per_example,
        }
    x, y = task.valid
    inside = bbb.predict(model, posterior, x, num_samples=config.samples, seed=config.seed)
    if task.ood is None:
        low, high = inside.interval(0.9)
        return figures | {
            "rmse": (inside.mean - y).square().mean().sqrt().item(),
            "nll": -inside.log_prob(y).mean().item(),
            "coverage": ((low <= y) & (y <= high)).float().mean().item(),
        }
    outside = bbb.predict(model, posterior, task.ood, num_samples=config.samples, seed=config.seed)
    auroc = metrics.auroc(outside.entropy, inside.entropy)
    return figures | scores(inside.probs, y) | {"auroc": auroc}


def compare(name: str, task: Task, config: Config, run: Run) -> dict[str, Summary]:
    """Scores of every variant, and their means over the seeds."""
    variants = VARIANTS | FURTHER if name == "digits" else VARIANTS
    one = lambda title, seed: score(task, variants[title], config, seed)  # noqa: E731
    with joblib.parallel_config(n_jobs=config.workers):
        return run.compare(one, variants, (), name)


def table(task: Task, results: dict[str, Summary]) -> Table:
    """One row per variant; with a temperature the baseline is of another ELBO."""
    for variant, figures in results.items():
        if "temperature" in variant:
            figures["mean"].pop("baseline", None)
    columns = [("neg. ELBO (nats)", "neg_elbo", 1, 2), ("data ignored", "baseline", 1, 2)]
    if task.ood is None:
        columns += [("RMSE (sd)", "rmse", 1, 3), ("NLL (nats)", "nll", 1, 3)]
        columns += [("in 90 % intervals (%)", "coverage", 100, 1)]
    else:
        columns += [("accuracy (%)", "accuracy", 100, 2), ("NLL (nats)", "nll", 1, 3)]
        columns += [("ECE (%)", "ece", 100, 2), ("AUROC (%)", "auroc", 100, 1)]
    return tabulate.table(task.title, results, columns)


def draw_curves(run: Run, results: dict[str, dict[str, Summary]]) -> Picture:
    """Return the negative ELBO in training by two learning rates, and the baseline."""
    first = {v: next(iter(figures["seeds"].values())) for v, figures in results["digits"].items()}
    curves = {v: first[v]["curve"] for v in ("learning rate 0.001", "defaults")}
    panel: dict[str, Any] = {v: (range(1, len(c) + 1), c) for v, c in curves.items()}
    baseline = first["defaults"]["baseline"]
    panel["posterior that ignores data"] = [1, len(curves["defaults"])], [baseline, baseline]
    caption = "Below the level line the posterior has learned more from the data than it paid for."
    axes = {"xlabel": "epoch", "ylabel": "negative ELBO (nats per example)", "yscale": "log"}
    return run.curves("elbo", caption, {"Digits": panel}, **axes)


def main(config: Config) -> dict[str, Any]:
    """Run the comparison, print the tables, write the results."""
    if config.smoke:
        config = replace(config, seeds=1, tasks=("digits",))
    run = Run(config, free=("workers", "tasks"))
    tasks = {name: TASKS[name](name, config) for name in config.tasks}
    results = {name: compare(name, task, config, run) for name, task in tasks.items()}
    tables = [table(tasks[name], figures) for name, figures in results.items()]
    pictures = [draw_curves(run, results)] if "digits" in results else []
    return run.report(__doc__, results, tables, pictures)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
