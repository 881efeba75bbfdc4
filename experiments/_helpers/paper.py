# SPDX-License-Identifier: Apache-2.0
"""The networks of the paper's MNIST experiments: data, recipes, training and figures.

Blundell et al. (2015), "Weight Uncertainty in Neural Networks", section 5.1: two hidden layers of
ReLU units, pixels divided by 126, 50,000 images for training and 10,000 for choosing.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import pyro_bbb as bbb
from _helpers.images import images, train_and_validation
from _helpers.run import Data
from _helpers.tables import Scores
from _helpers.training import Training, make_prior, mlp, train_plain
from pyro_bbb import metrics

Preset: TypeAlias = Literal["published", "ours"]

SGD, DROPOUT, GAUSSIAN, MIXTURE = "SGD", "dropout", "BBB, Gaussian", "BBB, scale mixture"
METHODS = (SGD, DROPOUT, GAUSSIAN, MIXTURE)
EVALUATIONS = 30  # times that the validation error is noted in a training


@dataclass(frozen=True, kw_only=True)
class Recipe(Training):
    """Hyper-parameters of one training."""

    prior: tuple[float, ...] = ()
    """(scale,) of a Normal, or (pi, sigma1, sigma2) of a mixture; () is an ordinary network."""
    dropout: tuple[float, float] = (0.0, 0.0)
    """Dropout rates of inputs and hidden units, for an ordinary network."""
    optimizer: Literal["adam", "sgd"] = "adam"  # adam, or plain stochastic gradient descent
    epochs: int = 300  # passes over the training images
    batch_size: int = 128  # images per step
    init_rho: float = -5.0  # initial rho; standard deviations are softplus(rho)
    estimator: str = "local_reparam"
    temperature: float = 1.0  # factor of the KL at the end
    initial_temperature: float | None = None  # its factor at the start, if another one
    lr_floor: float = 0.0  # final factor of a cosine schedule
    averaged: bool = False
    """Whether a posterior's parameters are averaged over the epochs of the training's second
    half."""
    kl_schedule: str = "uniform"  # schedule of the KL weight over minibatches


def mixture(pi: float, minus_ln_sigma1: float, minus_ln_sigma2: float) -> tuple[float, ...]:
    """Return a scale mixture by the logarithms that the paper tabulates."""
    return pi, math.exp(-minus_ln_sigma1), math.exp(-minus_ln_sigma2)


_OURS = {
    SGD: Recipe(optimizer="sgd", lr=0.1),
    DROPOUT: Recipe(dropout=(0.2, 0.5)),
    GAUSSIAN: Recipe(prior=(math.exp(-1),), temperature=0.02, epochs=100),
    MIXTURE: Recipe(
        prior=mixture(0.75, 1, 7),
        initial_temperature=0.273,
        temperature=0.005,
        lr_floor=0.3,
        averaged=True,
        epochs=100,
    ),
}
_PLAIN = {"optimizer": "sgd", "lr": 1e-2, "lr_schedule": "constant", "epochs": 600}
_BAYES = {"lr": 1e-4, "lr_schedule": "constant", "epochs": 600, "estimator": "reparam"}
_PUBLISHED = {
    SGD: Recipe(**_PLAIN),
    DROPOUT: Recipe(**_PLAIN, dropout=(0.2, 0.5)),
    GAUSSIAN: Recipe(**_BAYES, prior=(math.exp(-1),), init_rho=-7.0),
}
_REPRODUCED = {  # the best settings of a public reproduction, by width
    400: {"prior": mixture(0.25, 1, 6), "init_rho": -8.0},
    800: {"prior": mixture(0.25, 0, 8), "init_rho": -7.0},
    1200: {"prior": mixture(0.25, 1, 8), "init_rho": -7.0},
}


def recipe_of(preset: Preset, method: str, width: int, epochs: int | None = None) -> Recipe:
    """Return the recipe of a method for networks of a width, perhaps with other epochs."""
    if preset == "ours":
        recipe = _OURS[method]
    elif method == MIXTURE:
        recipe = Recipe(**_BAYES, **_REPRODUCED.get(width, _REPRODUCED[1200]))
    else:
        recipe = _PUBLISHED[method]
    return recipe if epochs is None else replace(recipe, epochs=epochs)


@dataclass(frozen=True)
class Sets:
    """Images of the four parts, pixels divided by 126, flat."""

    train: Data
    validation: Data
    test: Data
    garments: Tensor

    @classmethod
    def load(cls, root: Path | None, device: str, smoke: bool) -> "Sets":
        """MNIST, the training part split, and the test part of Fashion-MNIST."""

        def seen(data: Data) -> Data:
            return (data[0].flatten(1) * (255 / 126)).to(device), data[1].to(device)

        sets = (images("mnist", root, train=is_train, smoke=smoke) for is_train in (True, False))
        learning, test = map(seen, sets)
        ood = seen(images("fashion_mnist", root, train=False, smoke=smoke))
        return cls(*train_and_validation(learning), test, ood[0])


@dataclass
class Trained:
    """A trained network, ordinary or of random weights."""

    network: nn.Module | None = None
    model: bbb.BayesianModel | None = None
    guide: bbb.AutoSoftplusNormal | None = None
    curve: dict[str, float] = field(default_factory=dict)
    """Validation error in [0, 1] of the mean network by epoch."""
    seconds: float = 0.0

    def point(self, x: Tensor) -> bbb.ClassificationPrediction:
        """Predict by one network: the ordinary one, or the one of mean weights."""
        if self.network is None:
            return bbb.predict_mean(self.model, self.guide, x)
        with torch.no_grad():
            return bbb.ClassificationPrediction(self.network.eval()(x).log_softmax(-1)[None])

    def ensemble(self, x: Tensor, draws: int, seed: int) -> bbb.ClassificationPrediction:
        """Return the ensemble of networks drawn from the posterior, or the ordinary network."""
        if self.network is not None:
            return self.point(x)
        return bbb.predict(
            self.model, self.guide, x, num_samples=draws, seed=seed, estimator="reparam"
        )


def error(prediction: bbb.ClassificationPrediction, y: Tensor) -> float:
    """Compute the error rate."""
    return float((prediction.label != y).double().mean())


def train(recipe: Recipe, width: int, seed: int, sets: Sets, *, progress: bool = True) -> Trained:
    """Train a network and record its validation error; nothing is chosen by it."""
    torch.manual_seed(seed)
    data, sizes = sets.train, [sets.train[0].shape[1], width, width, 10]
    trained, device, started = Trained(), sets.train[0].device, time.perf_counter()

    def validate(epoch: int) -> None:
        if epoch % max(1, recipe.epochs // EVALUATIONS) == 0 or epoch == recipe.epochs:
            x, y = sets.validation
            trained.curve[str(epoch)] = error(trained.point(x), y)

    if not recipe.prior:
        trained.network = mlp(sizes, recipe.dropout).to(device)
        options: dict[str, Any] = {"batch_size": recipe.batch_size, "lr": recipe.lr}
        options |= {"lr_schedule": recipe.lr_schedule, "callback": validate}
        options["optimizer"] = torch.optim.SGD if recipe.optimizer == "sgd" else torch.optim.Adam
        train_plain(trained.network, data, recipe.epochs, **options)
    else:
        network = bbb.BayesianMLP(sizes, prior=make_prior(recipe.prior))
        model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=len(data[0]))
        trained.model = model.to(device)
        trained.guide = bbb.AutoSoftplusNormal(model, init_rho=recipe.init_rho).to(device)
        average = [_averaging(trained.guide, recipe.epochs)] if recipe.averaged else []
        recipe.fit(
            model,
            trained.guide,
            data,
            optimizer=None,
            lr_schedule=_rate(recipe),
            kl_schedule=_schedule(recipe),
            callbacks=[*average, lambda end: validate(end.epoch + 1)],
            cuda_graph=data[0].is_cuda,
            progress=progress,
            seed=seed,
        )
    trained.seconds = time.perf_counter() - started
    return trained


def _averaging(guide: bbb.AutoSoftplusNormal, epochs: int) -> Callable[[bbb.EpochEnd], None]:
    """Leaves the mean of what the parameters are after each epoch of the second half."""
    mean = AveragedModel(guide)

    def average(end: bbb.EpochEnd) -> None:
        if end.epoch >= epochs // 2:
            mean.update_parameters(guide)
        if end.epoch + 1 == epochs:
            guide.load_state_dict(mean.module.state_dict())

    return average


def _schedule(recipe: Recipe) -> bbb.KLSchedule:
    return bbb.KLSchedule(
        recipe.kl_schedule,
        temperature=recipe.temperature,
        initial_temperature=recipe.initial_temperature,
        cooling_epochs=0 if recipe.initial_temperature is None else recipe.epochs,
    )


def _rate(recipe: Recipe) -> Callable[[float], float]:
    """Return factors of the learning rate by the progress of the training."""
    if recipe.lr_schedule == "constant":
        return lambda progress: 1.0
    floor = recipe.lr_floor
    return lambda progress: floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def evaluate(trained: Trained, sets: Sets, draws: int, seed: int) -> Scores:
    """All figures of a trained network; the test images are read here and nowhere before."""
    (x, y), (x_val, y_val) = sets.test, sets.validation
    answer, ood = (trained.ensemble(images, draws, seed) for images in (x, sets.garments))
    figures = {
        "error": error(answer, y),
        "mean_network_error": error(trained.point(x), y),
        "draws_error": float((answer.sample_probs.argmax(-1) != y).double().mean()),
        "validation_error": error(trained.ensemble(x_val, draws, seed), y_val),
        "nll": metrics.nll(answer.probs, y),
        "ece": metrics.ece(answer.probs, y),
        "auroc": metrics.auroc(ood.entropy, answer.entropy),
        "validation_curve": trained.curve,
        "seconds": trained.seconds,
    }
    if trained.guide is not None:
        scales = [trained.guide.scale(name).flatten() for name in trained.guide.weight_names]
        figures["median_scale"] = float(torch.cat(scales).median())
    return figures
