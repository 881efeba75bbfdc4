# SPDX-License-Identifier: Apache-2.0
"""A pool of images whose labels are bought one by one, and the rules that choose them."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import pyro_bbb as bbb
from _helpers.run import Data

Score = Callable[[bbb.ClassificationPrediction], Tensor]

# from a prediction for n candidates to how much each of their labels is wanted, [n]
SCORES: dict[str, Score] = {
    "BALD": lambda prediction: prediction.epistemic,
    "entropy": lambda prediction: prediction.entropy,
}
RANDOM = "random"
# from a prediction by draws of the weights common to all candidates to so many of their rows
TOGETHER: dict[str, Callable[[bbb.ClassificationPrediction, int], Tensor]] = {
    "BatchBALD": partial(bbb.batch_bald, num_configurations=1000),  # a tenth of the time
    "diverse BALD": bbb.diverse_bald,
}


class Pool:
    """Pool of inputs whose labels are hidden until they are acquired.

    Args:
        x: inputs, ``[n, ...]``.
        y: labels, ``[n]``, integers.
        start: number of labels at the beginning, equally many of each class.
        generator: of the start and of `candidates`.

    Raises:
        ValueError: ``start`` is no multiple of the number of classes, or a class has too few.
    """

    def __init__(self, x: Tensor, y: Tensor, start: int, generator: torch.Generator) -> None:
        self._x, self._y, self._generator = x, y, generator
        self.rows = torch.empty(0, dtype=torch.long)  # labelled ones, in the order of their labels
        self._hidden = torch.ones(len(x), dtype=torch.bool)
        self.label(self._balanced(start))

    def __len__(self) -> int:
        """Number of labels so far."""
        return len(self.rows)

    @property
    def data(self) -> Data:
        """The labelled examples."""
        return self._x[self.rows], self._y[self.rows]

    def candidates(self, count: int) -> tuple[Tensor, Tensor]:
        """Rows without a label, at most so many and drawn at random, and their inputs."""
        hidden = self._hidden.nonzero().flatten()
        rows = hidden[torch.randperm(len(hidden), generator=self._generator)[:count]]
        return rows, self._x[rows]

    def label(self, rows: Tensor) -> None:
        """Buys the labels of these rows.

        Raises:
            ValueError: a row stands there twice or has its label already.
        """
        if len(rows.unique()) != len(rows) or not self._hidden[rows].all():
            raise ValueError(f"rows must be different and without a label, got {rows.tolist()}")
        self._hidden[rows] = False
        self.rows = torch.cat([self.rows, rows])

    def _balanced(self, count: int) -> Tensor:
        classes = self._y.unique()
        each, rest = divmod(count, len(classes))
        order = torch.randperm(len(self._y), generator=self._generator)
        rows = [order[self._y[order] == label][:each] for label in classes]
        if rest or any(len(part) < each for part in rows):
            raise ValueError(f"start must be equally many of {len(classes)} classes, got {count}")
        return torch.cat(rows)


def acquire(
    pool: Pool,
    rule: str,
    predict: Callable[[Tensor], bbb.ClassificationPrediction],
    count: int,
    candidates: int,
) -> None:
    """Buy the labels of the candidates, sampled at random, that a rule chooses.

    `RANDOM` takes the first candidates and predicts nothing; rules of `SCORES` take the highest.
    """
    rows, x = pool.candidates(max(candidates, count))
    if rule == RANDOM:
        best = torch.arange(count)
    elif rule in TOGETHER:
        best = TOGETHER[rule](predict(x), count)
    else:
        best = SCORES[rule](predict(x)).topk(count).indices
    pool.label(rows[best])


def labels_at(labels: list[int], accuracy: list[float], target: float) -> float | None:
    """Number of labels at which an accuracy is first reached, interpolated between two rounds."""
    for i, (n, value) in enumerate(zip(labels, accuracy, strict=True)):
        if value >= target:
            if i == 0:
                return float(n)
            fraction = (target - accuracy[i - 1]) / (value - accuracy[i - 1])
            return labels[i - 1] + fraction * (n - labels[i - 1])
    return None
