# SPDX-License-Identifier: Apache-2.0
"""The classifier of drawn digits: trained on scikit-learn's digits, saved in a folder.

Training pictures are the digits, rotated, sheared, scaled and shifted a little, drawn ones in
styles that they lack (`strokes.STYLES`), and a quarter as many scribbles with random labels. So
the network learns to vote for nothing where a drawing is of another kind than the digits (outlier
exposure; Hendrycks, Mazeika and Dietterich, https://arxiv.org/abs/1812.04606, here with random
labels).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

from pyro_bbb import guides
from pyro_bbb._utils.locking import cached_property
from pyro_bbb.apps.strokes import STYLES, pixels, scribble, styled_digit
from pyro_bbb.data import split
from pyro_bbb.likelihoods import Categorical
from pyro_bbb.models import BayesianModel
from pyro_bbb.networks import BayesianMLP
from pyro_bbb.persistence import LoadError, load, save
from pyro_bbb.prediction import ClassificationPrediction, predict
from pyro_bbb.pruning import prune
from pyro_bbb.training import EpochEnd, fit

DRAWS = 100  # networks that vote
PRUNED = 0.75  # fraction of the weights removed
CLASSES = 10
ANSWERED = 0.95  # fraction of held-out digits that the threshold lets through
BAYESIAN, DETERMINISTIC = "softplus_normal", "delta"  # names of guides
_OPTIONS: dict[str, dict[str, float]] = {BAYESIAN: {"init_rho": -4.0}, DETERMINISTIC: {}}
_STYLED = 60  # drawn digits of each style
_SCRIBBLES = 0.25  # number of scribbles per digit
_KEY = "threshold"  # in the metadata of the save
_SEED = 0


@dataclass(frozen=True)
class Classifier:
    """A trained network of ten classes, which refuses an input of no class above the threshold."""

    model: BayesianModel
    guide: Any
    threshold: float
    draws: int = DRAWS

    @cached_property
    def pruned(self) -> Any:
        """Return the guide with the least certain weights removed."""
        return prune(self.guide, PRUNED)

    def predict(self, x: Tensor, *, pruned: bool = False) -> ClassificationPrediction:
        """Predict pictures ``[n, 64]``."""
        guide = self.pruned if pruned else self.guide
        x = x.reshape(-1, 64)
        prediction = predict(self.model, guide, x, num_samples=self.draws, seed=_SEED)
        assert isinstance(prediction, ClassificationPrediction)  # by `train`
        return prediction

    def save(self, folder: Path) -> None:
        """Write the folder atomically."""
        save(folder, self.model, self.guide, metadata={_KEY: self.threshold})


def open_saved(folder: Path, draws: int = DRAWS) -> Classifier:
    """Open the classifier that `Classifier.save` wrote."""
    loaded = load(folder)
    threshold = loaded.metadata.get(_KEY)
    if not isinstance(threshold, float) or not 0 <= threshold <= 1:
        raise LoadError(f"{folder} must hold networks that `play` has saved: choose another folder")
    return Classifier(loaded.model, loaded.guide, threshold, draws)


def train(
    epochs: int = 25,
    *,
    copies: int = 4,
    guide: str = BAYESIAN,
    report: Callable[[float], object] = lambda fraction: None,
) -> Classifier:
    """Train on scikit-learn's 1,797 digits; a tenth is held out for the threshold.

    ``copies`` are varied ones of each picture; ``report`` is called with the fraction done.
    """
    data, (held_out, _) = _pictures(copies), _digits()[1]

    def after_epoch(end: EpochEnd) -> None:
        report((end.epoch + 1) / epochs)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)  # of the initial means
        network = BayesianMLP([64, 200, 200, CLASSES])
        model = BayesianModel(network, Categorical(), num_data=len(data[0]))
        posterior = guides.make(guide, model, **_OPTIONS[guide])
        options: dict[str, Any] = {"batch_size": 256, "progress": False, "seed": _SEED}
        fit(model, posterior, data, epochs=epochs, callbacks=[after_epoch], **options)
    classifier = Classifier(model, posterior, 0.5, DRAWS if guide == BAYESIAN else 1)
    threshold = float(classifier.predict(held_out).confidence.quantile(1 - ANSWERED))
    return replace(classifier, threshold=threshold)


def unseen_digits() -> dict[str, Tensor]:
    """Return one held-out digit ``[64]`` of each class, by name."""
    _, (x, y) = _digits()
    return {str(label): x[y == label][0] for label in range(CLASSES)}


def _pictures(copies: int) -> tuple[Tensor, Tensor]:
    """Return digits, drawn digits, scribbles with random labels, and varied copies of all."""
    (x, y), _ = _digits()
    generator = torch.Generator().manual_seed(_SEED)
    rng = np.random.default_rng(_SEED)
    styled = torch.tensor(list(STYLES)).repeat(_STYLED)
    x = torch.cat([x, *(pixels(styled_digit(int(number), rng))[None] for number in styled)])
    scribbles = [pixels(scribble(rng))[None] for _ in range(int(_SCRIBBLES * len(x)))]
    once = torch.cat([x, *scribbles])
    pictures = torch.cat([once, _varied(once.repeat(copies, 1), generator)])
    labels = torch.randint(CLASSES, (copies + 1, len(once)), generator=generator)
    labels[:, : len(x)] = torch.cat([y, styled])
    return pictures, labels.flatten()


def _digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return scikit-learn's digits, to train on and held out."""
    x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
    return split(x.float() / 16, y, fraction=0.1, seed=_SEED)


def _varied(x: Tensor, generator: torch.Generator) -> Tensor:
    """Rotate, shear, scale, shift, thicken or thin pictures ``[n, 64]`` at random."""

    def spread(width: float) -> Tensor:
        return width * (2 * torch.rand(len(x), generator=generator) - 1)

    angle, wide, high = spread(0.14), 1 + spread(0.08), 1 + spread(0.08)
    shear, right, down = spread(0.12), spread(0.06), spread(0.06)
    rows = [angle.cos() * wide, shear - angle.sin() * wide, right]
    rows += [angle.sin() * high, angle.cos() * high, down]
    affine = torch.stack(rows, 1).view(-1, 2, 3)
    large = F.interpolate(x.view(-1, 1, 8, 8), size=32, mode="bicubic").clamp(0, 1)
    grid = F.affine_grid(affine, list(large.shape), align_corners=False)
    small = F.avg_pool2d(F.grid_sample(large, grid, align_corners=False), 4).reshape(-1, 64)
    return small ** (1 + spread(0.25))[:, None]
