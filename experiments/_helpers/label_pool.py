# SPDX-License-Identifier: Apache-2.0
"""A pool of labels to acquire, and the figure of what they buy."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.ticker import FuncFormatter
from torch import Tensor

import pyro_bbb as bbb
from _helpers.run import Data, Picture, Run
from pyro_bbb import plots

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


TARGETS = {"90": 0.90, "95": 0.95}


@dataclass(frozen=True)
class Sets:
    """Images ``[n, 1, 28, 28]`` and their labels: to buy from, and to measure on."""

    pool: Data
    measured: Data


def draw_curves(run: Run, summary: dict[str, Any], rules: tuple[str, ...]) -> Picture:
    """Test error by number of labels: median and range over the seeds."""
    with plots.style():
        figure, ax = plt.subplots(figsize=(6.4, 4.2))
        for rule, line in zip(rules, ("-", "--", "-.", ":", "-"), strict=False):
            curves = [each[rule]["curve"] for each in summary["seeds"].values()]
            error = 100 * (1 - np.array([curve["accuracy"] for curve in curves]))
            labels = curves[0]["labels"]
            (middle,) = ax.plot(labels, np.median(error, axis=0), line, label=rule)
            colour = middle.get_color()
            ax.fill_between(labels, error.min(0), error.max(0), color=colour, alpha=0.2, lw=0)
        for name, target in TARGETS.items():
            level = 100 * (1 - target)
            ax.axhline(level, color="0.5", lw=0.8, ls=":")
            where = {"transform": ax.get_yaxis_transform(), "va": "bottom", "color": "0.4"}
            ax.text(0.01, level, f"accuracy {name} %", **where)
        ax.set(xscale="log", yscale="log", xlabel="labels", ylabel="error (%)")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(FuncFormatter(lambda value, _: few(value)))
        ax.set_title(finding(summary, rules))
        ax.legend()
    caption = f"Median and range of {len(summary['seeds'])} run(s); both axes logarithmic."
    return run.picture(figure, "curves", caption)


def few(value: float) -> str:
    """The minor ticks' labels that have room: 2 and 5 of each decade."""
    return f"{value:g}" if f"{value:.0e}"[0] in "25" else ""


def finding(summary: dict[str, Any], rules: tuple[str, ...]) -> str:
    """The title of the curves."""
    saved = summary["mean"]["times_fewer_labels"]
    if "BALD" not in saved:
        return "Error by number of labels"
    least = "" if reached(summary, RANDOM, "95") else "at least "
    return f"BALD needs {least}{saved['BALD']['95']:.1f} times fewer labels for 95 %"


def reached(summary: dict[str, Any], rule: str, target: str) -> bool:
    """True if a rule reached a target with every seed."""
    return all(run[rule]["reached"][target] for run in summary["seeds"].values())
