"""The classifier behind the page: trained, kept in a folder, asked about drawings.

Training pictures are the digits, turned, sheared, scaled and shifted a little, some drawn ones of
habits that they lack (`hands.digit`), and a quarter as many scribbles, whose labels are drawn at
random: of these nothing can be known, and a network that learns so votes for nothing, also where a
drawing is of another kind than those it saw (outlier exposure; Hendrycks, Mazeika and Dietterich,
https://arxiv.org/abs/1812.04606, here with random labels).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

from pyro_bbb.data import load_images, split
from pyro_bbb.guides import AutoSoftplusNormal
from pyro_bbb.likelihoods import Categorical
from pyro_bbb.models import BayesianModel
from pyro_bbb.networks import BayesianMLP
from pyro_bbb.persistence import LoadError, load, save
from pyro_bbb.play.rasterize import pixels
from pyro_bbb.play.synthetic_digits import HABITS, digit, scribble
from pyro_bbb.prediction import ClassificationPrediction, predict
from pyro_bbb.pruning import prune
from pyro_bbb.training import fit

DRAWS = 100  # networks that vote
PRUNED = 0.75  # fraction of the weights removed
CLASSES = 10
ANSWERED = 0.95  # fraction of held-out digits that the threshold lets through
SHAPES = ((64,), (784,), (1, 8, 8), (1, 28, 28))  # of the inputs that a network may take
_KEY = "threshold"  # in the metadata of the save
_DRAWN = 60  # digits of each of those habits
_SEED = 0


@dataclass(frozen=True)
class Classifier:
    """A trained network of ten classes; it refuses an input of no class above the threshold."""

    model: BayesianModel
    guide: Any
    shape: tuple[int, ...]  # of one input
    threshold: float

    @property
    def side(self) -> int:
        """Height and width of the pictures, 8 or 28."""
        return math.isqrt(math.prod(self.shape))

    @cached_property
    def pruned(self) -> Any:
        """The guide with the least certain weights removed; None where it cannot be pruned."""
        try:
            return prune(self.guide, PRUNED)
        except TypeError:
            return None

    def ask(self, x: Tensor, *, pruned: bool = False) -> ClassificationPrediction:
        """Predict pictures ``[n, side * side]``."""
        guide = self.pruned if pruned else self.guide
        inputs = x.reshape(-1, *self.shape)
        found = predict(self.model, guide, inputs, num_samples=DRAWS, seed=_SEED)
        assert isinstance(found, ClassificationPrediction)  # by the constructors below
        return found

    def save(self, folder: Path) -> None:
        """Writes the folder, whole or not at all."""
        save(folder, self.model, self.guide, metadata={_KEY: self.threshold})


def open_saved(folder: Path) -> Classifier:
    """The classifier in a folder that `save` wrote; without a threshold of its own it gets 1/2."""
    loaded = load(folder)
    threshold = loaded.metadata.get(_KEY, 0.5)
    if not isinstance(threshold, float) or not 0 <= threshold <= 1:
        raise LoadError(f"{folder}: {_KEY} must be a number in [0, 1], got {threshold!r}")
    for shape in SHAPES:
        try:
            answer = predict(loaded.model, loaded.guide, torch.zeros(1, *shape), num_samples=1)
        except (ValueError, RuntimeError):
            continue
        if isinstance(answer, ClassificationPrediction) and answer.probs.shape == (1, CLASSES):
            return Classifier(loaded.model, loaded.guide, shape, threshold)
    raise ValueError(
        f"{folder} must hold a classifier of {CLASSES} classes and of 8x8 or 28x28 pixels"
    )


def train_small(
    epochs: int = 25, *, copies: int = 4, scribbles: float = 0.25, progress: bool = True
) -> Classifier:
    """Learn scikit-learn's 1,797 digits; a tenth is held out for the threshold.

    For each digit there are ``copies`` varied ones, and on average so many ``scribbles``.
    """
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    (x, y), held_out = split(x.float() / 16, y, fraction=0.1, seed=_SEED)
    generator = torch.Generator().manual_seed(_SEED)
    rng = np.random.default_rng(_SEED)
    drawn = torch.tensor(list(HABITS)).repeat(_DRAWN)
    x = torch.cat([x, *(pixels(digit(int(number), rng), 8)[None] for number in drawn)])
    others = [pixels(scribble(rng), 8) for _ in range(int(scribbles * len(x)))]
    once = torch.cat([x, *(each[None] for each in others)])
    seen = torch.cat([once, varied(once.repeat(copies, 1), generator)])
    labels = torch.randint(CLASSES, (copies + 1, len(once)), generator=generator)
    labels[:, : len(x)] = torch.cat([y, drawn])
    labels = labels.flatten()
    return _trained([64, 200, 200, CLASSES], (seen, labels), held_out, epochs, progress)


def train_mnist(root: Path, epochs: int = 5, *, progress: bool = True) -> Classifier:
    """Learn MNIST; a tenth is held out for the threshold."""
    x, y = load_images("mnist", root=root)
    train, held_out = split(x.flatten(1), y, fraction=0.1, seed=_SEED)
    rng = np.random.default_rng(_SEED)
    others = torch.stack([pixels(scribble(rng), 28) for _ in range(1000)])
    repeated = len(train[0]) // 4 // len(others)
    generator = torch.Generator().manual_seed(_SEED)
    labels = torch.randint(CLASSES, (repeated * len(others),), generator=generator)
    data = (torch.cat([train[0], others.repeat(repeated, 1)]), torch.cat([train[1], labels]))
    return _trained([784, 200, 200, CLASSES], data, held_out, epochs, progress)


def _trained(
    sizes: list[int],
    data: tuple[Tensor, Tensor],
    held_out: tuple[Tensor, Tensor],
    epochs: int,
    progress: bool,
) -> Classifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)  # of the initial means
        model = BayesianModel(BayesianMLP(sizes), Categorical(), num_data=len(data[0]))
        guide = AutoSoftplusNormal(model, init_rho=-4.0)
        fit(model, guide, data, epochs=epochs, progress=progress, seed=_SEED)
    fresh = Classifier(model, guide, (sizes[0],), 0.5)
    threshold = float(fresh.ask(held_out[0]).confidence.quantile(1 - ANSWERED))
    return Classifier(model, guide, (sizes[0],), threshold)


def varied(x: Tensor, generator: torch.Generator) -> Tensor:
    """Pictures ``[n, 64]`` turned, sheared, scaled, shifted and made bolder or finer at random."""

    def spread(width: float) -> Tensor:
        return width * (2 * torch.rand(len(x), generator=generator) - 1)

    turn, wide, high = spread(0.14), 1 + spread(0.08), 1 + spread(0.08)
    shear, right, down = spread(0.12), spread(0.06), spread(0.06)
    rows = [turn.cos() * wide, shear - turn.sin() * wide, right]
    rows += [turn.sin() * high, turn.cos() * high, down]
    affine = torch.stack(rows, 1).view(-1, 2, 3)
    large = F.interpolate(x.view(-1, 1, 8, 8), size=32, mode="bicubic").clamp(0, 1)
    grid = F.affine_grid(affine, list(large.shape), align_corners=False)
    small = F.avg_pool2d(F.grid_sample(large, grid, align_corners=False), 4).reshape(-1, 64)
    return small ** (1 + spread(0.25))[:, None]
