# SPDX-License-Identifier: Apache-2.0
"""Guides beside Bayes by Backprop: training steps in runs of `fit`, and predictions.

Natural gradients (IVON), the variational last layer, and Laplace's approximation of the last layer,
whose training is the deterministic network's.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn

import pyro_bbb as bbb
from _parts.budget import Budget
from _parts.isolated_workers import Entry, Make, Workers, compare, start_workers
from _parts.pyro_methods import metered_steps
from _parts.small import DETERMINISTIC, NOISE, Run
from _parts.tasks import Work, mlp
from _parts.timing import Comparison, Meter, Take, repeated

BBB, IVON, VBLL = "pyro_bbb.fit", "pyro_bbb.fit, IVON", "pyro_bbb.fit, vbll"
PASS, OF_VBLL, OF_LAPLACE = "one deterministic pass", "vbll", "laplace, last layer"
PROBIT = {OF_VBLL: "vbll, probit", OF_LAPLACE: "laplace, last layer, probit"}
LENET5 = "LeNet-5"
MOST = 1000  # weights of one dense covariance; an input costs their square


@dataclass(frozen=True)
class Task(Run):
    """A run of a ReLU network, or of LeNet-5 on images if there are no sizes."""

    sizes: tuple[int, ...] = ()
    rows: int = 2560
    batch: int = 128
    steps: int = 40

    @property
    def name(self) -> str:
        """Of the network."""
        return "-".join(map(str, self.sizes)) or LENET5

    def network(self) -> nn.Sequential:
        """The network with ordinary weights."""
        return (
            nn.Sequential(mlp(self.sizes)) if self.sizes else Work(architecture="lenet5").network()
        )

    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs, and targets or labels."""
        if self.sizes:
            return super().data()
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.rows, 1, 28, 28, generator=generator)
        return x, torch.randint(10, (self.rows,), generator=generator)

    @property
    def is_regression(self) -> bool:
        """True of one output."""
        return self.sizes[-1:] == (1,)

    def model(self, where: str | None = None) -> bbb.BayesianModel:
        """The network with random weights, of some layers or of all."""
        network = bbb.bayesianize(self.network(), prior=dist.Normal(0.0, 0.5), where=where)
        classes, regression = bbb.likelihoods.Categorical, bbb.likelihoods.Gaussian
        likelihood = regression(NOISE) if self.is_regression else classes()
        return bbb.BayesianModel(network, likelihood, num_data=self.rows)

    @property
    def head(self) -> str:
        """Name of the last layer."""
        return list(dict(self.network().named_children()))[-1]


TASKS = (
    Task((13, 50, 50, 1), rows=5000, batch=256, steps=1200),
    Task((784, 400, 400, 10)),
    Task(),
)


def _deterministic(task: Task) -> Take:
    network, (x, y) = task.network(), task.data()
    adam = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    nll = task.nll if task.sizes else partial(nn.functional.cross_entropy, reduction="sum")

    def step(x: Tensor, y: Tensor) -> None:
        adam.zero_grad()
        nll(network(x), y).backward()
        adam.step()

    def take(count: int, meter: Meter) -> None:
        for _ in range(count):
            for batch in task.batches(x, y):
                meter(partial(step, *batch))

    return take


def _fit(task: Task, guide: str = "softplus_normal", **options: Any) -> Take:
    model = task.model(task.head if guide == "vbll" else None)
    made, data = bbb.guides.make(guide, model), task.data()
    fixed: dict[str, Any] = {"epochs": task.epochs, "batch_size": task.batch, "lr": 1e-4}
    fixed |= {"lr_schedule": "constant", "progress": False, "engine": "compiled"}

    def take(count: int, meter: Meter) -> None:
        for _ in range(count):
            with warnings.catch_warnings(), metered_steps(meter):
                warnings.simplefilter("ignore", bbb.UndertrainedWarning)
                bbb.fit(model, made, data, **fixed, **options)

    return take


TRAINING: dict[str, Make] = {
    DETERMINISTIC: _deterministic,
    BBB: partial(_fit, loss="mean_field"),
    IVON: partial(_fit, optimizer="ivon"),
    VBLL: partial(_fit, guide="vbll"),
}


def _pass(task: Task) -> Take:
    network, (x, _) = task.network(), task.data()

    def run() -> Tensor:
        with torch.no_grad():
            outputs: Tensor = network(x)
            return outputs if task.is_regression else outputs.softmax(-1)

    return repeated(run)


def _predict(task: Task, guide: Callable[[Task, Any], Any], linearized: bool | str) -> Take | str:
    if task.is_regression and linearized == "probit":
        return "for classes only"
    model = task.model(task.head)
    if guide is _laplace and sum(x.numel() for x in model.latent_shapes().values()) > MOST:
        return f"more than {MOST} weights in the last layer"
    made, (x, _) = guide(task, model), task.data()

    def run() -> Tensor:
        prediction: Any = bbb.predict(model, made, x, linearized=linearized)
        found: Tensor = prediction.mean if task.is_regression else prediction.probs
        return found

    return repeated(run)


def _vbll(task: Task, model: Any) -> Any:
    return bbb.guides.make("vbll", model)


def _laplace(task: Task, model: Any) -> Any:
    guide = bbb.guides.make("laplace", model, structure="last_layer")
    guide.approximate(task.data())
    return guide


PREDICTIONS: dict[str, Make] = {
    PASS: _pass,
    OF_VBLL: partial(_predict, guide=_vbll, linearized=True),
    PROBIT[OF_VBLL]: partial(_predict, guide=_vbll, linearized="probit"),
    OF_LAPLACE: partial(_predict, guide=_laplace, linearized=True),
    PROBIT[OF_LAPLACE]: partial(_predict, guide=_laplace, linearized="probit"),
}


def guides(budget: Budget, device: str) -> list[Comparison]:
    """Time steps of training and predictions, each method in a process of its own."""
    tasks = [replace(task, **budget.guides) for task in TASKS[: budget.guide_tasks]]
    options: dict[str, Any] = {"one_process": budget.one_process, "threads": 1}
    found = []
    for makes in (TRAINING, PREDICTIONS):
        with start_workers(makes, **options) as workers:
            found += [_compared(task, makes, workers, budget.small_rounds) for task in tasks]
    return found


def _compared(task: Task, makes: dict[str, Make], workers: Workers, rounds: int) -> Comparison:
    entries = {name: Entry(name, task) for name in makes}
    times, absent = compare(entries, workers, seconds=0.0, min_rounds=rounds, warmup=1)
    title, floor = f"a step of {task.name}", DETERMINISTIC
    if makes is PREDICTIONS:
        title, floor = f"{task.rows} inputs of {task.name}", PASS
    return Comparison("guides", title, floor, times, absent)
