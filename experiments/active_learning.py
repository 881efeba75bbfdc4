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

``docs/development/experiments.md`` has the other settings, and those tried.
"""

import statistics
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import tyro
from _helpers.images import images, train_and_validation
from _helpers.label_pool import (
    RANDOM,
    SCORES,
    TARGETS,
    TOGETHER,
    Pool,
    Sets,
    acquire,
    draw_curves,
    finding,
    labels_at,
    reached,
)
from _helpers.repeats import repeat, shown
from _helpers.run import (
    Data,
    DataSettings,
    RepeatedSettings,
    Run,
    Table,
    check_names,
)
from _helpers.scores import scores
from _helpers.training import Training
from pyro.distributions import Normal
from torch import Tensor, nn
from tqdm import tqdm

import pyro_bbb as bbb

RULES = ("BALD", "entropy", RANDOM)
ALL_RULES = (*SCORES, *TOGETHER, RANDOM)


@dataclass(frozen=True, kw_only=True)
class Recipe(Training):
    """The network, its training, and how labels are bought."""

    channels: tuple[int, int]
    """Kernels of the two convolutions."""
    kernel_size: int
    """Their side."""
    first_pool: bool
    """Whether the first convolution is pooled as well as the second."""
    labels: dict[str, int]
    """Number of labels at which each rule ends."""
    growth: float
    """Labels bought at once, as a fraction of the labels so far..."""
    least: int = 10
    """...but no fewer than this."""
    start: int = 20
    """Labels at the beginning, equally many of each class."""
    candidates: int = 3000
    """Unlabelled images scored in each round, sampled at random."""
    hidden: int = 128
    """Units of the dense layer."""
    prior_scale: float = 1.0
    """Standard deviation of the Normal prior of the dense weights."""
    init_rho: float = -3.0
    """Initial rho; standard deviations are softplus(rho)."""
    lr: float = 5e-3
    """Adam's learning rate at the start."""
    steps: int = 150
    """Training steps in each round, on from the means of the round before."""
    batch_size: int = 64
    """Images per step."""
    estimator: str = "local_reparam"
    """Gradient estimator."""
    samples: int = 20
    """Draws for each prediction."""
    joint_samples: int = 100
    """Draws of the weights for rules that choose inputs together."""
    networks: int = 1
    """Networks from different starts, whose draws are put together."""


@dataclass(frozen=True)
class Config(RepeatedSettings, DataSettings):
    """Settings of one run."""

    preset: Literal["published", "ours", "batches"] = "ours"
    """Network and rounds of the paper; those that a processor can do; and with ten labels each."""
    rules: tuple[str, ...] = RULES
    """Acquisition rules: BALD, entropy, random, "BatchBALD", "diverse BALD"."""
    labels: int | None = None
    """Ends every rule at this number of labels; the recipe's own by default."""
    validation: bool = False
    """Measure on validation images instead of the test part, as for choosing settings."""
    output: Path = Path("results/active_learning")
    """Folder for results."""


RECIPES = {
    "published": Recipe(
        channels=(32, 32),
        kernel_size=4,
        first_pool=False,
        labels=dict.fromkeys(ALL_RULES, 1000),
        growth=0.0,
        candidates=50_000,
    ),
    "ours": Recipe(
        channels=(16, 32),
        kernel_size=5,
        first_pool=True,
        labels=dict.fromkeys(ALL_RULES, 400) | {RANDOM: 1200},
        growth=0.25,
    ),
    "batches": Recipe(
        channels=(16, 32),
        kernel_size=5,
        first_pool=True,
        labels=dict.fromkeys(ALL_RULES, 250),
        growth=0.0,
        networks=5,
        samples=50,
    ),
}


def load(config: Config) -> Sets:
    """The pool is the training part without 10,000 validation images."""
    get = partial(images, "mnist", config.data_root, smoke=config.smoke)
    pool, valid = train_and_validation(get(train=True))
    return Sets(pool, valid if config.validation else get(train=False))


def make_network(recipe: Recipe) -> nn.Sequential:
    """Two convolutions and two dense layers, from He's initial weights."""
    (first, second), size = recipe.channels, recipe.kernel_size
    layers: list[nn.Module] = [nn.Conv2d(1, first, size)]
    layers += [nn.MaxPool2d(2)] if recipe.first_pool else []
    layers += [nn.ReLU(), nn.Conv2d(first, second, size), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()]
    inputs = nn.Sequential(*layers)(torch.zeros(1, 1, 28, 28)).shape[1]
    layers += [nn.Linear(inputs, recipe.hidden), nn.ReLU(), nn.Linear(recipe.hidden, 10)]
    network = nn.Sequential(*layers)
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.kaiming_normal_(parameter)
    return network.to(memory_format=torch.channels_last)  # half the time on a processor


Trained: TypeAlias = tuple[bbb.BayesianModel, bbb.AutoSoftplusNormal]


def train(recipe: Recipe, data: Data, seed: int, before: Trained | None = None) -> Trained:
    """A network trained on the labels that there are, from where it was or from a new start."""
    torch.manual_seed(seed)
    if before is None:
        network = bbb.bayesianize(
            make_network(recipe),
            Normal(0.0, recipe.prior_scale),
            where=lambda _, module: isinstance(module, nn.Linear),
        )
        start = None
    else:
        network = before[0].network
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
    each = max(1, num_samples // len(networks))
    found = [bbb.predict(*trained, x, num_samples=each, **options) for trained in networks]
    joined = torch.cat([prediction.sample_log_probs for prediction in found])
    return replace(found[0], sample_log_probs=joined)


def learn(
    recipe: Recipe, sets: Sets, rule: str, seed: int, most: int
) -> tuple[dict[str, Any], Pool]:
    """Rounds of training, measuring and buying labels by one rule.

    Returns:
        Scores by number of labels, and the pool as it is then.
    """
    pool = Pool(*sets.pool, recipe.start, torch.Generator().manual_seed(seed))
    curve: dict[str, Any] = {"labels": [], "accuracy": [], "nll": []}
    x, y = sets.measured
    networks: list[Any] = [None] * recipe.networks
    with tqdm(total=most, initial=len(pool), desc=f"{rule}, seed {seed}", unit="label") as bar:
        while True:
            networks = [
                train(recipe, pool.data, 1000 * (seed + 1000 * i) + len(pool), before)
                for i, before in enumerate(networks)
            ]
            by_draws = partial(
                predict,
                networks,
                num_samples=recipe.samples,
                seed=len(pool),
                estimator="local_reparam",
            )
            found = scores(by_draws(x).probs, y)
            for name, value in (("labels", len(pool)), *found.items()):
                curve.setdefault(name, []).append(value)
            if len(pool) >= most:
                return curve, pool
            count = min(max(recipe.least, int(recipe.growth * len(pool))), most - len(pool))
            if rule in TOGETHER:
                by_draws = partial(by_draws, num_samples=recipe.joint_samples, estimator="reparam")
            acquire(pool, rule, by_draws, count, recipe.candidates)
            bar.update(count)


def summarise(curve: dict[str, Any]) -> dict[str, Any]:
    """Summarise a rule: labels at each target; a missed target counts as the last number."""
    found = {
        name: labels_at(curve["labels"], curve["accuracy"], target)
        for name, target in TARGETS.items()
    }
    return {
        "labels_at": {name: curve["labels"][-1] if n is None else n for name, n in found.items()},
        "reached": {name: n is not None for name, n in found.items()},
        "final": {name: curve[name][-1] for name in ("labels", "accuracy", "nll")},
        "curve": curve,
    }


def one_seed(config: Config, recipe: Recipe, sets: Sets, seed: int) -> dict[str, Any]:
    """Run all rules from the same first labels."""
    results: dict[str, Any] = {}
    for rule in config.rules:
        curve, _ = learn(recipe, sets, rule, seed, config.labels or recipe.labels[rule])
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
        config = replace(config, labels=40)
    run, sets = Run(config), load(config)
    one: Callable[[int], dict[str, Any]] = partial(one_seed, config, recipe, sets)
    summary = repeat(one, config.seed, config.repeats, run.seeds())
    record = run.finish({"recipe": asdict(recipe), **summary})
    table = labels_table(summary, config.rules)
    measured = f"{len(sets.measured[1]):,} {'validation' if config.validation else 'test'} images"
    text = (
        f"{finding(summary, config.rules)}. Accuracy of {recipe.samples} draws on {measured} after "
        "each round; labels at which it first reaches the target; ± is the sd over seeds."
    )
    pictures = [draw_curves(run, summary, config.rules)]
    run.report("Active learning", text, record, [table], pictures)
    return record


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
