# SPDX-License-Identifier: Apache-2.0
"""Plots of a classifier's predictions: each draw's, their uncertainty, the gain of refusal."""

from collections.abc import Mapping
from itertools import cycle

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import Tensor

from pyro_bbb import metrics
from pyro_bbb._utils.colors import BLACK, BLUE, CYCLE, SKY, VERMILLION
from pyro_bbb._utils.validation import count, element_index, fraction, kind, tensor
from pyro_bbb.plots._axes import Array, as_numpy, percent
from pyro_bbb.prediction import ClassificationPrediction


def votes(ax: Axes, prediction: ClassificationPrediction, index: int) -> Axes:
    """Draw the votes of the sampled networks on one input, with their mean probabilities.

    Bars are the fraction of networks whose most probable class it is, diamonds the mean
    probability. The legend is left to the caller, who may have many such plots.

    Args:
        ax: where to draw.
        prediction: prediction of n inputs.
        index: which of the n inputs.
    """
    draws = _draws_at(prediction, index)
    number, classes = draws.shape
    voted = np.bincount(draws.argmax(1), minlength=classes) / number
    where = np.arange(classes)
    ax.bar(where, voted, color=SKY, label=f"votes of {number} networks")
    mean = as_numpy(prediction.probs[index])
    ax.plot(where, mean, "D", color=VERMILLION, markersize=4, label="mean probability")
    ax.set(xticks=where, xlabel="class", ylim=(0.0, 1.05))
    percent(ax.yaxis)
    return ax


def class_probabilities(ax: Axes, prediction: ClassificationPrediction, index: int) -> Axes:
    """Draw the class probabilities of every draw for one input, and their average as bars.

    The draws of a class are side by side. Where its points lie apart, the weights leave the answer
    open.

    Args:
        ax: where to draw.
        prediction: prediction of n inputs.
        index: which of the n inputs.
    """
    draws = _draws_at(prediction, index)
    number, classes = draws.shape
    where = np.arange(classes)
    offset = np.linspace(-0.35, 0.35, number) if number > 1 else np.zeros(1)
    ax.bar(where, as_numpy(prediction.probs[index]), width=0.8, color=SKY, label="average")
    positions = (where + offset[:, None]).ravel()
    (points,) = ax.plot(positions, draws.ravel(), "o", color=BLACK, label=f"each of {number} draws")
    points.set(markersize=2.5, alpha=0.4, markeredgewidth=0.0)
    ax.set(xticks=where, xlabel="class", xlim=(-0.7, classes - 0.3), ylim=(-0.03, 1.03))
    percent(ax.yaxis)
    return ax


def _draws_at(prediction: ClassificationPrediction, index: int) -> Array:
    """Return every draw's class probabilities for one input, ``[draws, classes]``."""
    inputs = kind("prediction", prediction, ClassificationPrediction).label.shape
    return as_numpy(prediction.sample_probs[:, element_index("index", index, inputs)])


def reliability(ax: Axes, probs: Tensor, y: Tensor, *, bins: int = 10) -> Axes:
    """Draw accuracy against confidence in bins of equal width, with 95 % Wilson intervals.

    The dotted diagonal is perfect calibration.

    Args:
        ax: where to draw.
        probs: class probabilities, ``[n, classes]``.
        y: true classes, ``[n]``.
        bins: number of bins; empty ones are left out.
    """
    probs, y = tensor("probs", probs), tensor("y", y)
    metrics.accuracy(probs, y)  # checks both
    probs, y = probs.flatten(0, -2), y.flatten()
    bins = count("bins", bins)
    confidence, label = probs.max(-1)
    c, hit = as_numpy(confidence), as_numpy(label == y)
    where = np.minimum((c * bins).astype(int), bins - 1)
    number = np.bincount(where, minlength=bins)
    full = number > 0
    n = number[full]
    x = np.bincount(where, c, bins)[full] / n
    accuracy = np.bincount(where, hit, bins)[full] / n
    z2 = 1.96**2
    centre = (accuracy + z2 / (2 * n)) / (1 + z2 / n)
    half = np.sqrt(z2 * accuracy * (1 - accuracy) / n + (z2 / (2 * n)) ** 2) / (1 + z2 / n)
    ax.plot([0, 1], [0, 1], ":", color=BLACK, linewidth=1.0)
    ax.vlines(x, centre - half, centre + half, color=SKY, linewidth=4, alpha=0.6)
    ax.plot(x, accuracy, "o-", color=BLUE, markersize=4)
    percent(ax.xaxis, ax.yaxis)
    ax.set(xlabel="confidence", ylabel="accuracy", xlim=(0.0, 1.0), ylim=(0.0, 1.0))
    return ax


def risk_coverage(
    ax: Axes, answers: Mapping[str, ClassificationPrediction], y: Tensor, *, minimum: float = 0.0
) -> Axes:
    """Draw the error among the answers that are given, when the least confident are refused.

    Args:
        ax: where to draw.
        answers: predictions for the same inputs, a line for each name.
        y: true classes, ``[n]``.
        minimum: smallest fraction of inputs answered that is shown.
    """
    if not kind("answers", answers, Mapping):
        raise ValueError("answers must hold at least one prediction, got none")
    if fraction("minimum", minimum) == 1:
        raise ValueError("minimum must be below 1, got 1")
    styles = zip(cycle(("-", "--", "-.", ":")), cycle(CYCLE))  # noqa: B905, both are endless
    for (name, answer), (line, colour) in zip(answers.items(), styles, strict=False):
        labels = tensor("y", y).to(answer.label.device)
        if labels.shape != answer.label.shape:
            shapes = f"{list(answer.label.shape)}, got {list(labels.shape)}"
            raise ValueError(f"y must have the shape of the predicted labels, {shapes}")
        covered, risk = metrics.risk_coverage(answer.confidence, torch.eq(answer.label, labels))
        shown = covered >= minimum
        ax.plot(covered[shown], risk[shown], line, color=colour, label=name)
    ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    percent(ax.xaxis)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set(xlabel="inputs answered, the surest first", ylabel="errors among answers")
    ax.set(xlim=(minimum, 1.0), ylim=(0.0, None))
    ax.legend()
    return ax


def entropy_histogram(
    ax: Axes, inside: Tensor, outside: Tensor | Mapping[str, Tensor], *, bins: int = 30
) -> Axes:
    """Draw the predictive entropy in and out of distribution, as fractions of the inputs.

    Args:
        ax: where to draw.
        inside: entropies of inputs in distribution, ``[n]``, in nats.
        outside: entropies of out-of-distribution inputs; a mapping names several kinds.
        bins: number of bins, shared by all.
    """
    kinds = outside if isinstance(outside, Mapping) else {"out of distribution": outside}
    values = {"in distribution": _entropies("inside", inside)}
    values |= {name: _entropies(f"outside, {name}", h) for name, h in kinds.items()}
    edges = np.linspace(0.0, max(float(v.max()) for v in values.values()), count("bins", bins) + 1)
    for (name, v), colour in zip(values.items(), CYCLE, strict=False):
        weights = np.full(len(v), 1 / len(v))
        ax.hist(v, bins=list(edges), weights=weights, color=colour, alpha=0.25)
        ax.hist(v, bins=list(edges), weights=weights, color=colour, histtype="step", label=name)
    ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    ax.yaxis.set_major_formatter(lambda y, _: f"{100 * y:.3g}%")
    ax.set(xlabel="predictive entropy (nats)", ylabel="fraction of inputs")
    ax.legend()
    return ax


def _entropies(name: str, x: Tensor) -> Array:
    x = tensor(name, x)
    if x.ndim != 1 or x.numel() == 0 or not x.isfinite().all():
        raise ValueError(f"{name} must hold finite entropies, [n], got shape {list(x.shape)}")
    return as_numpy(x)
