"""Pictures of a classifier's answers: what every draw says, and what refusing to answer buys."""

from collections.abc import Mapping
from itertools import cycle

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import Tensor

from pyro_bbb import metrics
from pyro_bbb._checks import kind, place, share, tensor
from pyro_bbb._colours import BLACK, CYCLE, SKY
from pyro_bbb.summaries import ClassificationPrediction

_LINES = ("-", "--", "-.", ":")


def class_probabilities(ax: Axes, prediction: ClassificationPrediction, index: int) -> Axes:
    """The class probabilities of every draw for one input, and their average.

    Args:
        ax: where to draw.
        prediction: of ``[draws, n, classes]`` sampled class probabilities.
        index: which of the ``n`` inputs.

    Returns:
        ``ax``: a point per draw and class, the draws side by side within their class; bars are the
        average. Where the points of a class lie apart, the weights leave the answer open.
    """
    inputs = kind("prediction", prediction, ClassificationPrediction).label.shape
    draws = (
        prediction.sample_probs[:, place("index", index, inputs)].cpu().numpy()
    )  # [draws, classes]
    count, classes = draws.shape
    where = np.arange(classes)
    offset = np.linspace(-0.35, 0.35, count) if count > 1 else np.zeros(1)
    ax.bar(where, prediction.probs[index].cpu().numpy(), width=0.8, color=SKY, label="average")
    places = (where + offset[:, None]).ravel()
    (points,) = ax.plot(places, draws.ravel(), "o", color=BLACK, label=f"each of {count} draws")
    points.set(markersize=2.5, alpha=0.4, markeredgewidth=0.0)
    ax.set(xticks=where, xlabel="class", xlim=(-0.7, classes - 0.3), ylim=(-0.03, 1.03))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return ax


def risk_coverage(
    ax: Axes, answers: Mapping[str, ClassificationPrediction], y: Tensor, *, minimum: float = 0.0
) -> Axes:
    """Error among the answers that are given, when the least confident ones are refused.

    Args:
        ax: where to draw.
        answers: predictions for the same inputs, by the name of who made them.
        y: true classes, ``[n]``.
        minimum: smallest share of inputs answered that is shown.

    Returns:
        ``ax``, both axes in per cent, a line for each name.
    """
    if not kind("answers", answers, Mapping):
        raise ValueError("answers must hold at least one prediction, got none")
    if share("minimum", minimum) == 1:
        raise ValueError("minimum must be below 1, got 1")
    styles = zip(cycle(_LINES), cycle(CYCLE))  # noqa: B905, both are endless
    for (name, answer), (line, colour) in zip(answers.items(), styles, strict=False):
        if tensor("y", y).shape != answer.label.shape:
            shapes = f"{list(answer.label.shape)}, got {list(y.shape)}"
            raise ValueError(f"y must have the shape of the predicted labels, {shapes}")
        labels = y.to(answer.label.device)
        covered, risk = metrics.risk_coverage(answer.confidence, torch.eq(answer.label, labels))
        shown = covered >= minimum
        ax.plot(covered[shown], risk[shown], line, color=colour, label=name)
    ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set(xlabel="inputs answered, the surest first", ylabel="errors among answers")
    ax.set(xlim=(minimum, 1.0), ylim=(0.0, None))
    ax.legend()
    return ax
