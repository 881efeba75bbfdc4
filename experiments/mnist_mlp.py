# SPDX-License-Identifier: Apache-2.0
"""Bayesian MLP on MNIST: accuracy, signal-to-noise ratios and pruning of 478,410 weights.

    python experiments/mnist_mlp.py [--preset published] [--repeats 3] [--data-root ROOT]

``--preset published`` reproduces the tutorial "Bayes by Backprop from scratch (NN,
classification)" of *Deep Learning - The Straight Dope* (MXNet, 2017, chapter 18; source at
https://github.com/zackchase/mxnet-the-straight-dope): 784-400-400-10, pixels / 126, plain SGD, with
its standard Normal prior, which its figures are of, and with the scale mixture that it offers. Its
loss is the minibatch's free energy in nats, the data cost summed over the batch and the KL divided
by the number of batches, as in the library; the learning rate applies to that sum. (Applied to the
mean over the batch it gives 75.7 % after the first epoch, where the tutorial has 94.55 %.)
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import tyro
from _helpers import tables as tabulate
from _helpers.images import images
from _helpers.run import Data, DataSettings, RepeatedSettings, Run
from _helpers.scores import SCORES, scores
from _helpers.tables import Scores, Table, shown
from _helpers.training import Training, make_prior, normal_means
from torch import Tensor

import pyro_bbb as bbb
from pyro_bbb import metrics

SOURCE = "MXNet tutorial"
PUBLISHED_PRUNING = {  # accuracy by fraction removed
    0.1: 0.9777, 0.25: 0.9779, 0.5: 0.9756, 0.75: 0.9602, 0.95: 0.7259, 0.99: 0.3753, 1.0: 0.098
}  # fmt: skip

FRACTIONS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 1.0)


Trained: TypeAlias = tuple[bbb.BayesianModel, bbb.AutoSoftplusNormal, bbb.History]


def accuracy(model: bbb.BayesianModel, guide: bbb.AutoSoftplusNormal, data: Data) -> float:
    """Accuracy of the network of mean weights."""
    return metrics.accuracy(bbb.predict_mean(model, guide, data[0]).probs, data[1])


def networks_table(record: Scores, names: list[str], samples: int) -> Table:
    """Return the mean network and the ensemble, in scores that take probabilities."""
    networks = {
        f"{name}: {label}": tabulate.at(record, name, way)
        for name in names
        for way, label in (("mean_network", "mean network"), ("ensemble", f"{samples} networks"))
    }
    return tabulate.table("on the test images", networks, SCORES)


def pruning_table(record: Scores, names: list[str]) -> Table:
    """Tabulate the mean network's test accuracy by pruned fraction."""
    rows = [
        (
            f"{100 * fraction:.0f}",
            f"{100 * PUBLISHED_PRUNING[fraction]:.2f}" if fraction in PUBLISHED_PRUNING else "",
            *(shown(record, name, "pruning", str(fraction)) for name in names),
        )
        for fraction in FRACTIONS
    ]
    return Table(("weights removed (%)", f"{SOURCE}: accuracy (%)", *names), rows)


class SkippingMLP(bbb.BayesianMLP):
    """The network as the tutorial runs it: the second hidden layer has weights, and no use."""

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs ``[batch, 10]`` for inputs ``[batch, 784]``."""
        return self.fc3(self.activation1(self.fc1(x)))


NETWORKS = {"full": bbb.BayesianMLP, "skipping": SkippingMLP}


@dataclass(frozen=True)
class Variant:
    """Differences between the networks of one recipe."""

    prior: tuple[float, ...]  # (scale,) of a Normal, or (pi, sigma1, sigma2) of a scale mixture
    network: Literal["full", "skipping"] = "full"  # all layers, or all but the second


@dataclass(frozen=True, kw_only=True)
class Recipe(Training):
    """Hyper-parameters of a training, the same for each variant."""

    variants: Mapping[str, Variant]  # the networks by name
    init_loc: float | None  # standard deviation of the initial means; None is He's initialisation
    init_rho: float  # initial rho; standard deviations are softplus(rho)
    optimizer: Literal["sgd", "adam"]  # without momentum, or fused Adam
    epochs: int  # passes over the training images
    hidden: tuple[int, ...] = (400, 400)  # units of the hidden layers
    pixel_scale: float = 255 / 126
    """Factor of pixels in [0, 1]; 255 / 126 is the paper's division of bytes by 126."""
    batch_size: int = 128  # images per step
    kl_schedule: str = "uniform"  # schedule of the KL weight over minibatches


RECIPES = {
    "published": Recipe(
        variants={
            "Normal prior": Variant((1.0,)),
            "mixture prior": Variant((0.25, 0.75, 0.1)),
            "Normal prior, layer skipped": Variant((1.0,), "skipping"),
        },
        init_loc=0.1,
        init_rho=-3.0,
        optimizer="sgd",
        lr_schedule="constant",
        epochs=10,
    ),
    "ours": Recipe(
        variants={"mixture prior": Variant((0.25, 1.0, math.exp(-6)))},
        init_loc=None,
        init_rho=-5.0,
        optimizer="adam",
        lr=2e-3,
        epochs=20,
    ),
}


@dataclass(frozen=True)
class Config(RepeatedSettings, DataSettings):
    """Settings of one run."""

    preset: Literal["published", "ours"] = "ours"
    """Name of the recipe."""
    samples: int = 50
    """Networks drawn from the posterior for the ensemble."""


def train(recipe: Recipe, name: str, seed: int, data: Data) -> Trained:
    """Train one network."""
    torch.manual_seed(seed)  # for the initial means
    sizes = [data[0].shape[1], *recipe.hidden, 10]
    variant = recipe.variants[name]
    network = NETWORKS[variant.network](sizes, prior=make_prior(variant.prior))
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=len(data[0]))
    start = None if recipe.init_loc is None else normal_means(recipe.init_loc)
    guide = bbb.AutoSoftplusNormal(model, init_loc=start, init_rho=recipe.init_rho)
    optimizer = torch.optim.SGD if recipe.optimizer == "sgd" else None
    return model, guide, recipe.fit(model, guide, data, optimizer=optimizer, seed=seed)


def evaluate(
    trained: Trained, config: Config, seed: int, train_data: Data, test_data: Data
) -> Scores:
    """All figures of one trained network."""
    (model, guide, history), (x, y) = trained, test_data
    ensemble = bbb.predict(model, guide, x, num_samples=config.samples, seed=seed)
    ratios = torch.cat([r.flatten() for r in bbb.signal_to_noise(guide).values()])
    pruned = {str(f): accuracy(model, bbb.prune(guide, f), test_data) for f in FRACTIONS}
    return {
        "train_accuracy": accuracy(model, guide, train_data),
        "mean_network": scores(bbb.predict_mean(model, guide, x).probs, y),
        "ensemble": scores(ensemble.probs, y),
        "share_below_0_db": float((ratios < 1).double().mean()),
        "pruning": pruned,
        "seconds_per_epoch": statistics.median(history.seconds),
    }


def main(config: Config) -> dict[str, Any]:
    """Train and prune; print the tables and write the results."""
    recipe = RECIPES[config.preset]
    if config.smoke:
        config = replace(config, samples=3)
        recipe = replace(recipe, epochs=2, hidden=(50, 50))
    run, get = Run(config), partial(images, "mnist", config.data_root, smoke=config.smoke)
    parts = (get(train=is_train) for is_train in (True, False))
    train_data, test_data = ((x.flatten(1) * recipe.pixel_scale, y) for x, y in parts)

    def one(seed: int) -> Scores:
        networks = {name: train(recipe, name, seed, train_data) for name in recipe.variants}
        return {
            name: evaluate(trained, config, seed, train_data, test_data)
            for name, trained in networks.items()
        }

    summary, names = run.repeat(one), list(recipe.variants)
    tables = [networks_table(summary, names, config.samples), pruning_table(summary, names)]
    return run.report(__doc__, {"recipe": asdict(recipe), **summary}, tables)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
