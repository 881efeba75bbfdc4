# SPDX-License-Identifier: Apache-2.0
"""Whitening, training and scores of the networks of `fashion_mnist`."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

import pyro_bbb as bbb
from _helpers.run import Data
from _helpers.scores import detect, scores
from _helpers.training import Training, make_prior, uniform_means
from pyro_bbb import metrics


@dataclass(frozen=True)
class Whitening:
    r"""Damped ZCA whitening, then a common length: $z = c\,Wx' / \lVert Wx' \rVert$, $x' = x - m$.

    $W = (C + \lambda I)^{-1/2}$ with mean $m$ and covariance $C$ of the training images (Krizhevsky
    2009, "Learning Multiple Layers of Features from Tiny Images", appendix A). The few directions
    in which garments vary most no longer drown the others, and no image is fainter than another.

    Args:
        mean: of the training images, ``[d]``.
        matrix: $W$, ``[d, d]``.
        length: $c$, the mean length of whitened training images.
    """

    mean: Tensor
    matrix: Tensor
    length: float

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


Scores: TypeAlias = dict[str, Any]
Answers: TypeAlias = dict[str, bbb.ClassificationPrediction]
GARMENTS, DIGITS = "garments", "digits"


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
    batch_size: int
    """Images per step."""
    samples: int
    """Networks in the ensemble."""
    epochs: int = 20
    """Passes over the training images."""


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


@dataclass(frozen=True)
class Trained:
    """A network after its training."""

    model: bbb.BayesianModel
    guide: bbb.AutoSoftplusNormal
    history: bbb.History


def train(recipe: Recipe, hidden: tuple[int, ...], data: Data, seed: int) -> Trained:
    """A network of these hidden layers on images as it sees them."""
    torch.manual_seed(seed)  # for the initial means and scales
    network = bbb.BayesianMLP([data[0].shape[1], *hidden, 10], prior=make_prior(recipe.prior))
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=len(data[0]))
    start = None if recipe.init_loc is None else uniform_means(recipe.init_loc)
    guide = bbb.AutoSoftplusNormal(model, init_loc=start)
    for rho in guide.rhos.parameters():
        nn.init.uniform_(rho, *recipe.init_rho)
    history = recipe.fit(model, guide, data, seed=seed)
    return Trained(model, guide, history)


def predict(
    trained: Trained, sets: Sets, samples: int, seed: int, first: int | None = None
) -> Answers:
    """Predict test garments and digits by networks sampled from the posterior."""
    kinds = {GARMENTS: sets.test[0], DIGITS: sets.digits}
    return {
        kind: bbb.predict(
            trained.model, trained.guide, sets.seen(x[:first]), num_samples=samples, seed=seed
        )
        for kind, x in kinds.items()
    }


def evaluate(trained: Trained, sets: Sets, answers: Answers, ballots: Answers) -> Scores:
    """All figures of one trained network, on test garments and on digits."""
    x, y = sets.test
    garments, digits = answers.values()
    plain, ood = (
        bbb.predict_mean(trained.model, trained.guide, sets.seen(part)) for part in (x, sets.digits)
    )
    return {
        "components": components(garments, y),
        "mean_network": scores(plain.probs, y),
        "ensemble": scores(garments.probs, y),
        "log_average": scores(log_average(garments).probs, y),
        "digits": detect(digits, garments),
        "digits_by_mean_network": metrics.auroc(ood.entropy, plain.entropy),
        "nats": {
            kind: {"entropy": float(p.entropy.mean()), "epistemic": float(p.epistemic.mean())}
            for kind, p in answers.items()
        },
        "agreement": {kind: agreement(p) for kind, p in ballots.items()},
        "training_seconds": sum(trained.history.seconds),
    }


def components(ensemble: bbb.ClassificationPrediction, y: Tensor) -> Scores:
    """Accuracies of the sampled networks one by one."""
    accuracies = [metrics.accuracy(probs, y) for probs in ensemble.sample_probs]
    return {
        "lowest": min(accuracies),
        "mean": float(np.mean(accuracies)),
        "highest": max(accuracies),
        "each": accuracies,
    }


def log_average(ensemble: bbb.ClassificationPrediction) -> bbb.ClassificationPrediction:
    """The article's ensemble: the networks' log-probabilities averaged, then normalised."""
    mean = ensemble.sample_log_probs.mean(0, keepdim=True)
    return bbb.ClassificationPrediction(mean.log_softmax(-1))


def agreement(prediction: bbb.ClassificationPrediction) -> float:
    """Compute the mean fraction of networks that vote for an image's most voted class."""
    votes = nn.functional.one_hot(prediction.sample_probs.argmax(-1), 10).double().mean(0)
    return float(votes.amax(-1).mean())
