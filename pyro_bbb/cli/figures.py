# SPDX-License-Identifier: Apache-2.0
"""The pictures of a report, each as a PNG inside the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from pyro_bbb import plots, pruning
from pyro_bbb._utils.colors import BLACK, BLUE, SKY, VERMILLION
from pyro_bbb.cli.model import Model
from pyro_bbb.guides import AutoSoftplusNormal
from pyro_bbb.prediction import ClassificationPrediction

_MOST = 400  # rows of which an interval is drawn


@dataclass(frozen=True)
class Picture:
    """A picture and what it shows."""

    data: str
    caption: str


def draw(function: Callable[[Axes], object], title: str, caption: str) -> Picture:
    """Draw by a function, under a title."""
    with plots.style():
        figure = Figure(figsize=(5.2, 3.7))
        ax = figure.subplots()
        function(ax)
        ax.set_title(title)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150)
    return Picture(base64.b64encode(buffer.getvalue()).decode("ascii"), caption)


def of_answers(model: Model, rows: dict[str, Tensor]) -> list[Picture]:
    """Figures of predictions against true targets."""
    level = model.about.level
    if "probs" not in rows:
        return [
            draw(
                lambda ax: predicted_and_true(ax, rows, model.about.threshold),
                "Predicted and true",
                f"Means with {level:.0%} intervals (some rows, if there are many). Red: refused.",
            ),
            draw(
                lambda ax: plots.coverage(ax, rows["pit"]),
                "Coverage of the intervals",
                "Fraction of true targets inside central intervals of each level. On the diagonal "
                "intervals are calibrated, below it too narrow.",
            ),
        ]
    answers = {"the model": ClassificationPrediction(rows["probs"].log().unsqueeze(0))}
    return [
        draw(
            lambda ax: plots.reliability(ax, rows["probs"], rows["y"]),
            "Reliability diagram",
            "Accuracy of the predictions of each confidence, with 95 % intervals.",
        ),
        draw(
            lambda ax: plots.risk_coverage(ax, answers, rows["y"]),
            "Risk-coverage",
            "Error rate of the rows answered, as the least confident ones are refused.",
        ),
    ]


def of_weights(model: Model) -> list[Picture]:
    """Figure of the weights' signal-to-noise ratios, of an `AutoSoftplusNormal`."""
    guide = model.estimator.posterior_.guide
    if type(guide) is not AutoSoftplusNormal:
        return []
    ratios = pruning.signal_to_noise(guide)
    caption = "Means of the weights over their standard deviations; pruning begins on the left."
    return [draw(lambda ax: plots.snr_density_and_cdf(ax, ratios), "Weights", caption)]


def predicted_and_true(ax: Axes, rows: dict[str, Tensor], threshold: float) -> None:
    """Means and intervals over the truth, refused rows in red."""
    some = np.random.default_rng(0).permutation(len(rows["y"]))[:_MOST]
    y, mean, lower, upper, doubt = (
        rows[name].numpy()[some] for name in ("y", "mean", "lower", "upper", "doubt")
    )
    ax.vlines(y, lower, upper, color=SKY, linewidth=0.7)
    for which, colour in ((doubt <= threshold, BLUE), (doubt > threshold, VERMILLION)):
        ax.plot(y[which], mean[which], "o", color=colour, markersize=2.5)
    ax.axline((float(y.mean()), float(y.mean())), slope=1, color=BLACK, lw=0.8, ls=":")
    ax.set(xlabel="true", ylabel="predicted")
