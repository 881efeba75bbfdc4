# SPDX-License-Identifier: Apache-2.0
"""Bayesian LeNet-5 on MNIST: accuracy, out-of-distribution detection and refusal.

    python experiments/lenet5_mnist.py [--preset published] [--dataset fashion_mnist] [--repeats 3]

``--preset published`` reproduces the example of TensorFlow Probability (2018,
https://github.com/tensorflow/probability, examples/bayesian_neural_network.py): flipout on every
kernel, biases without uncertainty, prior N(0, 1), closed-form KL, Adam at a constant 1e-3, 6,000
steps (here 14 passes, 6,020) of 128 images, 50 draws for each prediction. (Its initial rho are
spread by 0.1 around the -3 that all start from here.)
"""

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import tyro
from _helpers import tables as tabulate
from _helpers.images import images, train_and_validation
from _helpers.run import Data, DataSettings, RepeatedSettings, Run
from _helpers.scores import MEASURES, SCORES, detect, scores
from _helpers.tables import Scores, Table
from _helpers.training import Training, he, lenet5
from pyro.distributions import Normal
from torch import Tensor, nn

import pyro_bbb as bbb


@dataclass(frozen=True, kw_only=True)
class Recipe(Training):
    """Hyper-parameters of a network and its training."""

    prior_scale: float | None
    """Standard deviation of the Normal prior of every random weight; None is He's, by fan-in."""
    random: str  # random parameters of a layer: ``"weight"`` or ``"*"``
    init_scale: float | None
    """Spread of the kernels' initial means; None is He's, by fan-in. Biases start at 0."""
    init_rho: float  # initial rho; standard deviations are softplus(rho)
    loss: str  # ``"mean_field"`` (closed-form KL) or ``"trace"`` (KL of the draws)
    epochs: int = 14  # passes over the training images, each of 430 steps
    estimator: str = "flipout"
    optimizer: str | None = None  # ``"ivon"``, natural gradients; None is Adam
    engine: str = "auto"  # how steps are run
    temperature: float = 1.0  # weight of the KL in the ELBO; 1 is Bayes' rule
    batch_size: int = 128  # images per step


def train(
    recipe: Recipe, data: Data, seed: int
) -> tuple[bbb.BayesianModel, bbb.AutoSoftplusNormal, bbb.History]:
    """Train the network from the recipe's initial weights."""
    torch.manual_seed(seed)
    plain, scale = he(lenet5()), recipe.prior_scale
    if recipe.init_scale is not None:
        for name, parameter in plain.named_parameters():
            if not name.endswith("bias"):
                nn.init.normal_(parameter, std=recipe.init_scale)
    prior = bbb.priors.FanInNormal() if scale is None else Normal(0.0, scale)
    network = bbb.bayesianize(plain, prior, where=f"*.{recipe.random}")
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=len(data[0]))
    guide = bbb.AutoSoftplusNormal(model, init_rho=recipe.init_rho)
    schedule = bbb.KLSchedule(temperature=recipe.temperature)
    return model, guide, recipe.fit(model, guide, data, kl_schedule=schedule, seed=seed)


NOISE = "Gaussian noise"
PUBLISHED_CUT_OFF = 0.2
ANSWERED = 0.98  # coverage of the validation images at our cut-off

PUBLISHED = {  # LeNet-5 of uncertainty-baselines, github.com/google/uncertainty-baselines
    "mnist": {
        "published, variational": ("98.5", "0.048", "1.0"),
        "published, deterministic": ("99.1", "0.037", "–"),
    },
    "fashion_mnist": {
        "published, variational": ("89.5", "0.292", "1.1"),
        "published, deterministic": ("91.0", "0.321", "–"),
    },
}


@dataclass(frozen=True)
class Sets:
    """The images of a run, ``[n, 1, 28, 28]``, and labels ``[n]``."""

    train: Data
    valid: Data
    test: Data
    ood: dict[str, Tensor]


def scores_table(dataset: str, summary: Scores) -> Table:
    """Tabulate scores on the test images, and published ones."""
    keys = {"ensemble": "test", "network of mean weights": "mean_network"}
    rows = {label: tabulate.at(summary, key) for label, key in keys.items()}
    return tabulate.table("on the test images", rows, SCORES, PUBLISHED[dataset])


def ood_table(summary: Scores) -> Table:
    """AUROC of three measures, by kind of image."""
    rows = {ood: tabulate.at(summary, "foreign", ood) for ood in summary["mean"]["foreign"]}
    columns = [(measure, measure, 100, 1) for measure in MEASURES]
    return tabulate.table("AUROC (%) against test images", rows, columns)


def refusal_table(summary: Scores) -> Table:
    """Tabulate the rates of refusal at both cut-offs."""
    cut_off = tabulate.shown(summary, "cut_off", factor=1)
    columns = (
        (f"cut-off {PUBLISHED_CUT_OFF}", "published", 100, 1),
        (f"cut-off {cut_off}", "validation", 100, 1),
    )
    refused = {k: tabulate.at(summary, "refused", k) for k in summary["mean"]["refused"]}
    return tabulate.table("refused (%)", refused, columns)


NAMES = {"mnist": "digits", "fashion_mnist": "garments"}


@dataclass(frozen=True)
class Config(RepeatedSettings, DataSettings):
    """Settings of one run."""

    preset: Literal["published", "ours", "ivon"] = "ours"
    """The example's recipe to the letter, the one found better on validation images, or IVON."""
    dataset: Literal["mnist", "fashion_mnist"] = "mnist"
    """Training data; the other set is out-of-distribution."""
    samples: int = 50
    """Networks drawn from the posterior for each prediction."""
    images: int = 2000
    """Validation images for the cut-off, and out-of-distribution images of each kind."""


RECIPES = {
    "published": Recipe(
        prior_scale=1.0,
        random="weight",
        init_scale=0.1,
        init_rho=-3.0,
        loss="mean_field",
        lr_schedule="constant",
    ),
    "ours": Recipe(
        prior_scale=1.0,
        random="*",
        init_scale=None,
        init_rho=-5.0,
        loss="trace",
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
        epochs=28,
    ),
}


def load(config: Config) -> Sets:
    """Load the split training part, the test part and out-of-distribution images."""
    ood_dataset = next(name for name in NAMES if name != config.dataset)
    get = partial(images, root=config.data_root, smoke=config.smoke)
    train, valid = train_and_validation(get(config.dataset, train=True), fraction=1 / 12)
    generator = torch.Generator().manual_seed(1)
    ood = {
        NOISE: torch.randn(config.images, 1, 28, 28, generator=generator),
        NAMES[ood_dataset]: get(ood_dataset, train=False)[0][: config.images],
    }
    return Sets(train, valid, get(config.dataset, train=False), ood)


def evaluate(config: Config, sets: Sets, model: Any, guide: Any, seed: int) -> Scores:
    """Score test images, and the detection of out-of-distribution ones."""
    # passes of this size stay in the processor's cache
    options = {"num_samples": config.samples, "batch_size": 250, "seed": seed}
    predict = partial(bbb.predict, model, guide, **options)
    (x, y), kind = sets.test, NAMES[config.dataset]
    valid = predict(sets.valid[0][: config.images])
    answers = {kind: predict(x)} | {ood: predict(images) for ood, images in sets.ood.items()}
    inside, cut_off = answers[kind], float(valid.confidence.quantile(1 - ANSWERED))
    cuts = {"published": PUBLISHED_CUT_OFF, "validation": cut_off}
    mean = bbb.predict_mean(model, guide, x, batch_size=250)
    hits = inside.sample_probs.argmax(-1) == y  # [draws, n]
    return {
        "test": scores(inside.probs, y),
        "mean_network": scores(mean.probs, y),
        "draw": {"accuracy": float(hits.double().mean())},
        "foreign": {ood: detect(answers[ood], inside) for ood in sets.ood},
        "cut_off": cut_off,
        "refused": {
            name: {cut: float(answer.refuse(at).double().mean()) for cut, at in cuts.items()}
            for name, answer in answers.items()
        },
    }


def main(config: Config) -> dict[str, Any]:
    """Trains, evaluates, prints the tables and writes the results."""
    recipe = RECIPES[config.preset]
    if config.smoke:
        config, recipe = replace(config, samples=3, images=20), replace(recipe, epochs=1)
    run, sets = Run(config), load(config)

    def one(seed: int) -> Scores:
        model, guide, history = train(recipe, sets.train, seed)
        seconds = {"training_seconds": sum(history.seconds)}
        return evaluate(config, sets, model, guide, seed) | seconds

    summary = run.repeat(one)
    tables = [scores_table(config.dataset, summary), ood_table(summary), refusal_table(summary)]
    return run.report(__doc__, {"recipe": asdict(recipe), **summary}, tables)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
