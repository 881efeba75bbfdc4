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
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from pyro_bbb import plots, pruning
from pyro_bbb._utils.colors import BLACK, BLUE, SKY, VERMILLION
from pyro_bbb.cli.metrics import risk_coverage
from pyro_bbb.cli.model import About, Model
from pyro_bbb.guides import AutoSoftplusNormal

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
    """Figures of predictions against true targets, and of the gain of refusal."""
    refusal = draw(
        lambda ax: refusal_curve(ax, rows, model.about),
        "Risk-coverage",
        "Error of the rows answered, as the least certain ones are refused. A curve that does not "
        "fall below the dotted line, the error of all rows, gains nothing by refusal. Dashed: the "
        "fraction that is answered.",
    )
    if "probs" in rows:
        reliability = draw(
            lambda ax: plots.reliability(ax, rows["probs"], rows["y"]),
            "Reliability diagram",
            "Accuracy of the predictions of each confidence, with 95 % intervals.",
        )
        return [reliability, refusal]
    return [
        draw(
            lambda ax: predicted_and_true(ax, rows, model.about),
            "Predicted and true",
            f"Means with {model.about.level:.0%} intervals (some rows, if there are many). "
            "Red: refused.",
        ),
        draw(
            lambda ax: plots.coverage(ax, rows["pit"]),
            "Coverage of the intervals",
            "Fraction of true targets inside central intervals of each level. On the diagonal "
            "intervals are calibrated, below it too narrow.",
        ),
        refusal,
    ]


def of_weights(model: Model) -> list[Picture]:
    """Figure of the weights' signal-to-noise ratios, of an `AutoSoftplusNormal`."""
    guide = model.estimator.posterior_.guide
    if type(guide) is not AutoSoftplusNormal:
        return []
    ratios = pruning.signal_to_noise(guide)
    caption = "Means of the weights over their standard deviations; pruning begins on the left."
    return [draw(lambda ax: plots.snr_density_and_cdf(ax, ratios), "Weights", caption)]


def predicted_and_true(ax: Axes, rows: dict[str, Tensor], about: About) -> None:
    """Means and intervals over the truth, refused rows in red."""
    some = np.random.default_rng(0).permutation(len(rows["y"]))[:_MOST]
    y, mean, lower, upper, uncertainty = (
        rows[name].numpy()[some] for name in ("y", "mean", "lower", "upper", about.uncertainty)
    )
    refused = uncertainty > about.threshold
    ax.vlines(y, lower, upper, color=SKY, linewidth=0.7)
    for which, colour in ((~refused, BLUE), (refused, VERMILLION)):
        ax.plot(y[which], mean[which], "o", color=colour, markersize=2.5)
    ax.axline((float(y.mean()), float(y.mean())), slope=1, color=BLACK, lw=0.8, ls=":")
    ax.set(xlabel="true", ylabel="predicted")


def refusal_curve(ax: Axes, rows: dict[str, Tensor], about: About) -> None:
    """Error rate or RMSE of the rows answered over their fraction; of all rows; the threshold."""
    coverage, risk = risk_coverage(rows, about.uncertainty)
    answered = (rows[about.uncertainty] <= about.threshold).double().mean()
    ax.plot(coverage, risk, color=BLUE)
    ax.axhline(float(risk[-1]), color=BLACK, linewidth=0.8, linestyle=":")
    ax.axvline(float(answered), color=VERMILLION, linewidth=0.8, linestyle="--")
    ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if classes := "probs" in rows:
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set(xlim=(0.0, 1.0), ylim=(0.0, None), xlabel="rows answered, the most certain first")
    ax.set_ylabel(f"{'error rate' if classes else 'RMSE'} of the rows answered")
