# SPDX-License-Identifier: Apache-2.0
"""Bayesian MLP on Fashion-MNIST, with MNIST's digits as out-of-distribution inputs.

    python experiments/fashion_mnist.py [--preset published] [--repeats 3] [--data-root ROOT]

``--preset published`` reproduces the article by N. Rajkumar, "Weight Uncertainty in Neural
Networks" (2018, https://www.nitarshan.com/bayes-by-backprop): 784-400-400-10, a scale mixture
prior, two draws of the weights per minibatch of 100, Adam at a constant 1e-3, 20 epochs, and ten
networks drawn from the posterior, scored one by one, as an ensemble, and with the network of mean
weights. Its ensemble averages log-probabilities; the posterior predictive averages probabilities,
and both are reported.
"""

import math
import statistics
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import tyro
from _helpers.images import images
from _helpers.run import Data, DataSettings, RepeatedSettings, Run
from _helpers.scores import MEASURES, SCORES, detect, scores
from _helpers.tables import Scores, Table, at, table
from _helpers.training import Training, make_prior, uniform_means
from torch import Tensor, nn

import pyro_bbb as bbb
from pyro_bbb import metrics


@dataclass(frozen=True)
class Whitening:
    r"""Damped ZCA whitening, then a common length: $z = c\,Wx' / \lVert Wx' \rVert$, $x' = x - m$.

    $W = (C + \lambda I)^{-1/2}$ with mean $m$ and covariance $C$ of the training images (Krizhevsky
    2009, "Learning Multiple Layers of Features from Tiny Images", appendix A). The few directions
    in which garments vary most no longer drown the others, and no image is fainter than another.
    """

    mean: Tensor  # m of the training images, [d]
    matrix: Tensor  # W, [d, d]
    length: float  # c, the mean length of whitened training images

    @classmethod
    def of(cls, x: Tensor, ridge: float) -> "Whitening":
        r"""Learned from training images ``[n, d]``; ``ridge`` is $\lambda$, in squared pixels."""
        mean = x.mean(0)
        variances, axes = torch.linalg.eigh((x - mean).T.cov(correction=0).double())
        # rounding makes tiny variances negative; the ridge is larger by many orders of magnitude
        matrix = ((axes * (variances + ridge).rsqrt()) @ axes.T).to(x)
        return cls(mean, matrix, float(((x - mean) @ matrix).norm(dim=1).mean()))

    def __call__(self, x: Tensor) -> Tensor:
        """Images ``[n, d]`` as the network sees them."""
        z = (x - self.mean) @ self.matrix
        return z * (self.length / z.norm(dim=1, keepdim=True))


Trained: TypeAlias = tuple[bbb.BayesianModel, bbb.AutoSoftplusNormal, bbb.History]


@dataclass(frozen=True, kw_only=True)
class Recipe(Training):
    """Hyper-parameters of a training."""

    prior: tuple[float, ...]
    """(scale,) of a zero-mean Normal, or (pi, sigma1, sigma2) of a scale mixture."""
    init_loc: float | None
    """Initial means are uniform between plus and minus this; None is He's initialisation."""
    init_rho: tuple[float, float]
    """Initial rho are uniform between these; the standard deviations are softplus(rho)."""
    whitening: float | None
    """Ridge of the inputs' whitening, in squared pixels; None leaves them in [0, 1]."""
    batch_size: int  # images per step
    samples: int  # networks in the ensemble
    epochs: int = 20  # passes over the training images


@dataclass(frozen=True)
class Sets:
    """Flat images ``[n, 784]`` in [0, 1], and what the network sees of them."""

    train: Data
    test: Data
    digits: Tensor
    whiten: Whitening | None

    def seen(self, x: Tensor) -> Tensor:
        """Images as the network gets them."""
        return x if self.whiten is None else self.whiten(x)


def train(recipe: Recipe, hidden: tuple[int, ...], data: Data, seed: int) -> Trained:
    """Return a network of these hidden layers on images as it sees them."""
    torch.manual_seed(seed)  # for the initial means and scales
    network = bbb.BayesianMLP([data[0].shape[1], *hidden, 10], prior=make_prior(recipe.prior))
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=len(data[0]))
    start = None if recipe.init_loc is None else uniform_means(recipe.init_loc)
    guide = bbb.AutoSoftplusNormal(model, init_loc=start)
    for rho in guide.rhos.parameters():
        nn.init.uniform_(rho, *recipe.init_rho)
    history = recipe.fit(model, guide, data, seed=seed)
    return model, guide, history


def evaluate(trained: Trained, sets: Sets, samples: int, seed: int) -> Scores:
    """All figures of one trained network, on test garments and on digits."""
    y, inputs = sets.test[1], [sets.seen(x) for x in (sets.test[0], sets.digits)]
    predict = partial(bbb.predict, *trained[:2], num_samples=samples, seed=seed)
    garments, digits = map(predict, inputs)
    plain, ood = (bbb.predict_mean(*trained[:2], x) for x in inputs)
    accuracies = [metrics.accuracy(probs, y) for probs in garments.sample_probs]
    components = {"lowest": min(accuracies), "highest": max(accuracies)}
    return {
        "components": components | {"mean": statistics.fmean(accuracies)},
        "mean_network": scores(plain.probs, y),
        "ensemble": scores(garments.probs, y),
        "log_average": scores(log_average(garments).probs, y),
        "digits": detect(digits, garments),
        "digits_by_mean_network": metrics.auroc(ood.entropy, plain.entropy),
        "nats": {
            name: {"entropy": float(p.entropy.mean()), "epistemic": float(p.epistemic.mean())}
            for name, p in (("garments", garments), ("digits", digits))
        },
        "training_seconds": sum(trained[2].seconds),
    }


def log_average(ensemble: bbb.ClassificationPrediction) -> bbb.ClassificationPrediction:
    """Return the article's ensemble: the networks' log-probabilities averaged, then normalised."""
    mean = ensemble.sample_log_probs.mean(0, keepdim=True)
    return bbb.ClassificationPrediction(mean.log_softmax(-1))


ARTICLE = ("lowest", "mean", "highest", "mean_network", "ensemble", "log_average")
PUBLISHED = {"lowest": 0.8472, "highest": 0.8555, "mean_network": 0.8691, "log_average": 0.8765}
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


def load(config: Config, recipe: Recipe) -> Sets:
    """Return the images; whitening is learned from the training images alone."""
    get = partial(images, root=config.data_root, smoke=config.smoke)
    (x, y), (x_test, y_test) = (get("fashion_mnist", train=is_train) for is_train in (True, False))
    x, digits = x.flatten(1), get("mnist", train=False)[0].flatten(1)
    whiten = None if recipe.whitening is None else Whitening.of(x, recipe.whitening)
    return Sets((x, y), (x_test.flatten(1), y_test), digits, whiten)


def tables(record: Scores) -> list[Table]:
    """Return sampled networks, mean network and ensemble; detection of digits; both widths."""
    wide, narrow = at(record, WIDE), at(record, NARROW)
    rows = {
        "sampled networks, lowest": "components.lowest",
        "sampled networks, mean": "components.mean",
        "sampled networks, highest": "components.highest",
        "network of mean weights": "mean_network.accuracy",
        "ensemble, probabilities averaged": "ensemble.accuracy",
        "ensemble, log-probabilities averaged": "log_average.accuracy",
    }
    accuracies = [(label, keys, 100, 2) for label, keys in rows.items()]
    article = [f"{100 * PUBLISHED[k]:.2f}" if k in PUBLISHED else "–" for k in ARTICLE]
    scores = [
        (f"{label}, {summary_name}", f"{summary_name}.{keys}", factor, digits)
        for summary_name in ("mean_network", "ensemble", "log_average")
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


def main(config: Config) -> dict[str, Any]:
    """Trains both widths, evaluates, prints the tables and writes the results."""
    recipe = RECIPES[config.preset]
    widths = {WIDE: (400, 400), NARROW: (100,)}
    if config.smoke:
        recipe = replace(recipe, samples=3, epochs=2)
        widths = {WIDE: (30, 30), NARROW: (10,)}
    run, sets = Run(config), load(config, recipe)
    data = sets.seen(sets.train[0]), sets.train[1]

    def one(seed: int) -> Scores:
        networks = {name: train(recipe, hidden, data, seed) for name, hidden in widths.items()}
        samples = recipe.samples
        return {name: evaluate(trained, sets, samples, seed) for name, trained in networks.items()}

    summary = run.repeat(one)
    metrics = {"recipe": asdict(recipe), **summary}
    return run.report(__doc__, metrics, tables(summary))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
