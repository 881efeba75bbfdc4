# SPDX-License-Identifier: Apache-2.0
"""Trainings that `posteriors` and `shift` share, and the scores and costs of one.

Costs are multiples of the deterministic network's, in processor seconds of one process: other
programs share the machine, and its speed changes during the hours of a run. So the deterministic
network is measured with each training: some of its steps, right before and after it, and its
prediction of the same images.
"""

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch
from pyro.distributions import Normal
from torch import Tensor, nn

import pyro_bbb as bbb
from _helpers.images import images, train_and_validation
from _helpers.run import Data, fingerprint, read_json, write_json
from _helpers.scores import detect, scores
from _helpers.tables import Scores, Summaries
from _helpers.training import dropout_passes, he, lenet5, named
from pyro_bbb import guides, metrics

Posterior: TypeAlias = tuple[bbb.BayesianModel, Any]  # and a guide, or chains
Network: TypeAlias = Callable[[float], nn.Sequential]
POINT_PRIOR = bbb.priors.FanInNormal(20**0.5)  # of MAP: weight decay, a tenth of He's
CURVATURE = 10_000  # images for Laplace's curvature
BATCH = 128  # images per step of every training
CYCLES = 4  # of cyclical SGHMC


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Images and the network that classifies them."""

    title: str  # name in tables and figures
    dataset: str  # training and test images; the other set is out-of-distribution
    network: Network
    """Makes the plain torch network, with a rate of dropout; its last layer is called ``last``."""
    epochs: int  # passes over the training images by the deterministic network
    methods: tuple[str, ...]  # names of the methods compared
    published: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    """Accuracy, NLL and ECE of others, by their names."""


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
    valid: Data  # images that no training sees, for what is fitted after it
    seed: int
    folder: Path  # for checkpoints, from which an interrupted training goes on
    clock: Clock  # adds up what the training costs
    engine: str = "compiled"  # how steps are run, see `pyro_bbb.fit`
    epochs: int | None = None  # passes over the images, instead of the method's

    def model(
        self, prior: Any, where: str = "*", dropout: float = 0.0, num_data: int | None = None
    ) -> bbb.BayesianModel:
        """Return the problem's network with He's weights, those that match ``where`` random."""
        torch.manual_seed(self.seed)
        network = he(self.problem.network(dropout))
        return classifier(network, prior, where, num_data or len(self.data[0]))

    def fit(self, model: Any, guide: Any, times: float, **options: Any) -> None:
        """Train for ``times`` the problem's epochs; an interrupted training goes on."""
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
    """Return the network with weights that match ``where`` random, from a separate prior."""
    network = bbb.bayesianize(network, copy.deepcopy(prior), where=where)
    return bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data)


def mlp(dropout: float = 0.0) -> nn.Sequential:
    """Multilayer perceptron 784-400-400-10 of ReLU units."""
    layers: dict[str, nn.Module] = {"flatten": nn.Flatten(), "fc1": nn.Linear(784, 400)}
    layers |= {"relu1": nn.ReLU(), "drop1": nn.Dropout(dropout), "fc2": nn.Linear(400, 400)}
    layers |= {"relu2": nn.ReLU(), "drop2": nn.Dropout(dropout), "last": nn.Linear(400, 10)}
    return named(layers)


def tiny(dropout: float = 0.0) -> nn.Sequential:
    """Return a network for smoke tests, 16-8-10, on pixels averaged."""
    layers: dict[str, nn.Module] = {"pool": nn.AvgPool2d(7), "flatten": nn.Flatten()}
    layers |= {"fc1": nn.Linear(16, 8), "relu1": nn.ReLU(), "drop1": nn.Dropout(dropout)}
    return named(layers | {"last": nn.Linear(8, 10)})


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to train, and a way to predict."""

    label: str  # name in tables and figures
    train: Callable[[Task], Posterior]  # makes a model and its posterior
    draws: int  # networks of a prediction; 0 where it draws none
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the prediction
    predict: Callable[..., bbb.ClassificationPrediction] = bbb.predict  # type: ignore[assignment]
    """Predicts by model, posterior and images."""

    def prediction(self, posterior: Posterior, x: Tensor, seed: int) -> Any:
        """Return the posterior predictive at images ``x``."""
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

    Weights that match ``where`` are random, the others ordinary parameters. The training is
    ``times`` as long as the deterministic network's; the temperature 1 is Bayes' rule. Further
    options are arguments of `pyro_bbb.fit`.
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


def scaled(model: Any, predict: Any, x: Tensor, **_: Any) -> Any:
    """Predict by the function of `with_temperature`, which has its seed."""
    return predict(x)


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
        x, y = (values[:CURVATURE] for values in task.data)
        guide.approximate((x, y))
        return model, guide

    return train


def cyclical(prior: Any, temperature: float, times: float) -> Callable[[Task], Posterior]:
    """Run one chain of SGHMC in four cycles, of which each gives four samples in its last fifth."""

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
    """Train guides one after the other, each from another seed, and draw from each."""

    def train_all(task: Task) -> Posterior:
        drawn = []
        for i in range(size):
            own = replace(task, seed=1000 * (i + 1) + task.seed, folder=task.folder / str(i))
            model, guide = train(own)
            torch.manual_seed(own.seed)
            drawn.append(guide.sample_posterior(draws))
        return model, {name: torch.cat([sample[name] for sample in drawn]) for name in drawn[0]}

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


MIXTURE = bbb.ScaleMixtureNormal(0.5, 1.0, 0.0025)
NORMAL, FAN_IN = Normal(0.0, 1.0), bbb.priors.FanInNormal()
PRIORS = {"mixture": MIXTURE, "normal": NORMAL}
NORMAL_GUIDE = "softplus_normal"
IVON = bbb.optim.IVON(beta2=0.9995)
BY_MAP = by_fit("delta", POINT_PRIOR, lr=1e-3)
BY_IVON = partial(by_fit, NORMAL_GUIDE, FAN_IN, optimizer=IVON, lr=0.1)
DRAWS = 16  # of weights
OUTPUT_DRAWS = 100  # of outputs, which cost less

METHODS = {
    "map": Method(label="MAP", draws=0, train=BY_MAP),
    "temperature": Method(
        label="MAP, temperature scaled",
        draws=0,
        train=with_temperature(BY_MAP),
        predict=scaled,
    ),
    "dropout": Method(
        label="MC dropout",
        draws=DRAWS,
        train=dropout_map(0.1, POINT_PRIOR, times=2),
        predict=dropout_draws,
    ),
    "ensemble": Method(
        label="ensemble of 5",
        draws=5,
        train=by_fit("ensemble", POINT_PRIOR, guide_options={"size": 5}, lr=1e-3),
    ),
    "laplace_last": Method(
        label="Laplace, last layer",
        draws=OUTPUT_DRAWS,
        train=laplace("last.*", POINT_PRIOR, optimize_prior=True),
        options={"linearized": True},
    ),
    "laplace_kron": Method(
        label="Laplace, Kronecker",
        draws=OUTPUT_DRAWS,
        train=laplace("*", bbb.priors.FanInNormal(0.7)),
        options={"linearized": True},
    ),
    "swag": Method(
        label="SWAG", draws=DRAWS, train=by_fit("swag", POINT_PRIOR, times=1.5, lr=1e-3)
    ),
    "rank1": Method(
        label="rank-1 ensemble of 4",
        draws=DRAWS,
        train=by_fit("rank1_ensemble", NORMAL, times=2, guide_options={"size": 4}, lr=1e-3),
    ),
    "sghmc": Method(label="cyclical SGHMC", draws=DRAWS, train=cyclical(NORMAL, 0.1, times=2)),
    "vbll": Method(
        label="variational last layer",
        draws=OUTPUT_DRAWS,
        train=by_fit("vbll", NORMAL, where="last.*", lr=1e-3),
    ),
    "vbll_functions": Method(
        label="last layer, prior of functions",
        draws=OUTPUT_DRAWS,
        train=by_fit("vbll", bbb.priors.FunctionNormal(weight=5), where="last.*", lr=1e-3),
    ),
    "ivon": Method(label="IVON", draws=DRAWS, train=BY_IVON(times=2, temperature=0.1)),
    "ivon_warm": Method(
        label="IVON, temperature 0.3", draws=5, train=BY_IVON(times=2, temperature=0.3)
    ),
    "ivon_warm3": Method(
        label="ensemble of 3 by IVON, temperature 0.3",
        draws=3,
        train=ensemble_of(3, BY_IVON(times=4 / 3, temperature=0.3, lr_schedule="warmup_cosine")),
    ),
    "ensemble10": Method(label="ensemble of 10", draws=10, train=ensemble_of(10, BY_MAP)),
    "ivon4": Method(
        label="ensemble of 4 by IVON", draws=4, train=ensemble_of(4, BY_IVON(temperature=0.1))
    ),
    "ivon10": Method(
        label="ensemble of 10 by IVON", draws=10, train=ensemble_of(10, BY_IVON(temperature=0.1))
    ),
} | {
    f"bbb_{prior}_{estimator}": Method(
        label=f"BBB, {prior}, {estimator.replace('_', ' ')}",
        draws=DRAWS,
        train=by_fit(
            NORMAL_GUIDE, PRIORS[prior], times=1.5, temperature=0.1, estimator=estimator, lr=1e-3
        ),
    )
    for prior in PRIORS
    for estimator in ("reparam", "local_reparam")
}


def labelled(found: Summaries) -> Summaries:
    """Return summaries by the methods' labels."""
    return {METHODS[name].label: summary for name, summary in found.items()}


BBB = tuple(name for name in METHODS if name.startswith("bbb_"))
COMPARED = (
    *("map", "dropout", "ensemble", *BBB, "ivon", "vbll"),
    *("laplace_last", "laplace_kron", "swag", "rank1", "sghmc"),
)
TENS = ("map", "ensemble10", "ivon10")
UNDER_SHIFT = (
    *("map", "temperature", "dropout", "ensemble", "ensemble10"),
    *(*BBB, "ivon", "ivon_warm", "ivon_warm3", "ivon4", "vbll"),
    *COMPARED[COMPARED.index("vbll") + 1 :],
)

PROBLEMS = {
    "fashion_mlp": Problem(
        title="Fashion-MNIST, 784-400-400-10",
        dataset="fashion_mnist",
        network=mlp,
        epochs=10,
        methods=COMPARED,
    ),
    "mnist_lenet5": Problem(
        title="MNIST, LeNet-5", dataset="mnist", network=lenet5, epochs=6, methods=COMPARED
    ),
    "mnist_ensemble10": Problem(
        title="MNIST, ten LeNet-5",
        dataset="mnist",
        network=lenet5,
        epochs=16,
        methods=TENS,
        published={"published ensemble of 10": (0.994, 0.016, 0.005)},
    ),
    "fashion_ensemble10": Problem(
        title="Fashion-MNIST, ten LeNet-5",
        dataset="fashion_mnist",
        network=lenet5,
        epochs=16,
        methods=TENS,
        published={"published ensemble of 10": (0.932, 0.200, 0.010)},
    ),
}


HELD_OUT = 1 / 12  # of the training images: 5,000


@dataclass(frozen=True)
class Sets:
    """Inputs, such as images ``[n, 1, 28, 28]``, and labels ``[n]``."""

    train: Data
    valid: Data
    scored: Data
    ood: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Trainings:
    """Trainings of the current commit, each in a separate folder."""

    root: Path  # the folder of them all
    data_root: Path | None  # folder of the data sets, see `images`
    smoke: bool  # train a tiny network on a few images
    epochs: int | None = None  # passes over the images, instead of the methods' own

    def sets(self, name: str, *, testing: bool = True, unknown: int | None = None) -> Sets:
        """Return the problem's images: scored are test images or those of validation.

        The out-of-distribution images are at most this many.
        """
        get = partial(images, root=self.data_root, smoke=self.smoke)
        dataset = PROBLEMS[name].dataset
        ood_dataset = "mnist" if dataset == "fashion_mnist" else "fashion_mnist"
        train, valid = train_and_validation(get(dataset, train=True), HELD_OUT)
        scored = get(dataset, train=False) if testing else valid
        return Sets(train, valid, scored, get(ood_dataset, train=not testing)[0][:unknown])

    def task(self, name: str, method: str, seed: int, sets: Sets) -> Task:
        """One training, which goes on from what is in its folder; a smoke test's is tiny."""
        settings, problem = {"epochs": self.epochs, "smoke": self.smoke}, PROBLEMS[name]
        folder = self.root / fingerprint(settings) / name / method / str(seed)
        return Task(
            problem=replace(problem, network=tiny) if self.smoke else problem,
            data=sets.train,
            valid=sets.valid,
            seed=seed,
            folder=folder,
            clock=Clock(folder / "seconds.json"),
            engine="eager" if self.smoke else "compiled",
            epochs=1 if self.smoke else self.epochs,
        )


REFERENCE = 64 * BATCH  # images of an epoch that times the deterministic network's step


def measure(task: Task, method: Method, sets: Sets) -> Scores:
    """Train and predict; compute the scores, and the costs."""
    plain, before = plain_step(task)
    task.clock.start()
    posterior = method.train(task)
    task.clock.note()
    seconds = task.clock.seconds
    step = statistics.fmean([before, plain_step(task)[1]])
    batches = -(-len(task.data[0]) // BATCH)
    plain_steps = (task.epochs or task.problem.epochs) * batches
    (x, y), seed = sets.scored, task.seed
    plain_seconds, _ = timed(lambda: bbb.predict(*plain, x, num_samples=1, seed=seed))
    predicting, answer = timed(lambda: method.prediction(posterior, x, seed))
    right = (answer.label == y).flatten()
    figures = {
        **scores(answer.probs, y),
        "area_under_risk_coverage": metrics.area_under_risk_coverage(
            answer.confidence.flatten(), right
        ),
        "training": seconds / (step * plain_steps),
        "prediction": predicting / plain_seconds,
        "seconds": {"training": seconds, "plain_step": step, "prediction": predicting},
        "draws": method.draws,
    }
    if sets.ood is not None:
        figures["ood"] = detect(method.prediction(posterior, sets.ood, seed), answer)
    return figures


def plain_step(task: Task) -> tuple[Posterior, float]:
    """Return a deterministic network trained for three short epochs, and the seconds of a step.

    The first epoch, which has the set-up, does not count.
    """
    ends: list[float] = []
    x, y = (values[:REFERENCE] for values in task.data)
    model = task.model(POINT_PRIOR, num_data=len(x))
    guide = guides.make("delta", model)
    options = {"epochs": 3, "engine": task.engine, "seed": task.seed, "progress": False}
    bbb.fit(model, guide, (x, y), callbacks=[lambda _: ends.append(time.process_time())], **options)
    epochs = [end - begin for begin, end in pairwise(ends)]
    return (model, guide), statistics.median(epochs) / -(-len(x) // BATCH)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Processor seconds of a call, and its result."""
    begin = time.process_time()
    result = function()
    return time.process_time() - begin, result
