# SPDX-License-Identifier: Apache-2.0
"""The classifier behind the page: kept in a folder, asked about drawings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_bbb._utils.locking import cached_property
from pyro_bbb.models import BayesianModel
from pyro_bbb.persistence import LoadError, load, save
from pyro_bbb.prediction import ClassificationPrediction, predict
from pyro_bbb.pruning import prune

DRAWS = 100  # networks that vote
PRUNED = 0.75  # fraction of the weights removed
CLASSES = 10
SHAPES = ((64,), (784,), (1, 8, 8), (1, 28, 28))  # of the inputs that a network may take
_KEY = "threshold"  # in the metadata of the save
_SEED = 0


@dataclass(frozen=True)
class Classifier:
    """A trained network of ten classes; it refuses an input of no class above the threshold."""

    model: BayesianModel
    guide: Any
    shape: tuple[int, ...]  # of one input
    threshold: float
    draws: int = DRAWS

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
        found = predict(self.model, guide, inputs, num_samples=self.draws, seed=_SEED)
        assert isinstance(found, ClassificationPrediction)  # by `open_saved` and by `train`
        return found

    def save(self, folder: Path) -> None:
        """Writes the folder, whole or not at all."""
        save(folder, self.model, self.guide, metadata={_KEY: self.threshold})


def open_saved(folder: Path, draws: int = DRAWS) -> Classifier:
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
            return Classifier(loaded.model, loaded.guide, shape, threshold, draws)
    raise ValueError(
        f"{folder} must hold a classifier of {CLASSES} classes and of 8x8 or 28x28 pixels"
    )
