# SPDX-License-Identifier: Apache-2.0
"""LeNet-5 as an ordinary torch network, and its training with random weights in some layers."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from pyro.distributions import Normal
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset
from tqdm import tqdm

import pyro_bbb as bbb
from _helpers.run import Data
from _helpers.training import Training


@dataclass(frozen=True, kw_only=True)
class Recipe(Training):
    """Hyper-parameters of a network and its training."""

    prior_scale: float | None
    """Standard deviation of the Normal prior of every random weight; None is He's, by fan-in."""
    random: str
    """Random parameters of a layer: ``"weight"`` or ``"*"``."""
    init_scale: float | None
    """Spread of the kernels' initial means; None is He's, by fan-in. Biases start at 0."""
    init_rho: float
    """Initial rho; standard deviations are softplus(rho)."""
    loss: str
    """``"mean_field"`` (closed-form KL) or ``"trace"`` (KL of the draws)."""
    steps: int
    """Training steps."""
    estimator: str = "flipout"
    """Gradient estimator."""
    optimizer: str | None = None
    """``"ivon"``, natural gradients; None is Adam."""
    engine: str = "auto"
    """How steps are run."""
    temperature: float = 1.0
    """Weight of the KL in the ELBO; 1 is Bayes' rule."""
    batch_size: int = 128
    """Images per step."""


def lenet5(recipe: Recipe) -> nn.Sequential:
    """LeNet-5 as an ordinary torch network, with the recipe's initial weights."""
    layers = OrderedDict(
        conv1=nn.Conv2d(1, 6, 5, padding="same"), relu1=nn.ReLU(), pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 16, 5, padding="same"), relu2=nn.ReLU(), pool2=nn.MaxPool2d(2),
        conv3=nn.Conv2d(16, 120, 5, padding="same"), relu3=nn.ReLU(), flatten=nn.Flatten(),
        fc1=nn.Linear(120 * 7 * 7, 84), relu4=nn.ReLU(), fc2=nn.Linear(84, 10),
    )  # fmt: skip
    network = nn.Sequential(layers)
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif recipe.init_scale is None:
            nn.init.kaiming_normal_(parameter, nonlinearity="relu")
        else:
            nn.init.normal_(parameter, std=recipe.init_scale)
    return network


def train(
    recipe: Recipe,
    data: Data,
    layers: str,
    seed: int,
    every: int,
    callbacks: tuple[Callable[[bbb.EpochEnd], None], ...] = (),
) -> tuple[bbb.BayesianModel, bbb.AutoSoftplusNormal, bbb.History]:
    """Train with random weights in the layers whose names match a pattern, by `pyro_bbb.fit`.

    The callbacks are called every ``every`` steps.
    """
    torch.manual_seed(seed)
    scale, where = recipe.prior_scale, f"{layers}.{recipe.random}"
    prior = bbb.priors.FanInNormal() if scale is None else Normal(0.0, scale)
    network = bbb.bayesianize(lenet5(recipe), prior, where=where)
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=len(data[0]))
    guide = bbb.AutoSoftplusNormal(model, init_rho=recipe.init_rho)
    loader, epochs = batches(recipe, data, every, seed), recipe.steps // every
    schedule = bbb.KLSchedule(temperature=recipe.temperature)
    options = {"epochs": epochs, "callbacks": callbacks, "kl_schedule": schedule, "seed": seed}
    return model, guide, recipe.fit(model, guide, loader, **options)


def train_plain(recipe: Recipe, data: Data, seed: int) -> nn.Module:
    """Train the network without random weights, by Adam from 1e-3 and the same schedule."""
    torch.manual_seed(seed)
    network = lenet5(recipe)
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3, fused=True)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, recipe.steps)
    for x, y in tqdm(batches(recipe, data, recipe.steps, seed), desc="no random weights"):
        optimiser.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimiser.step()
        if recipe.lr_schedule == "cosine":
            cosine.step()
    return network


def batches(recipe: Recipe, data: Data, steps: int, seed: int) -> DataLoader[Any]:
    """Shuffled minibatches of images, ``steps`` of them to an epoch."""
    rows = Passes(len(data[0]), recipe.batch_size, steps, seed)
    return DataLoader(TensorDataset(*data), batch_size=None, sampler=rows)


class Passes(Sampler[Tensor]):
    """Rows of minibatches, from one shuffled pass over the data after another.

    An iteration ends after ``steps`` minibatches, wherever in a pass that is, and the next one
    goes on from there. So an epoch of `fit`, after which its callbacks are called, is as long as
    one likes, and every minibatch is full.
    """

    def __init__(self, num_data: int, batch_size: int, steps: int, seed: int) -> None:
        self.num_data, self.batch_size, self.steps = num_data, batch_size, steps
        self.generator = torch.Generator().manual_seed(seed)
        self.batches = self._batches()

    def __iter__(self) -> Iterator[Tensor]:
        return islice(self.batches, self.steps)

    def __len__(self) -> int:
        return self.steps

    def _batches(self) -> Iterator[Tensor]:
        rows = torch.empty(0, dtype=torch.long)
        while True:
            while len(rows) < self.batch_size:
                rows = torch.cat([rows, torch.randperm(self.num_data, generator=self.generator)])
            yield rows[: self.batch_size]
            rows = rows[self.batch_size :]
