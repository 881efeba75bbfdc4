# SPDX-License-Identifier: Apache-2.0
"""Answers of the networks as HTML and SVG, by the macros of ``play.html``."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import Tensor

from pyro_bbb._utils import colors
from pyro_bbb.apps.point_regression import GRID, NOISE
from pyro_bbb.prediction import ClassificationPrediction, RegressionPrediction

WIDTH, HEIGHT = 480, 320  # of the plot of a regression, in SVG units
_LEFT, _TOP, _RIGHT, _BOTTOM = _AXES = 44, 10, 470, 288


@cache
def _macros() -> Any:
    loader = PackageLoader("pyro_bbb.apps", ".")
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    jinja.globals["colors"] = vars(colors)
    return jinja.get_template("play.html").module


def _html(macro: str, *values: Any) -> str:
    return str(getattr(_macros(), macro)(*values))


def seen(x: Tensor) -> str:
    """Draw the input ``[64]`` of the networks, dark ink on white paper."""
    return _html("seen", x.tolist())


def in_words(prediction: ClassificationPrediction, threshold: float) -> str:
    """Return the answer for a screen reader."""
    guess = f"{int(prediction.label)}, with probability {float(prediction.confidence):.2f}"
    return f"I don't know, best guess {guess}" if prediction.refuse(threshold) else guess


def answer(prediction: ClassificationPrediction, threshold: float, *, votes: bool) -> str:
    """Draw verdict, votes or probabilities by class, and entropies."""
    probs, marks = prediction.probs[0].tolist(), []
    bars = [(p, f"{p:.2f}") for p in probs]
    if votes:
        chosen, marks = prediction.sample_probs[:, 0].argmax(-1), probs
        counts = torch.bincount(chosen, minlength=len(probs)).tolist()
        bars = [(count / len(chosen), str(count)) for count in counts]
    entropies = [float(prediction.aleatoric), float(prediction.epistemic)]
    return _html(
        "answer",
        int(prediction.label),
        float(prediction.confidence),
        threshold,
        bool(prediction.refuse(threshold)),
        bars,
        marks,
        entropies[: len(prediction.sample_probs)],  # a single network has no epistemic one
        math.log(len(probs)),
    )


def legend() -> str:
    """Return the legend of the plot."""
    return _html("legend", f"{NOISE:g}")


def point_at(x: float, y: float) -> tuple[float, float] | None:
    """Return the position of a click on the axes from -1 to 1, or None outside of them."""
    across = 2 * (x - _LEFT) / (_RIGHT - _LEFT) - 1
    up = 1 - 2 * (y - _TOP) / (_BOTTOM - _TOP)
    return (across, up) if abs(across) <= 1 and abs(up) <= 1 else None


def _place(x: float, y: float) -> tuple[float, float]:
    """Return SVG units of a point; the inverse of `point_at`."""
    across, up = (x + 1) / 2, (y + 1) / 2
    return _LEFT + across * (_RIGHT - _LEFT), _BOTTOM - up * (_BOTTOM - _TOP)


def plot(points: list[tuple[float, float]], prediction: RegressionPrediction | None) -> str:
    """Draw the points, and the mean with its two bands once trained."""

    def path(x: list[float], y: list[float]) -> str:
        return " ".join("{:.1f},{:.1f}".format(*_place(*at)) for at in zip(x, y, strict=True))

    bands, line = [], ""
    if prediction is not None:
        at, mean = GRID[:, 0].tolist(), prediction.mean[:, 0]
        line = path(at, mean.tolist())
        deviations = {"total": prediction.std, "epistemic": prediction.epistemic_std}
        for name, std in deviations.items():
            upper, lower = mean + 2 * std[:, 0], mean - 2 * std[:, 0]
            edges = [*upper.tolist(), *lower.tolist()[::-1]]
            bands.append((name, path(at + at[::-1], edges)))
    ticks = [(f"{t:g}", *map(round, _place(t, t))) for t in (-1, -0.5, 0, 0.5, 1)]
    places = [_place(*point) for point in points]
    return _html("plot", WIDTH, HEIGHT, _AXES, ticks, bands, line, places)
