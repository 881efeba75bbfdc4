# SPDX-License-Identifier: Apache-2.0
"""Answers of the networks as HTML and SVG, by the macros of ``play.html``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyro_bbb._utils.colors import BLUE, ORANGE, SKY
from pyro_bbb.apps.html import template
from pyro_bbb.apps.point_regression import GRID, NOISE
from pyro_bbb.prediction import ClassificationPrediction, RegressionPrediction

WIDTH, HEIGHT = 480, 320  # of the plot of a regression, in SVG units
_LEFT, _TOP, _RIGHT, _BOTTOM = _AXES = 44, 10, 470, 288


def _html(macro: str, *values: Any) -> str:
    return str(getattr(template("play.html").module, macro)(*values))


def seen(x: Tensor, side: int) -> str:
    """Draw the input ``[side * side]`` of the networks, dark ink on white paper."""
    return _html("seen", x.tolist(), side)


def in_words(prediction: ClassificationPrediction, threshold: float) -> str:
    """Return the answer for a screen reader."""
    guess = f"{int(prediction.label)}, with probability {float(prediction.confidence):.2f}"
    return f"I don't know, best guess {guess}" if prediction.refuse(threshold) else guess


def verdict(prediction: ClassificationPrediction, threshold: float) -> str:
    """Return the digit and its probability, or that it is not known."""
    confidence, refused = float(prediction.confidence), bool(prediction.refuse(threshold))
    return _html("verdict", int(prediction.label), confidence, threshold, refused)


def votes(prediction: ClassificationPrediction) -> str:
    """Draw a row for each class: a bar of its votes, a mark at its probability."""
    chosen = prediction.sample_probs[:, 0].argmax(-1)
    probs = prediction.probs[0].tolist()
    counts = torch.bincount(chosen, minlength=len(probs)).tolist()
    fractions = [count / len(chosen) for count in counts]
    return _html("bars", "votes", "votes", fractions, [str(count) for count in counts], probs)


def probabilities(prediction: ClassificationPrediction) -> str:
    """Draw a row for each class: a bar of its probability."""
    probs = prediction.probs[0].tolist()
    return _html("bars", "probs", "probabilities", probs, [f"{p:.2f}" for p in probs], None)


def entropy(prediction: ClassificationPrediction) -> str:
    """Draw aleatoric and epistemic entropy; a single network has the first only."""
    parts = [
        ("aleatoric", float(prediction.aleatoric), ORANGE, "each network by itself is unsure"),
        ("epistemic", float(prediction.epistemic), BLUE, "the networks disagree"),
    ]
    most = math.log(prediction.probs.shape[-1])
    return _html("entropy", parts[: len(prediction.sample_probs)], most)


def legend() -> str:
    """Return the legend of the plot."""
    total = f"total ± 2 sd: with the noise of the points, sd {NOISE:g} (aleatoric)"
    parts = [(BLUE, "epistemic ± 2 sd: what more points would remove"), (SKY, total)]
    return _html("legend", parts)


def point_at(x: float, y: float) -> tuple[float, float] | None:
    """Return the position of a click on the axes from -1 to 1, or None outside of them."""
    across = 2 * (x - _LEFT) / (_RIGHT - _LEFT) - 1
    up = 1 - 2 * (y - _TOP) / (_BOTTOM - _TOP)
    return (across, up) if abs(across) <= 1 and abs(up) <= 1 else None


def plot(points: list[tuple[float, float]], prediction: RegressionPrediction | None) -> str:
    """Draw the points, and where there are some the mean with its two bands."""
    bands, line = [], ""
    if prediction is not None:
        at, mean = GRID[:, 0].tolist(), prediction.mean[:, 0]
        line = _path(at, mean.tolist())
        for name, color, std in (
            ("total", SKY, prediction.std[:, 0]),
            ("epistemic", BLUE, prediction.epistemic_std[:, 0]),
        ):
            edges = [*(mean + 2 * std).tolist(), *(mean - 2 * std).tolist()[::-1]]
            bands.append((name, color, _path(at + at[::-1], edges)))
    ticks = [(f"{t:g}", f"{_x(t):.0f}", round(_y(t))) for t in (-1, -0.5, 0, 0.5, 1)]
    places = [(_x(x), _y(y)) for x, y in points]
    return _html("plot", WIDTH, HEIGHT, _AXES, ticks, bands, line, places)


def _path(x: list[float], y: list[float]) -> str:
    return " ".join(f"{_x(a):.1f},{_y(b):.1f}" for a, b in zip(x, y, strict=True))


def _x(value: float) -> float:
    return _LEFT + (value + 1) / 2 * (_RIGHT - _LEFT)


def _y(value: float) -> float:
    return _BOTTOM - (value + 1) / 2 * (_BOTTOM - _TOP)
