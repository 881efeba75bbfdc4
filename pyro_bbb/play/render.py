# SPDX-License-Identifier: Apache-2.0
"""Pictures of answers as HTML and SVG in the page's own colours, so that they fit any width."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_bbb._utils.colors import BLUE, ORANGE, SKY, VERMILLION
from pyro_bbb.play.regression import GRID, NOISE
from pyro_bbb.prediction import ClassificationPrediction, RegressionPrediction

WIDTH, HEIGHT = 480, 320  # of the plot of a regression, in its own units
_LEFT, _TOP, _RIGHT, _BOTTOM = 44, 10, 470, 288  # where the axes lie in it


def seen(x: Tensor, side: int) -> str:
    """The picture ``[side * side]`` that the network gets, dark ink on white paper."""
    cells = "".join(
        f'<rect x="{i % side}" y="{i // side}" width="1.02" height="1.02" opacity="{ink:.2f}"/>'
        for i, ink in enumerate(x.tolist())
        if ink > 0
    )
    label = f"the input of the networks, {side}x{side} pixels"
    box = f'viewBox="0 0 {side} {side}" role="img" aria-label="{label}"'
    return f'<svg class="seen" {box}>{cells}</svg>'


def in_words(prediction: ClassificationPrediction, threshold: float) -> str:
    """The answer for a screen reader."""
    sure, label = float(prediction.confidence), int(prediction.label)
    guess = f"{label}, with probability {sure:.2f}"
    return f"I don't know, best guess {guess}" if prediction.refuse(threshold) else guess


def verdict(prediction: ClassificationPrediction, threshold: float) -> str:
    """The answer in words: the digit, or that it is not known."""
    sure, label = float(prediction.confidence), int(prediction.label)
    if bool(prediction.refuse(threshold)):
        return (
            '<div class="verdict unsure">I don\'t know</div>'
            f"<div>best guess {label}, with probability {sure:.2f}: not above {threshold:.2f}</div>"
        )
    return f'<div class="verdict">{label}</div><div>with probability {sure:.2f}</div>'


def votes(prediction: ClassificationPrediction) -> str:
    """A row for each class: a bar of its votes, a mark at its probability."""
    chosen = prediction.sample_probs[:, 0].argmax(-1)
    counts = torch.bincount(chosen, minlength=prediction.probs.shape[-1]).tolist()
    probs = prediction.probs[0].tolist()
    marks = [
        f'<div class="mark" style="left:{100 * prob:.1f}%;background:{VERMILLION}"></div>'
        for prob in probs
    ]
    numbers = [str(count) for count in counts]
    rows = _rows([count / len(chosen) for count in counts], numbers, marks)
    return _labelled("votes", "votes", numbers, rows)


def probabilities(prediction: ClassificationPrediction) -> str:
    """A row for each class: a bar of its probability."""
    probs = prediction.probs[0].tolist()
    numbers = [f"{prob:.2f}" for prob in probs]
    return _labelled("probs", "probabilities", numbers, _rows(probs, numbers, [""] * len(probs)))


def _rows(fractions: list[float], numbers: list[str], marks: list[str]) -> str:
    return "".join(
        f'<div class="vote"><b>{label}</b><div class="track">'
        f'<div class="bar" style="width:{100 * fraction:.1f}%;background:{SKY}"></div>{mark}</div>'
        f'<span class="count">{number}</span></div>'
        for label, (fraction, number, mark) in enumerate(
            zip(fractions, numbers, marks, strict=True)
        )
    )


def _labelled(name: str, words: str, numbers: list[str], rows: str) -> str:
    """The rows as one picture, whose label has the numbers of all classes."""
    listed = ", ".join(f"{label}: {number}" for label, number in enumerate(numbers))
    return f'<div class="{name}" role="img" aria-label="{words} by class: {listed}">{rows}</div>'


def split(prediction: ClassificationPrediction) -> str:
    """The entropy as one bar of two parts, of at most the logarithm of the number of classes.

    One network by itself has the first part alone.
    """
    most = math.log(prediction.probs.shape[-1])
    parts = [
        ("aleatoric", float(prediction.aleatoric), ORANGE, "each network by itself is unsure"),
        ("epistemic", float(prediction.epistemic), BLUE, "the networks disagree"),
    ][: len(prediction.sample_probs)]
    bars = "".join(
        f'<div class="bar" style="width:{100 * nats / most:.1f}%;background:{colour}"></div>'
        for _, nats, colour, _ in parts
    )
    words = "".join(
        f'<div><i style="background:{colour}"></i>{name} <b class="{name}">{nats:.2f}</b> nats: '
        f"{meaning}</div>"
        for name, nats, colour, meaning in parts
    )
    return f'<div class="split"><div class="track" aria-hidden="true">{bars}</div>{words}</div>'


def point_at(x: float, y: float) -> tuple[float, float] | None:
    """Position of a click on the axes from -1 to 1, or ``None`` outside of them."""
    across = 2 * (x - _LEFT) / (_RIGHT - _LEFT) - 1
    up = 1 - 2 * (y - _TOP) / (_BOTTOM - _TOP)
    return (across, up) if abs(across) <= 1 and abs(up) <= 1 else None


def plot(points: list[tuple[float, float]], prediction: RegressionPrediction | None) -> str:
    """The points, and where there are some the mean with its two bands."""
    parts = [_frame()] if prediction is None else [_frame(), _bands(prediction)]
    dots = "".join(
        f'<circle class="point" cx="{_x(x):.1f}" cy="{_y(y):.1f}" r="5" fill="{VERMILLION}"/>'
        for x, y in points
    )
    label = f"plot of {len(points)} points; x and y from -1 to 1"
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}"'
    return f'<svg class="plot" {box}>{"".join([*parts, dots])}</svg>'


def _bands(prediction: RegressionPrediction) -> str:
    at, mean = GRID[:, 0].tolist(), prediction.mean[:, 0]
    total, inner = 2 * prediction.std[:, 0], 2 * prediction.epistemic_std[:, 0]
    bands = "".join(
        f'<polygon class="{name}" fill="{colour}" fill-opacity="0.45" points="'
        + _path(at + at[::-1], [*(mean + width).tolist(), *(mean - width).tolist()[::-1]])
        + '"/>'
        for name, colour, width in (("total", SKY, total), ("epistemic", BLUE, inner))
    )
    line = f'<polyline class="mean" points="{_path(at, mean.tolist())}"/>'
    return f'<g clip-path="url(#axes)">{bands}{line}</g>'


def _frame() -> str:
    box = f'x="{_LEFT}" y="{_TOP}" width="{_RIGHT - _LEFT}" height="{_BOTTOM - _TOP}"'
    ticks = "".join(
        f'<text x="{_x(tick):.0f}" y="{_BOTTOM + 22}" text-anchor="middle">{tick:g}</text>'
        f'<text x="{_LEFT - 8}" y="{_y(tick) + 5:.0f}" text-anchor="end">{tick:g}</text>'
        for tick in (-1, -0.5, 0, 0.5, 1)
    )
    return f'<clipPath id="axes"><rect {box}/></clipPath><rect class="frame" {box}/>{ticks}'


def legend() -> str:
    """Legend of the plot."""
    parts = [
        (BLUE, "epistemic ± 2 sd: what more points would remove"),
        (SKY, f"total ± 2 sd: with the noise of the points, sd {NOISE:g} (aleatoric)"),
    ]
    words = "".join(f'<div><i style="background:{c}"></i>{text}</div>' for c, text in parts)
    return f'<div class="split">{words}</div>'


def _path(x: list[float], y: list[float]) -> str:
    return " ".join(f"{_x(a):.1f},{_y(b):.1f}" for a, b in zip(x, y, strict=True))


def _x(value: float) -> float:
    return _LEFT + (value + 1) / 2 * (_RIGHT - _LEFT)


def _y(value: float) -> float:
    return _BOTTOM - (value + 1) / 2 * (_BOTTOM - _TOP)
