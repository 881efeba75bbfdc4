# SPDX-License-Identifier: Apache-2.0
"""Ways to train of `posteriors`: functions from a `Task` to a model and a posterior.

A guide of the library is trained by `by_fit`: prior, guide, and options of `pyro_bbb.fit`. Any
other posterior is one that `pyro_bbb.predict` accepts, or that the method's own ``predict`` does.
"""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import pyro_bbb as bbb
from _helpers.run import Data, read_json, write_json
from _helpers.training import dropout_passes
from pyro_bbb import guides

Posterior: TypeAlias = tuple[bbb.BayesianModel, Any]  # and a guide, or chains
Network: TypeAlias = Callable[[float], nn.Sequential]
POINT_PRIOR = bbb.priors.FanInNormal(20**0.5)  # of MAP: weight decay, a tenth of He's
CURVATURE = 10_000  # images for Laplace's curvature
BATCH = 128  # images per step of every training
CYCLES = 4  # of cyclical SGHMC


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Images and the network that classifies them."""

    title: str
    """Name in tables and figures."""
    dataset: str
    """Training and test images; the other set is out-of-distribution."""
    network: Network
    """Makes the plain torch network, with a rate of dropout; its last layer is called ``last``."""
    epochs: int
    """Passes over the training images by the deterministic network."""
    methods: tuple[str, ...]
    """Names of the methods compared."""
    published: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    """Accuracy, NLL and ECE of others, by their names."""

    @property
    def ood(self) -> str:
        """The data set of the out-of-distribution images."""
        return "mnist" if self.dataset == "fashion_mnist" else "fashion_mnist"


class Clock:
    """Processor seconds of a training, added up over interruptions in a file.

    Seconds of the processor, not of the wall, as other processes share the machine.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.before = float(read_json(path)["seconds"]) if path.exists() else 0.0
        self.start()

    def start(self) -> None:
        """Begin to count."""
        self.begin = time.process_time()

    @property
    def seconds(self) -> float:
        """The seconds until now."""
        return self.before + time.process_time() - self.begin

    def note(self, _: Any = None) -> None:
        """Write the seconds until now; a callback of `pyro_bbb.fit`."""
        write_json(self.path, {"seconds": self.seconds})


@dataclass(frozen=True, kw_only=True)
class Task:
    """One training: of a problem's network, from a seed."""

    problem: Problem
    data: Data
    valid: Data
    """Images that no training sees, for what is fitted after it."""
    seed: int
    folder: Path
    """For checkpoints, from which an interrupted training goes on."""
    clock: Clock
    """Adds up what the training costs."""
    engine: str = "compiled"
    """How steps are run, see `pyro_bbb.fit`."""
    epochs: int | None = None
    """Passes over the images, instead of the method's."""

    def model(
        self, prior: Any, where: str = "*", dropout: float = 0.0, num_data: int | None = None
    ) -> bbb.BayesianModel:
        """The problem's network with He's initial weights, those that match ``where`` random."""
        torch.manual_seed(self.seed)
        network = he(self.problem.network(dropout))
        return classifier(network, prior, where, num_data or len(self.data[0]))

    def fit(self, model: Any, guide: Any, times: float, **options: Any) -> None:
        """Train for ``times`` the problem's epochs; an interrupted training goes on.

        Args:
            model: the model.
            guide: the guide.
            times: length of the training, relative to the deterministic network's.
            **options: arguments of `pyro_bbb.fit`.
        """
        bbb.fit(
            model,
            guide,
            self.data,
            epochs=self.epochs or max(1, round(times * self.problem.epochs)),
            engine=self.engine,
            checkpoint=self.folder / "checkpoint",
            callbacks=[self.clock.note],
            progress=False,
            seed=self.seed,
            **options,
        )


def classifier(network: nn.Module, prior: Any, where: str, num_data: int) -> bbb.BayesianModel:
    """The network with weights that match ``where`` random, from a prior of its own."""
    network = bbb.bayesianize(network, copy.deepcopy(prior), where=where)
    return bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data)


def he(network: nn.Sequential) -> nn.Sequential:
    """Give a network He's initial weights, and biases of 0."""
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.kaiming_normal_(parameter, nonlinearity="relu")
    return network


def mlp(dropout: float = 0.0) -> nn.Sequential:
    """Multilayer perceptron 784-400-400-10 of ReLU units."""
    layers: dict[str, nn.Module] = {"flatten": nn.Flatten(), "fc1": nn.Linear(784, 400)}
    layers |= {"relu1": nn.ReLU(), "drop1": nn.Dropout(dropout), "fc2": nn.Linear(400, 400)}
    layers |= {"relu2": nn.ReLU(), "drop2": nn.Dropout(dropout), "last": nn.Linear(400, 10)}
    return named(layers)


def tiny(dropout: float = 0.0) -> nn.Sequential:
    """A network for smoke tests, 16-8-10, on pixels averaged."""
    layers: dict[str, nn.Module] = {"pool": nn.AvgPool2d(7), "flatten": nn.Flatten()}
    layers |= {"fc1": nn.Linear(16, 8), "relu1": nn.ReLU(), "drop1": nn.Dropout(dropout)}
    return named(layers | {"last": nn.Linear(8, 10)})


def lenet5(dropout: float = 0.0) -> nn.Sequential:
    """LeNet-5 of `lenet5_mnist`: dropout is before the dense layers."""
    layers: dict[str, nn.Module] = {}
    for i, (inputs, outputs) in enumerate([(1, 6), (6, 16), (16, 120)], start=1):
        layers[f"conv{i}"] = nn.Conv2d(inputs, outputs, 5, padding=2)
        layers[f"relu{i}"] = nn.ReLU()
        if i < 3:
            layers[f"pool{i}"] = nn.MaxPool2d(2)
    layers |= {"flatten": nn.Flatten(), "drop1": nn.Dropout(dropout)}
    layers |= {"fc1": nn.Linear(120 * 7 * 7, 84), "relu4": nn.ReLU()}
    layers |= {"drop2": nn.Dropout(dropout), "last": nn.Linear(84, 10)}
    return named(layers)


def named(layers: dict[str, nn.Module]) -> nn.Sequential:
    """A chain of named layers, without dropout of rate 0."""
    network = nn.Sequential()
    for name, layer in layers.items():
        if not (isinstance(layer, nn.Dropout) and layer.p == 0):
            network.add_module(name, layer)
    return network


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to train, and a way to predict."""

    label: str
    """Name in tables and figures."""
    train: Callable[[Task], Posterior]
    """Makes a model and its posterior."""
    draws: int
    """Networks of a prediction; 0 where it draws none."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the prediction."""
    predict: Callable[..., bbb.ClassificationPrediction] = bbb.predict  # type: ignore[assignment]
    """Predicts by model, posterior and images."""

    def prediction(self, posterior: Posterior, x: Tensor, seed: int) -> Any:
        """The posterior predictive at images ``x``."""
        options = {"num_samples": max(1, self.draws), "seed": seed, **self.options}
        return self.predict(*posterior, x, **options)


def by_fit(
    guide: str,
    prior: Any,
    *,
    where: str = "*",
    guide_options: Mapping[str, Any] | None = None,
    times: float = 1.0,
    temperature: float = 1.0,
    **options: Any,
) -> Callable[[Task], Posterior]:
    """Make the ``train`` of a method that `pyro_bbb.fit` trains.

    Args:
        guide: name of the guide.
        prior: of the random weights.
        where: which weights are random; the others are ordinary parameters.
        guide_options: of the guide.
        times: length of the training, relative to the deterministic network's.
        temperature: weight of the KL; 1 is Bayes' rule.
        **options: arguments of `pyro_bbb.fit`.
    """

    def train(task: Task) -> Posterior:
        model = task.model(prior, where)
        posterior = guides.make(guide, model, **(guide_options or {}))
        schedule = bbb.KLSchedule(temperature=temperature)
        task.fit(model, posterior, times, kl_schedule=schedule, **options)
        return model, posterior

    return train


def with_temperature(train: Callable[[Task], Posterior]) -> Callable[[Task], Posterior]:
    """Train; then fit the temperature of the predictive (Guo et al. 2017) on held-out images."""

    def train_and_scale(task: Task) -> Posterior:
        posterior = train(task)
        predict = partial(bbb.predict, *posterior, num_samples=1, seed=task.seed)
        return posterior[0], bbb.temperature_scaling(predict, task.valid)

    return train_and_scale


def scaled(model: Any, predict: Any, x: Tensor, **_: Any) -> bbb.ClassificationPrediction:
    """Predict by the function of `with_temperature`, which has its seed."""
    answer: bbb.ClassificationPrediction = predict(x)
    return answer


def laplace(
    where: str, prior: Any, lr: float = 1e-3, **options: Any
) -> Callable[[Task], Posterior]:
    """Train by MAP; then approximate the posterior of the weights that match ``where``.

    The curvature is of `CURVATURE` images, weighted up to all; its prior need not be that of MAP.
    """

    def train(task: Task) -> Posterior:
        model = task.model(POINT_PRIOR)
        point = guides.make("delta", model)
        task.fit(model, point, 1.0, lr=lr)
        network = bbb.to_module(model, point)
        model = classifier(network, prior, where, len(task.data[0]))
        guide = guides.make("laplace", model, structure="kron", **options)
        x, y = (part[:CURVATURE] for part in task.data)
        guide.approximate((x, y))
        return model, guide

    return train


def cyclical(prior: Any, temperature: float, times: float) -> Callable[[Task], Posterior]:
    """Run one chain of SGHMC in four cycles, of which each gives four samples in its last fifth.

    Args:
        prior: of the weights.
        temperature: of the posterior.
        times: length, relative to the deterministic network's training.
    """

    def train(task: Task) -> Posterior:
        model = task.model(prior)
        epochs = task.epochs or times * task.problem.epochs
        sampling = max(1, round(epochs * len(task.data[0]) / BATCH / CYCLES / 20))
        chains = bbb.run_sgmcmc(
            model,
            task.data,
            lr=0.05,
            cycles=CYCLES,
            num_samples=4 * CYCLES,
            thin=sampling,
            warmup_steps=16 * sampling,
            batch_size=BATCH,
            temperature=temperature,
            checkpoint=task.folder / "checkpoint",
            seed=task.seed,
            progress=False,
        )
        return model, chains

    return train


def ensemble_of(
    size: int, train: Callable[[Task], Posterior], draws: int = 1
) -> Callable[[Task], Posterior]:
    """Train guides one after the other, each from a seed of its own, and draw from each.

    Args:
        size: number of guides.
        train: trains one.
        draws: number of draws from each.
    """

    def train_all(task: Task) -> Posterior:
        drawn = []
        for i in range(size):
            own = replace(task, seed=1000 * (i + 1) + task.seed, folder=task.folder / str(i))
            model, guide = train(own)
            torch.manual_seed(own.seed)
            drawn.append(guide.sample_posterior(draws))
        return model, {name: torch.cat([each[name] for each in drawn]) for name in drawn[0]}

    return train_all


def dropout_map(
    rate: float, prior: Any, times: float, lr: float = 1e-3
) -> Callable[[Task], Posterior]:
    """Train a network with dropout by MAP (weight decay by the prior); a plain torch module."""

    def train(task: Task) -> Posterior:
        model = task.model(prior, dropout=rate)
        guide = guides.make("delta", model)
        task.fit(model, guide, times, lr=lr)
        return model, bbb.to_module(model, guide)

    return train


def dropout_draws(
    model: Any, network: nn.Module, x: Tensor, *, num_samples: int, seed: int
) -> bbb.ClassificationPrediction:
    """Monte Carlo dropout: predict with dropout left on, many times."""
    outputs = dropout_passes(network, x, num_samples, seed)
    return bbb.ClassificationPrediction(outputs.log_softmax(-1))
