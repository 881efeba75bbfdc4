# SPDX-License-Identifier: Apache-2.0
"""The trainings behind the page: on scikit-learn's digits, or on MNIST.

Training pictures are the digits, turned, sheared, scaled and shifted a little, some drawn ones of
habits that they lack (`synthetic_digits.digit`), and a quarter as many scribbles, whose labels are
drawn at random: of these nothing can be known, and a network that learns so votes for nothing, also
where a drawing is of another kind than those it saw (outlier exposure; Hendrycks, Mazeika and
Dietterich, https://arxiv.org/abs/1812.04606, here with random labels).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

from pyro_bbb import guides
from pyro_bbb.data import load_images, split
from pyro_bbb.likelihoods import Categorical
from pyro_bbb.models import BayesianModel
from pyro_bbb.networks import BayesianMLP
from pyro_bbb.play.classifier import CLASSES, DRAWS, Classifier
from pyro_bbb.play.rasterize import pixels
from pyro_bbb.play.samples import samples
from pyro_bbb.play.synthetic_digits import HABITS, digit, scribble
from pyro_bbb.training import EpochEnd, fit

Report: TypeAlias = Callable[[float], object]  # of the fraction of the epochs done
ANSWERED = 0.95  # fraction of held-out digits that the threshold lets through
BAYESIAN, DETERMINISTIC = "softplus_normal", "delta"  # names of guides
_OPTIONS: dict[str, dict[str, float]] = {BAYESIAN: {"init_rho": -4.0}, DETERMINISTIC: {}}
_DRAWN = 60  # digits of each of those habits
_SEED = 0


def train_small(
    epochs: int = 25,
    *,
    copies: int = 4,
    scribbles: float = 0.25,
    guide: str = BAYESIAN,
    report: Report = lambda fraction: None,
) -> Classifier:
    """Learn scikit-learn's 1,797 digits; a tenth is held out for the threshold.

    For each digit there are ``copies`` varied ones, and on average so many ``scribbles``. ``guide``
    is `BAYESIAN` or `DETERMINISTIC`; ``report`` is called after each epoch.
    """
    (x, y), held_out = _small_digits()
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
    layers = [64, 200, 200, CLASSES]
    return _trained(layers, (seen, labels), held_out, guide, epochs, report, batch_size=256)


def train_mnist(
    root: Path,
    epochs: int = 5,
    *,
    guide: str = BAYESIAN,
    report: Report = lambda fraction: None,
) -> Classifier:
    """Learn MNIST; a tenth is held out for the threshold. Options are those of `train_small`."""
    x, y = load_images("mnist", root=root)
    train, held_out = split(x.flatten(1), y, fraction=0.1, seed=_SEED)
    rng = np.random.default_rng(_SEED)
    others = torch.stack([pixels(scribble(rng), 28) for _ in range(1000)])
    repeated = len(train[0]) // 4 // len(others)
    generator = torch.Generator().manual_seed(_SEED)
    labels = torch.randint(CLASSES, (repeated * len(others),), generator=generator)
    data = (torch.cat([train[0], others.repeat(repeated, 1)]), torch.cat([train[1], labels]))
    return _trained([784, 200, 200, CLASSES], data, held_out, guide, epochs, report)


def unseen_digits(side: int, root: Path | None) -> dict[str, Tensor]:
    """Digits ``[side * side]`` that no training here saw, by name: the first one of each class.

    Without a folder of MNIST those of 28x28 pixels are drawings.
    """
    if side == 28 and root is None:
        return {name: pixels(each, 28) for name, each in samples().items() if name.isdecimal()}
    x, y = _small_digits()[1] if side == 8 else load_images("mnist", root=root, train=False)
    first = [int((y == label).nonzero()[0]) for label in range(CLASSES)]
    return {str(label): x[i].flatten() for label, i in enumerate(first)}


def _small_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """scikit-learn's digits, to train on and held out."""
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    return split(x.float() / 16, y, fraction=0.1, seed=_SEED)


def _trained(
    sizes: list[int],
    data: tuple[Tensor, Tensor],
    held_out: tuple[Tensor, Tensor],
    guide_name: str,
    epochs: int,
    report: Report,
    batch_size: int = 128,
) -> Classifier:
    def after_epoch(end: EpochEnd) -> None:
        report((end.epoch + 1) / epochs)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)  # of the initial means
        model = BayesianModel(BayesianMLP(sizes), Categorical(), num_data=len(data[0]))
        guide = guides.make(guide_name, model, **_OPTIONS[guide_name])
        fit(
            model,
            guide,
            data,
            epochs=epochs,
            batch_size=batch_size,
            callbacks=[after_epoch],
            progress=False,
            seed=_SEED,
        )
    draws = DRAWS if guide_name == BAYESIAN else 1
    fresh = Classifier(model, guide, (sizes[0],), 0.5, draws)
    threshold = float(fresh.ask(held_out[0]).confidence.quantile(1 - ANSWERED))
    return replace(fresh, threshold=threshold)


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
