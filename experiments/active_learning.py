# SPDX-License-Identifier: Apache-2.0
"""Active learning on MNIST: BALD and predictive entropy against random acquisition.

    python experiments/active_learning.py --repeats 5

A network is trained on 20 labelled images, acquires labels out of a pool of 50,000 images
without, is trained on all it has, and so on. Acquisition rules: BALD, the mutual
information of an image's label and the weights (Houlsby et al. 2011, "Bayesian active learning for
classification and preference learning"), which is `prediction.epistemic`; the entropy of the
predicted label, `prediction.entropy`, in which the label's own noise counts as well; at random. As
in Gal, Islam and Ghahramani (2017, "Deep Bayesian active learning with image data") two
convolutions come before two dense layers and the uncertainty is in the dense ones' weights; theirs
came from dropout, here it is a Normal for each weight.
"""

import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import tyro
from _helpers.images import images, train_and_validation
from _helpers.run import Data, DataSettings, Picture, RepeatedSettings, Run, check_names
from _helpers.scores import scores
from _helpers.tables import Table, shown
from _helpers.training import Training, he
from pyro.distributions import Normal
from torch import Tensor, nn
from tqdm import tqdm

import pyro_bbb as bbb

RANDOM = "random"
# rules that choose each row for itself, and those that choose together, by draws of the weights
# common to all candidates: from a prediction to this number of their rows
Rule: TypeAlias = Callable[[bbb.ClassificationPrediction, int], Tensor]
SCORES: dict[str, Rule] = {
    "BALD": lambda prediction, count: prediction.epistemic.topk(count).indices,
    "entropy": lambda prediction, count: prediction.entropy.topk(count).indices,
}
TOGETHER: dict[str, Rule] = {
    "BatchBALD": partial(bbb.batch_bald, num_configurations=1000),  # a tenth of the time
    "diverse BALD": bbb.diverse_bald,
}


class Pool:
    """Inputs ``[n, ...]`` whose labels ``[n]`` are hidden until they are acquired.

    At the beginning there are ``start`` labels, equally many of each class.
    """

    def __init__(self, x: Tensor, y: Tensor, start: int, generator: torch.Generator) -> None:
        self._x, self._y, self._generator = x, y, generator
        self._hidden = torch.ones(len(x), dtype=torch.bool)
        self.rows = torch.empty(0, dtype=torch.long)  # labelled ones, in the order of their labels
        order, classes = torch.randperm(len(y), generator=generator), y.unique()
        if start % len(classes):
            raise ValueError(f"start must be equally many of {len(classes)} classes, got {start}")
        of_class = [order[y[order] == label][: start // len(classes)] for label in classes]
        self.label(torch.cat(of_class))

    @property
    def data(self) -> Data:
        """The labelled examples."""
        return self._x[self.rows], self._y[self.rows]

    def candidates(self, count: int) -> tuple[Tensor, Tensor]:
        """Return random rows without a label, at most this many, and their inputs."""
        hidden = self._hidden.nonzero().flatten()
        rows = hidden[torch.randperm(len(hidden), generator=self._generator)[:count]]
        return rows, self._x[rows]

    def label(self, rows: Tensor) -> None:
        """Buy the labels of rows, which must be different and without a label."""
        if len(rows.unique()) != len(rows) or not self._hidden[rows].all():
            raise ValueError(f"rows must be different and without a label, got {rows.tolist()}")
        self._hidden[rows] = False
        self.rows = torch.cat([self.rows, rows])


def acquire(
    pool: Pool,
    rule: str,
    predict: Callable[[Tensor], bbb.ClassificationPrediction],
    count: int,
    candidates: int,
) -> None:
    """Buy the labels of the candidates, sampled at random, that a rule chooses.

    `RANDOM` takes the first candidates and predicts nothing.
    """
    rows, x = pool.candidates(max(candidates, count))
    best = torch.arange(count) if rule == RANDOM else (SCORES | TOGETHER)[rule](predict(x), count)
    pool.label(rows[best])


def labels_at(labels: list[int], accuracy: list[float], target: float) -> float | None:
    """Return the number of labels at which an accuracy is reached, between two rounds."""
    if max(accuracy) < target:
        return None
    after = next(i for i, value in enumerate(accuracy) if value >= target)
    ends = slice(max(after - 1, 0), after + 1)
    return float(np.interp(target, accuracy[ends], labels[ends]))


TARGETS = {"90": 0.90, "95": 0.95}


@dataclass(frozen=True)
class Sets:
    """Images ``[n, 1, 28, 28]`` and their labels: to buy from, and to measure on."""

    pool: Data
    measured: Data


def draw_curves(run: Run, summary: dict[str, Any], rules: tuple[str, ...]) -> Picture:
    """Test error by number of labels: median and range over the seeds."""
    lines = {}
    for rule in rules:
        curves = [records[rule]["curve"] for records in summary["seeds"].values()]
        error = 100 * (1 - np.array([curve["accuracy"] for curve in curves]))
        lines[rule] = curves[0]["labels"], np.median(error, axis=0), error.min(0), error.max(0)
    for name, target in TARGETS.items():
        most = max(labels[-1] for labels, *_ in lines.values())
        lines[f"accuracy {name} %"] = [20, most], 2 * [100 * (1 - target)]
    caption = f"Median and range of {len(summary['seeds'])} run(s); both axes logarithmic."
    axes = {"xscale": "log", "yscale": "log", "xlabel": "labels", "ylabel": "error (%)"}
    return run.curves("curves", caption, {"Error by number of labels": lines}, **axes)


def reached(summary: dict[str, Any], rule: str, target: str) -> bool:
    """Return whether a rule reached a target with every seed."""
    return all(run[rule]["reached"][target] for run in summary["seeds"].values())


RULES = ("BALD", "entropy", RANDOM)
ALL_RULES = (*SCORES, *TOGETHER, RANDOM)


@dataclass(frozen=True, kw_only=True)
class Recipe(Training):
    """The network, its training, and how labels are bought."""

    labels: dict[str, int]  # number of labels at which each rule ends
    growth: float  # labels bought at once, as a fraction of the labels so far...
    least: int = 10  # ...but no fewer than this
    start: int = 20  # labels at the beginning, equally many of each class
    candidates: int = 3000  # unlabelled images scored in each round, sampled at random
    prior_scale: float = 1.0  # standard deviation of the Normal prior of the dense weights
    init_rho: float = -3.0  # initial rho; standard deviations are softplus(rho)
    lr: float = 5e-3  # Adam's learning rate at the start
    steps: int = 150  # training steps in each round, on from the means of the round before
    batch_size: int = 64  # images per step
    estimator: str = "local_reparam"
    samples: int = 20  # draws for each prediction
    joint_samples: int = 100  # draws of the weights for rules that choose inputs together
    networks: int = 1  # networks from different starts, whose draws are put together


@dataclass(frozen=True)
class Config(RepeatedSettings, DataSettings):
    """Settings of one run."""

    preset: Literal["ours", "batches"] = "ours"
    """Rounds that grow with the labels so far; or with ten labels each."""
    rules: tuple[str, ...] = RULES
    """Acquisition rules: BALD, entropy, random, "BatchBALD", "diverse BALD"."""
    validation: bool = False
    """Measure on validation images instead of the test part, as for choosing settings."""


RECIPES = {
    "ours": Recipe(labels=dict.fromkeys(ALL_RULES, 400) | {RANDOM: 1200}, growth=0.25),
    "batches": Recipe(labels=dict.fromkeys(ALL_RULES, 250), growth=0.0, networks=5, samples=50),
}


def load(config: Config) -> Sets:
    """Return the training part without 10,000 validation images, the pool."""
    get = partial(images, "mnist", config.data_root, smoke=config.smoke)
    pool, valid = train_and_validation(get(train=True))
    return Sets(pool, valid if config.validation else get(train=False))


def make_network() -> nn.Sequential:
    """Two convolutions and two dense layers, from He's initial weights."""
    network = nn.Sequential(
        *(nn.Conv2d(1, 16, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(16, 32, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10)),
    )
    return he(network).to(memory_format=torch.channels_last)  # half the time on a processor


Trained: TypeAlias = tuple[bbb.BayesianModel, bbb.AutoSoftplusNormal]


def train(recipe: Recipe, data: Data, seed: int, before: Trained | None = None) -> Trained:
    """Return a network trained on the labels so far, from its weights or a new start."""
    torch.manual_seed(seed)
    network, start = make_network() if before is None else before[0].network, None
    if before is None:
        dense = lambda _, module: isinstance(module, nn.Linear)  # noqa: E731
        network = bbb.bayesianize(network, Normal(0.0, recipe.prior_scale), where=dense)
    else:
        start = before[1].median()
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=len(data[0]))
    guide = bbb.AutoSoftplusNormal(model, init_loc=start, init_rho=recipe.init_rho)
    batches = -(-len(data[0]) // recipe.batch_size)
    epochs = max(1, round(recipe.steps / batches))
    with warnings.catch_warnings(action="ignore", category=bbb.UndertrainedWarning):
        recipe.fit(model, guide, data, epochs=epochs, loss="mean_field", progress=False, seed=seed)
    return model, guide


def predict(
    networks: list[Trained], x: Tensor, *, num_samples: int, **options: Any
) -> bbb.ClassificationPrediction:
    """Predict by draws from all networks, equally many from each."""
    draws = max(1, num_samples // len(networks))
    predictions = [bbb.predict(*pair, x, num_samples=draws, **options) for pair in networks]
    joined = torch.cat([prediction.sample_log_probs for prediction in predictions])
    return replace(predictions[0], sample_log_probs=joined)


def learn(
    recipe: Recipe, sets: Sets, rule: str, seed: int, most: int
) -> tuple[dict[str, Any], Pool]:
    """Run rounds of training, measuring and buying labels by one rule.

    Returns:
        Scores by number of labels, and the pool as it is then.
    """
    pool = Pool(*sets.pool, recipe.start, torch.Generator().manual_seed(seed))
    curve: dict[str, Any] = {}
    x, y = sets.measured
    networks: list[Any] = [None] * recipe.networks
    with tqdm(total=most, initial=recipe.start, desc=f"{rule}, seed {seed}", unit="label") as bar:
        while True:
            number = len(pool.rows)
            networks = [
                train(recipe, pool.data, 1000 * (seed + 1000 * i) + number, before)
                for i, before in enumerate(networks)
            ]
            options = {"num_samples": recipe.samples, "estimator": "local_reparam"}
            by_draws = partial(predict, networks, seed=number, **options)
            for name, value in {"labels": number, **scores(by_draws(x).probs, y)}.items():
                curve.setdefault(name, []).append(value)
            if number >= most:
                return curve, pool
            count = min(max(recipe.least, int(recipe.growth * number)), most - number)
            if rule in TOGETHER:
                by_draws = partial(by_draws, num_samples=recipe.joint_samples, estimator="reparam")
            acquire(pool, rule, by_draws, count, recipe.candidates)
            bar.update(count)


def summarise(curve: dict[str, Any]) -> dict[str, Any]:
    """Summarise a rule: labels at each target; a missed target counts as the last number."""
    curves = {
        name: labels_at(curve["labels"], curve["accuracy"], target)
        for name, target in TARGETS.items()
    }
    return {
        "labels_at": {name: curve["labels"][-1] if n is None else n for name, n in curves.items()},
        "reached": {name: n is not None for name, n in curves.items()},
        "final": {name: curve[name][-1] for name in ("labels", "accuracy", "nll")},
        "curve": curve,
    }


def one_seed(config: Config, recipe: Recipe, sets: Sets, seed: int) -> dict[str, Any]:
    """Run all rules from the same first labels."""
    results: dict[str, Any] = {}
    for rule in config.rules:
        curve, _ = learn(recipe, sets, rule, seed, recipe.labels[rule])
        results[rule] = summarise(curve)
    saved = {
        rule: {
            name: results[RANDOM]["labels_at"][name] / results[rule]["labels_at"][name]
            for name in TARGETS
        }
        for rule in config.rules
        if rule != RANDOM and RANDOM in results
    }
    return results | {"times_fewer_labels": saved}


def labels_table(summary: dict[str, Any], rules: tuple[str, ...]) -> Table:
    """Tabulate labels at each target, and the ratio to random acquisition."""
    columns = ["rule"]
    columns += [f"labels at {name} %" for name in TARGETS]
    columns += [f"times fewer at {name} %" for name in TARGETS] + ["median at 95 %"]
    rows = []
    for rule in rules:
        runs = [run[rule] for run in summary["seeds"].values()]
        row = [rule]
        for name in TARGETS:
            text = shown(summary, rule, "labels_at", name, factor=1, digits=0)
            row.append(text if reached(summary, rule, name) else f"over {text}")
        row += [times_fewer(summary, rule, name) for name in TARGETS]
        row.append(f"{statistics.median(run['labels_at']['95'] for run in runs):.0f}")
        rows.append(row)
    return Table(columns, rows)


def times_fewer(summary: dict[str, Any], rule: str, target: str) -> str:
    """Format the ratio to random acquisition, a lower bound if that missed the target."""
    if rule not in summary["mean"]["times_fewer_labels"]:
        return "–"
    text = shown(summary, "times_fewer_labels", rule, target, factor=1)
    return text if reached(summary, RANDOM, target) else f"over {text}"


def main(config: Config) -> dict[str, Any]:
    """Buys labels by every rule, prints the table, writes the results."""
    check_names("--rules", config.rules, ALL_RULES)
    recipe = RECIPES[config.preset]
    if config.smoke:
        recipe = replace(recipe, steps=2, samples=2, joint_samples=2, candidates=30)
        recipe = replace(recipe, labels=dict.fromkeys(ALL_RULES, 40))
    run, sets = Run(config), load(config)
    summary = run.repeat(partial(one_seed, config, recipe, sets))
    table = labels_table(summary, config.rules)
    measured = f"{len(sets.measured[1]):,} {'validation' if config.validation else 'test'} images"
    text = (
        f"Accuracy of {recipe.samples} draws on {measured} after each round; labels at which it "
        "first reaches the target; ± is the sd over seeds."
    )
    metrics = {"recipe": asdict(recipe), **summary}
    pictures = [draw_curves(run, summary, config.rules)]
    return run.report(__doc__, metrics, [table], pictures, remark=text)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
