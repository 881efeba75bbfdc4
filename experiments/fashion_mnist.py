# SPDX-License-Identifier: Apache-2.0
"""Bayesian MLP on Fashion-MNIST, with MNIST's digits as out-of-distribution inputs.

    python experiments/fashion_mnist.py [--preset published] [--repeats 3] [--data-root ROOT]

``--preset published`` reproduces the article by N. Rajkumar, "Weight Uncertainty in Neural
Networks" (2018, https://www.nitarshan.com/bayes-by-backprop): 784-400-400-10, a scale mixture
prior, two draws of the weights per minibatch of 100, Adam at a constant 1e-3, 20 epochs, and ten
networks drawn from the posterior, scored one by one, as an ensemble, and with the network of mean
weights. Its ensemble averages log-probabilities; the posterior predictive averages probabilities,
and both are reported.

``docs/development/experiments.md`` has the other settings, and those tried.
"""

import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tyro
from _helpers.fashion_mnist import Recipe, Scores, Sets, Whitening, evaluate, predict, train
from _helpers.images import images
from _helpers.repeats import at, repeat, table
from _helpers.run import DataSettings, RepeatedSettings, Run, Table
from _helpers.scores import MEASURES, SCORES

ARTICLE = ("lowest", "mean", "highest", "mean_network", "ensemble", "log_average")
PUBLISHED = {"lowest": 0.8472, "highest": 0.8555, "mean_network": 0.8691, "log_average": 0.8765}
NUM_SHOWN = 1000  # images of each kind in the statistics of votes
WIDE, NARROW = "400-400", "100"

RECIPES = {
    "published": Recipe(
        prior=(0.5, 1.0, math.exp(-6)),
        init_loc=0.2,
        init_rho=(-5.0, -4.0),
        whitening=None,
        num_particles=2,
        batch_size=100,
        lr_schedule="constant",
        samples=10,
    ),
    "ours": Recipe(
        prior=(1.0,),
        init_loc=None,
        init_rho=(-4.5, -4.5),
        whitening=0.5,
        batch_size=128,
        samples=50,
    ),
}


@dataclass(frozen=True)
class Config(RepeatedSettings, DataSettings):
    """Settings of one run."""

    preset: Literal["published", "ours"] = "ours"
    """The article's recipe to the letter, or the one found better on validation images."""
    epochs: int | None = None
    """Passes over the training images, instead of the recipe's 20."""
    voters: int = 100
    """Networks drawn from the posterior for the agreement of votes."""
    output: Path = Path("results/fashion_mnist")
    """Folder for results."""


def load(config: Config, recipe: Recipe) -> Sets:
    """The images; whitening is learned from the training images alone."""
    get = partial(images, root=config.data_root, smoke=config.smoke)
    (x, y), (x_test, y_test) = (get("fashion_mnist", train=part) for part in (True, False))
    x, digits = x.flatten(1), get("mnist", train=False)[0].flatten(1)
    whiten = None if recipe.whitening is None else Whitening.of(x, recipe.whitening)
    return Sets((x, y), (x_test.flatten(1), y_test), digits, whiten)


def tables(record: Scores) -> list[Table]:
    """Sampled networks, mean network and ensemble; detection of digits; both widths."""
    wide, narrow = at(record, WIDE), at(record, NARROW)
    kinds = {
        "sampled networks, lowest": "components.lowest",
        "sampled networks, mean": "components.mean",
        "sampled networks, highest": "components.highest",
        "network of mean weights": "mean_network.accuracy",
        "ensemble, probabilities averaged": "ensemble.accuracy",
        "ensemble, log-probabilities averaged": "log_average.accuracy",
    }
    accuracies = [(label, keys, 100, 2) for label, keys in kinds.items()]
    article = [f"{100 * PUBLISHED[k]:.2f}" if k in PUBLISHED else "–" for k in ARTICLE]
    scores = [
        (f"{label}, {kind}", f"{kind}.{keys}", factor, digits)
        for kind in ("mean_network", "ensemble", "log_average")
        for label, keys, factor, digits in SCORES[1:]
    ]
    aurocs = [(f"AUROC by {m} (%)", f"digits.{m}", 100, 1) for m in MEASURES]
    aurocs.append(("of the mean network", "digits_by_mean_network", 100, 1))
    entropies = [
        ("accuracy (%)", "ensemble.accuracy", 100, 2),
        ("NLL (nats)", "ensemble.nll", 1, 3),
        ("entropy on garments (nats)", "nats.garments.entropy", 1, 3),
        ("entropy on digits (nats)", "nats.digits.entropy", 1, 3),
        ("of it epistemic (nats)", "nats.digits.epistemic", 1, 3),
        ("AUROC by entropy (%)", "digits.entropy", 100, 1),
    ]
    return [
        table("test accuracy (%)", {"ours": wide}, accuracies, {"article": article}),
        table("on the test garments", {WIDE: wide}, scores),
        table("digits against garments", {WIDE: wide}, aurocs),
        table("hidden units", {WIDE: wide, NARROW: narrow}, entropies),
    ]


SUMMARY = (
    "Networks drawn from one posterior agree on garments and argue about digits. Their ensemble is "
    "more accurate than each of them, and its entropy says what it has not learned. ECE is the gap "
    "between confidence and accuracy, AUROC the probability that a digit is less certain than a "
    "garment; ± is the standard deviation over seeds."
)


def main(config: Config) -> dict[str, Any]:
    """Trains both widths, evaluates, prints the tables and writes the results."""
    recipe = RECIPES[config.preset]
    widths = {WIDE: (400, 400), NARROW: (100,)}
    if config.smoke:
        config = replace(config, epochs=2, voters=4)
        recipe = replace(recipe, samples=3)
        widths = {WIDE: (30, 30), NARROW: (10,)}
    recipe = replace(recipe, epochs=config.epochs or recipe.epochs)
    run, sets = Run(config), load(config, recipe)
    data = sets.seen(sets.train[0]), sets.train[1]

    def one(seed: int) -> Scores:
        figures = {}
        for name, hidden in widths.items():
            trained = train(recipe, hidden, data, seed)
            answers = predict(trained, sets, recipe.samples, seed)
            ballots = predict(trained, sets, config.voters, seed, first=NUM_SHOWN)
            figures[name] = evaluate(trained, sets, answers, ballots)
        return figures

    summary = repeat(one, config.seed, config.repeats, run.seeds())
    record = run.finish({"recipe": asdict(recipe), **summary})
    run.report("Fashion-MNIST and out-of-distribution digits", SUMMARY, record, tables(record))
    return record


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
