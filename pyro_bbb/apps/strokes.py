# SPDX-License-Identifier: Apache-2.0
"""Drawings as strokes, and the pixels that a network of digits was trained on.

Each of scikit-learn's digits fills 20 of 32 columns and all 32 rows, has its leftmost ink in the
top row above its leftmost ink in the bottom row, and covers about the same area, a 1 as much as an
8: NIST's programs sheared, stretched and thickened or thinned them (Garris et al., NISTIR 5469,
1994). Then the pixels with ink of each 4x4 block were counted (E. Alpaydin and C. Kaynak, Optical
Recognition of Handwritten Digits, UCI, 1998).

Strokes are lists of points ``[m, 2]``, x to the right and y down, in any unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

Points: TypeAlias = NDArray[np.float64]
Strokes: TypeAlias = Sequence[Points]
_ROOM = np.array([20.0, 32.0])  # columns and rows that a digit fills, of 32 each
_FINE = 4  # dots per pixel and direction while drawing
_INK = 0.305  # fraction of the 32x32 pixels; the digits' mean, their std is 0.034
_EDGE = 0.08  # of the height: what counts as the top row, and as the bottom row
_STRETCH = 2.5  # at most, of one direction against the other, or a straight 1 would be a square
_PEN = (1.0, 12.0)  # narrowest and widest, pixels
LONG = 3.5  # length of a scribble against the diagonal of its box; a digit has 1 to 3

# Corners of straight strokes, on a square of side 1, in styles that scikit-learn's digits lack:
# nearly all of its 7s have a bar, its 4s a closed or slanted top, and few of its 1s a long flag.
STYLES: dict[int, list[list[tuple[float, float]]]] = {
    1: [[(0.1, 0.3), (0.5, 0.0)], [(0.5, 0.0), (0.5, 1.0)]],
    4: [[(0.1, 0.0), (0.0, 0.6), (0.8, 0.6)], [(0.6, 0.0), (0.6, 1.0)]],
    7: [[(0.0, 0.0), (0.7, 0.0), (0.3, 1.0)]],
}


def pixels(strokes: Strokes) -> Tensor:
    """Return a drawing of a point or more as the network's input, ink 1 and paper 0, ``[64]``."""
    upright = _sheared(strokes)
    low, high = _box(upright)
    pen = _INK * 32 * 32 / max(length(upright) / max((high - low).max(), 1e-9) * 32, 1.0)
    for _ in range(4):  # to the pen that covers the area; a wider one has less room to move
        pen = float(np.clip(pen, *_PEN))
        scales = np.maximum(_ROOM - pen, 1) / np.maximum(high - low, 1e-9)
        scales = np.minimum(scales, _STRETCH * scales.min())
        ink = _painted([(stroke - (low + high) / 2) * scales + 16 for stroke in upright], pen)
        pen *= (_INK / ink.mean()) ** 1.2
    blocks = (ink > 0.5).reshape(8, 4, 8, 4).mean((1, 3))
    return torch.from_numpy(blocks.astype(np.float32).reshape(-1))


def examples() -> dict[str, Strokes]:
    """Return drawings to click by name, on a square of side 1."""
    four = [(0.4, 0.15), (0.28, 0.55), (0.72, 0.55)], [(0.6, 0.35), (0.6, 0.85)]
    return {
        "3": [
            np.concatenate([_arc((0.5, 0.32), 0.17, -150, 90), _arc((0.5, 0.67), 0.18, -90, 150)])
        ],
        "4": [np.array(stroke) for stroke in four],
        "7": [np.array([(0.3, 0.18), (0.7, 0.18), (0.45, 0.85)])],
        "a face": [
            _arc((0.5, 0.5), 0.36, 0, 360),
            _arc((0.38, 0.42), 0.03, 0, 360),
            _arc((0.62, 0.42), 0.03, 0, 360),
            _arc((0.5, 0.52), 0.2, 20, 160),
        ],
        "a zigzag": [np.array([(0.1 + 0.08 * i, 0.2 + 0.6 * (i % 2)) for i in range(11)])],
    }


def styled_digit(number: int, rng: np.random.Generator) -> Strokes:
    """Draw a digit of `STYLES`, its corners moved and its proportions changed at random."""
    proportions = rng.uniform(0.6, 1.4, 2)
    corners = [np.array(stroke) for stroke in STYLES[number]]
    return [(stroke + rng.normal(0, 0.05, stroke.shape)) * proportions for stroke in corners]


def scribble(rng: np.random.Generator) -> Strokes:
    """Draw a scribble, longer than any digit of its size."""
    while True:
        strokes = [_random_stroke(rng) for _ in range(int(rng.integers(1, 8)))]
        low, high = _box(strokes)
        if length(strokes) > LONG * np.hypot(*(high - low)):
            return strokes


def length(strokes: Strokes) -> float:
    """Return the total length of the strokes."""
    return float(sum(np.hypot(*np.diff(stroke, axis=0).T).sum() for stroke in strokes))


def _random_stroke(rng: np.random.Generator) -> Points:
    start, size = rng.uniform(-0.5, 0.5, 2), rng.choice([0.1, 0.25, 0.5])
    shape = rng.integers(3)
    if shape == 0:  # straight lines from corner to corner
        return np.asarray(start + np.cumsum(rng.normal(0, size, (int(rng.integers(2, 12)), 2)), 0))
    along = np.linspace(0, 1, 40)[:, None]
    if shape == 1:  # waves of random amplitude and phase
        waves = np.arange(1, 4)
        phases = rng.uniform(0, 2 * np.pi, (2, 1, 3))
        curve = np.sin(np.pi * along * waves * rng.uniform(0.5, 2) + phases) @ rng.normal(0, 1, 3)
        return np.asarray(start + size * curve.T)
    angle = 2 * np.pi * along[:, 0] * rng.uniform(0.5, 3) + rng.uniform(0, 2 * np.pi)
    inner = rng.uniform(0, 0.4) if angle[-1] - angle[0] > 2 * np.pi else 1.0  # twice round is no 0
    radii = size * rng.uniform(0.3, 1, 2) * np.linspace(inner, 1, 40)[:, None]
    return np.asarray(start + radii * np.stack([np.cos(angle), np.sin(angle)], 1))


def _arc(centre: tuple[float, float], radius: float, begin: float, end: float) -> Points:
    """Return the part of a circle between two angles in degrees, clockwise from the right."""
    angle = np.radians(np.linspace(begin, end, 48))
    return np.asarray(centre) + radius * np.stack([np.cos(angle), np.sin(angle)], 1)


def _sheared(strokes: Strokes) -> Strokes:
    """Shear the strokes so that the leftmost points of top and bottom are on one vertical."""
    fractions = np.linspace(0, 1, 16, endpoint=False)[:, None, None]
    dense = [  # so that every narrow band has points of the stroke
        np.concatenate([(s[:-1] + fractions * np.diff(s, axis=0)).reshape(-1, 2), s[-1:]])
        for s in strokes
    ]
    points = np.concatenate(dense)
    (_, top), (_, bottom) = _box(dense)
    height = bottom - top
    if height <= 0:
        return strokes
    above = points[points[:, 1] <= top + _EDGE * height, 0].min()
    below = points[points[:, 1] >= bottom - _EDGE * height, 0].min()
    slope = np.clip((below - above) / height, -1, 1)
    return [stroke - np.outer(stroke[:, 1] - top, [slope, 0]) for stroke in strokes]


def _painted(strokes: Strokes, pen: float) -> Points:
    """Return the fraction of each of 32x32 pixels that a round pen covers."""
    canvas = Image.new("L", (32 * _FINE, 32 * _FINE))
    draw, radius = ImageDraw.Draw(canvas), pen * _FINE / 2
    for stroke in strokes:
        dots = stroke * _FINE - 0.5
        if len(dots) > 1:
            draw.line([tuple(dot) for dot in dots], fill=1, width=round(pen * _FINE))
        for x, y in dots:  # round ends and joints
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=1)
    fine = np.asarray(canvas, dtype=np.float64)
    return np.asarray(fine.reshape(32, _FINE, 32, _FINE).mean((1, 3)))


def _box(strokes: Strokes) -> tuple[Points, Points]:
    points = np.concatenate(strokes)
    return points.min(0), points.max(0)
