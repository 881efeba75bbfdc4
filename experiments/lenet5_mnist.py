# SPDX-License-Identifier: Apache-2.0
"""Bayesian LeNet-5 on MNIST: accuracy, out-of-distribution detection and refusal.

    python experiments/lenet5_mnist.py [--preset published] [--dataset fashion_mnist] [--repeats 3]

``--preset published`` reproduces the example of TensorFlow Probability (2018,
https://github.com/tensorflow/probability, examples/bayesian_neural_network.py): flipout on every
kernel, biases without uncertainty, prior N(0, 1), closed-form KL, Adam at a constant 1e-3, 6,000
steps of 128 images, 50 draws for each prediction. (Its initial rho are spread by 0.1 around the -3
that all start from here.)

``docs/development/experiments.md`` has the other settings, and those tried.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import tyro
from _helpers import repeats
from _helpers.images import images, train_and_validation
from _helpers.lenet5 import Recipe, train, train_plain
from _helpers.repeats import repeat
from _helpers.run import Data, DataSettings, Picture, RepeatedSettings, Run, Table
from _helpers.scores import MEASURES, SCORES, detect, scores
from torch import Tensor

import pyro_bbb as bbb
from pyro_bbb import metrics

Answers: TypeAlias = dict[str, bbb.ClassificationPrediction]
Scores: TypeAlias = dict[str, Any]
NOISE = "Gaussian noise"
PUBLISHED_CUT_OFF = 0.2

PUBLISHED = {  # LeNet-5 of uncertainty-baselines, github.com/google/uncertainty-baselines
    "mnist": {
        "variational": {"accuracy": 0.985, "nll": 0.048, "ece": 0.010},
        "deterministic": {"accuracy": 0.991, "nll": 0.037},
    },
    "fashion_mnist": {
        "variational": {"accuracy": 0.895, "nll": 0.292, "ece": 0.011},
        "deterministic": {"accuracy": 0.910, "nll": 0.321},
    },
}

ALL = "all layers"
NUM_SHOWN = 500  # validation images of a snapshot; a fifth as many are noise


@dataclass(frozen=True)
class Sets:
    """The images of a run, ``[n, 1, 28, 28]``, and labels ``[n]``."""

    train: Data
    valid: Data
    test: Data
    ood: dict[str, Tensor]


def noise(count: int, seed: int) -> Tensor:
    """Images of which every pixel is an independent draw from N(0, 1)."""
    return torch.randn(count, 1, 28, 28, generator=torch.Generator().manual_seed(seed))


def scores_table(dataset: str, summary: Scores, variants: dict[str, Scores]) -> Table:
    """Tabulate scores on the test images, and published ones."""
    kinds = {"ensemble": (summary, "test"), "network of mean weights": (summary, "mean_network")}
    kinds |= {f"ensemble, random: {name}": (each, "test") for name, each in variants.items()}
    rows = {label: repeats.at(each, part) for label, (each, part) in kinds.items()}
    published = {}
    for name, known in PUBLISHED[dataset].items():
        ece = f"{100 * known['ece']:.1f}" if "ece" in known else "–"
        published[f"published, {name}"] = (
            f"{100 * known['accuracy']:.1f}",
            f"{known['nll']:.3f}",
            ece,
        )
    return repeats.table("on the test images", rows, SCORES, published)


def ood_table(summaries: dict[str, Scores]) -> Table:
    """AUROC of three measures, by random layers and kind of image."""
    cells = [
        (
            f"{kind}; random: {name}",
            *(repeats.shown(s, "foreign", kind, m, digits=1) for m in MEASURES),
        )
        for kind in next(iter(summaries.values()))["mean"]["foreign"]
        for name, s in summaries.items()
    ]
    return Table(("AUROC (%) against test images", *MEASURES), cells)


def refusal_table(summary: Scores) -> Table:
    """Tabulate the rates of refusal at both cut-offs."""
    cut_off = repeats.shown(summary, "cut_off", factor=1)
    columns = (
        (f"cut-off {PUBLISHED_CUT_OFF}", "published", 100, 1),
        (f"cut-off {cut_off}", "validation", 100, 1),
    )
    kinds = {k: repeats.at(summary, "refused", k) for k in summary["mean"]["refused"]}
    return repeats.table("refused (%)", kinds, columns)


def draw_steps(run: Run, steps: list[Scores]) -> Picture:
    """Plot held-out log-probability and entropies by step."""
    at = [step["step"] for step in steps]
    entropies = {"validation": "entropy", NOISE: "noise_entropy"}
    panels = {
        "Held-out nats per image": {"validation": (at, [step["held_out_nats"] for step in steps])},
        "Mean entropy (nats)": {
            label: (at, [step[key] for step in steps]) for label, key in entropies.items()
        },
    }
    caption = f"{NUM_SHOWN} validation images, and a fifth as many of noise."
    return run.curves("steps", caption, panels, xlabel="step")


Predict: TypeAlias = Callable[[Tensor], bbb.ClassificationPrediction]

NAMES = {"mnist": "digits", "fashion_mnist": "garments"}
VARIANTS = {"all layers": "*", "dense layers": "fc*", "last layer": "fc2", "none": None}


@dataclass(frozen=True)
class Config(RepeatedSettings, DataSettings):
    """Settings of one run."""

    preset: Literal["published", "ours", "ivon"] = "ours"
    """The example's recipe to the letter, the one found better on validation images, or IVON."""
    dataset: Literal["mnist", "fashion_mnist"] = "mnist"
    """Training data; the other set is out-of-distribution."""
    steps: int | None = None
    """Training steps, a multiple of ``every``; the recipe's own are 6,000."""
    every: int = 400
    """Steps between two snapshots."""
    samples: int = 50
    """Networks drawn from the posterior for each prediction."""
    images: int = 2000
    """Validation images for the cut-off, and out-of-distribution images of each kind."""
    answered: float = 0.98
    """Coverage of the validation images at our refusal cut-off."""
    compared: int = 1
    """Seeds, from the first, with which partly random networks are trained too; 0 for none."""
    output: Path = Path("results/lenet5_mnist")
    """Folder for results."""


RECIPES = {
    "published": Recipe(
        prior_scale=1.0,
        random="weight",
        init_scale=0.1,
        init_rho=-3.0,
        loss="mean_field",
        lr_schedule="constant",
        steps=6000,
    ),
    "ours": Recipe(
        prior_scale=1.0,
        random="*",
        init_scale=None,
        init_rho=-5.0,
        loss="trace",
        steps=6000,
    ),
    "ivon": Recipe(
        prior_scale=None,
        random="*",
        init_scale=None,
        init_rho=-5.0,
        loss="trace",
        estimator="reparam",
        optimizer="ivon",
        engine="compiled",
        temperature=0.1,
        lr=0.03,
        steps=12_000,
    ),
}


def load(config: Config) -> Sets:
    """Load the split training part, the test part and out-of-distribution images."""
    other = next(name for name in NAMES if name != config.dataset)
    get = partial(images, root=config.data_root, smoke=config.smoke)
    train, valid = train_and_validation(get(config.dataset, train=True), fraction=1 / 12)
    ood = {
        NOISE: noise(config.images, seed=1),
        NAMES[other]: get(other, train=False)[0][: config.images],
    }
    return Sets(train, valid, get(config.dataset, train=False), ood)


def answer(config: Config, model: Any, guide: Any, x: Tensor, seed: int = 0) -> Any:
    """The posterior predictive; passes of this size stay in the processor's cache."""
    return bbb.predict(model, guide, x, num_samples=config.samples, batch_size=250, seed=seed)


def evaluate(config: Config, sets: Sets, predict: Predict) -> tuple[Scores, Answers]:
    """Score test images, and the detection of out-of-distribution ones."""
    x, y = sets.test
    inside, valid = predict(x), predict(sets.valid[0][: config.images])
    kinds = {kind: predict(ood) for kind, ood in sets.ood.items()}
    cut_off = float(valid.confidence.quantile(1 - config.answered))
    everything = {NAMES[config.dataset]: inside, **kinds}
    figures = {
        "test": scores(inside.probs, y),
        "area_under_risk_coverage": metrics.area_under_risk_coverage(
            inside.confidence, inside.label == y
        ),
        "foreign": {kind: detect(answer, inside) for kind, answer in kinds.items()},
        "cut_off": cut_off,
        "refused": {kind: refusals(answer, cut_off) for kind, answer in everything.items()},
        "accuracy_of_answers": {
            name: metrics.accuracy(inside.probs[answered], y[answered])
            for name, at in (("published", PUBLISHED_CUT_OFF), ("validation", cut_off))
            if (answered := ~inside.refuse(at)).any()
        },
    }
    return figures, everything


def refusals(answer: bbb.ClassificationPrediction, cut_off: float) -> Scores:
    """Compute the rates of refusal at the published cut-off and at ours."""
    return {
        "published": float(answer.refuse(PUBLISHED_CUT_OFF).double().mean()),
        "validation": float(answer.refuse(cut_off).double().mean()),
    }


def single_networks(ensemble: bbb.ClassificationPrediction, mean: Any, y: Tensor) -> Scores:
    """The network of mean weights, and the drawn networks one by one."""
    hits = ensemble.sample_probs.argmax(-1) == y  # [draws, n]
    return {
        "mean_network": scores(mean.probs, y),
        "draw": {"accuracy": float(hits.double().mean())},
    }


def recorder(config: Config, sets: Sets, steps: list[Scores]) -> Callable[[bbb.EpochEnd], None]:
    """Make a callback that records held-out log-likelihood, accuracy and entropies."""
    (x, y), pixels = sets.valid, noise(NUM_SHOWN // 5, seed=2)
    x, y = x[:NUM_SHOWN], y[:NUM_SHOWN]

    def callback(state: bbb.EpochEnd) -> None:
        inside, outside = (answer(config, state.model, state.guide, z) for z in (x, pixels))
        steps.append(
            {
                "step": len(state.history.steps),
                "held_out_nats": float(inside.log_prob(y).mean()),
                "accuracy": metrics.accuracy(inside.probs, y),
                "entropy": float(inside.entropy.mean()),
                "noise_entropy": float(outside.entropy.mean()),
                "noise": detect(outside, inside),
            }
        )

    return callback


def compare(config: Config, recipe: Recipe, sets: Sets) -> dict[str, Scores]:
    """Score partly random networks, and one of fixed weights."""

    def one(layers: str | None, seed: int) -> Scores:
        return evaluate(config, sets, partly(config, recipe, sets, layers, seed))[0]

    return {
        name: repeat(partial(one, layers), config.seed, config.compared)
        for name, layers in VARIANTS.items()
        if name != ALL and config.compared
    }


def partly(config: Config, recipe: Recipe, sets: Sets, layers: str | None, seed: int) -> Predict:
    """Train with random weights in some layers or none; return its predictor."""
    if layers is not None:
        model, guide, _ = train(recipe, sets.train, layers, seed, config.every)
        return partial(answer, config, model, guide, seed=seed)
    network = train_plain(recipe, sets.train, seed)

    def predict(x: Tensor) -> bbb.ClassificationPrediction:
        with torch.no_grad():
            logits = torch.cat([network(part) for part in x.split(250)])
        return bbb.ClassificationPrediction(logits.log_softmax(-1)[None])  # an ensemble of one

    return predict


def main(config: Config) -> dict[str, Any]:
    """Trains, evaluates, prints the tables and writes the results."""
    if config.smoke:
        config = replace(config, steps=4, every=2, samples=3, images=20)
    recipe = RECIPES[config.preset]
    recipe = replace(recipe, steps=config.steps or recipe.steps)
    if recipe.steps % config.every:
        raise SystemExit(f"--steps must be a multiple of --every, got {recipe.steps}")
    run, sets = Run(config), load(config)
    steps: list[Scores] = []  # of the first seed

    def one(seed: int) -> Scores:
        callbacks = (recorder(config, sets, steps),) if seed == config.seed else ()
        layers = VARIANTS[ALL] or ""
        model, guide, history = train(recipe, sets.train, layers, seed, config.every, callbacks)
        predict = partial(answer, config, model, guide, seed=seed)
        figures, everything = evaluate(config, sets, predict)
        x, y = sets.test
        mean = bbb.predict_mean(model, guide, x, batch_size=250)
        figures |= single_networks(everything[NAMES[config.dataset]], mean, y)
        figures["training_seconds"] = sum(history.seconds)
        return figures

    summary = repeat(one, config.seed, config.repeats, run.seeds())
    variants = compare(config, recipe, sets)
    record = run.finish(
        {"recipe": asdict(recipe), **summary, "steps": steps, "random_layers": variants}
    )
    tables = [
        scores_table(config.dataset, summary, variants),
        ood_table({ALL: summary, **variants}),
        refusal_table(summary),
    ]
    pictures = [draw_steps(run, steps)]
    run.report("LeNet-5 with random weights", SUMMARY, record, tables, pictures)
    return record


SUMMARY = (
    "A convolutional network whose weights are distributions. On digits its draws agree; where "
    "they do not, the network can refuse to answer. AUROC is the probability that an "
    "out-of-distribution image is less certain than a test image; our cut-off is that of the "
    "validation images. Published are LeNet-5s of uncertainty-baselines."
)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
