# SPDX-License-Identifier: Apache-2.0
"""From strokes on a pad to the pixels that a network was trained on.

Of scikit-learn's digits every one fills 20 of 32 columns and all 32 rows, has its leftmost ink in
the top row above its leftmost ink in the bottom row, and covers about the same area, a 1 as much as
an 8: NIST's programs sheared, stretched and thickened or thinned them (Garris et al., NISTIR 5469,
1994). Of each 4x4 block the pixels with ink were counted (E. Alpaydin and C. Kaynak, Optical
Recognition of Handwritten Digits, UCI, 1998). MNIST's were scaled to 20x20 with their proportions
kept, and put with their centre of mass into the middle of 28x28 (LeCun et al., 1998).

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
_FINE = 4  # dots per pixel and direction while drawing
_INK = 0.305  # fraction of the 32x32 pixels; the digits' mean, their sd is 0.034
_EDGE = 0.08  # of the height: what counts as the top row, and as the bottom row
_STRETCH = 2.5  # at most, of one direction against the other, or a straight 1 would be a square
_PEN = (1.0, 12.0)  # narrowest and widest, pixels
_MNIST_PEN = 2.6  # pixels; its digits cover 0.13 of the picture


def pixels(strokes: Strokes, side: int) -> Tensor:
    """The drawing as the input of a network, ink 1 and paper 0, ``[side * side]``.

    A side is 8 as in scikit-learn's digits, or 28 as in MNIST. There must be a point to draw.
    """
    picture = _small(strokes) if side == 8 else _mnist(strokes)
    return torch.from_numpy(picture.astype(np.float32).reshape(-1))


def _small(strokes: Strokes) -> Points:
    upright = _sheared(strokes)
    low, high = _box(upright)
    pen = _INK * 32 * 32 / max(length(upright) / max((high - low).max(), 1e-9) * 32, 1.0)
    for _ in range(4):  # to the pen that covers the area; a wider one has less room to move
        pen = float(np.clip(pen, *_PEN))
        ink = _painted(_fitted(upright, np.array([20 - pen, 32 - pen]), _STRETCH, 32), pen, 32)
        pen *= (_INK / ink.mean()) ** 1.2
    return np.asarray((ink > 0.5).reshape(8, 4, 8, 4).mean((1, 3)))


def _mnist(strokes: Strokes) -> Points:
    placed = _fitted(strokes, np.full(2, 20 - _MNIST_PEN), 1.0, 28)
    ink = _painted(placed, _MNIST_PEN, 28)
    where = np.arange(28) + 0.5
    centre = np.array([ink.sum(0) @ where, ink.sum(1) @ where]) / ink.sum()
    return _painted([stroke + 14 - centre for stroke in placed], _MNIST_PEN, 28)


def _sheared(strokes: Strokes) -> Strokes:
    """The strokes with the leftmost points of top and bottom on one vertical."""
    points = np.concatenate([_close(stroke) for stroke in strokes])
    (_, top), (_, bottom) = _box([points])
    height = bottom - top
    if height <= 0:
        return strokes
    above = points[points[:, 1] <= top + _EDGE * height, 0].min()
    below = points[points[:, 1] >= bottom - _EDGE * height, 0].min()
    slope = np.clip((below - above) / height, -1, 1)
    return [stroke - np.outer(stroke[:, 1] - top, [slope, 0]) for stroke in strokes]


def _fitted(strokes: Strokes, room: Points, stretch: float, side: int) -> Strokes:
    """The strokes scaled to ``room`` in the middle of the picture."""
    low, high = _box(strokes)
    scales = np.maximum(room, 1) / np.maximum(high - low, 1e-9)
    scales = np.minimum(scales, stretch * scales.min())
    return [(stroke - (low + high) / 2) * scales + side / 2 for stroke in strokes]


def _painted(strokes: Strokes, pen: float, side: int) -> Points:
    """Fraction of each pixel that a round pen covers, ``[side, side]``."""
    canvas = Image.new("L", (side * _FINE, side * _FINE))
    draw, radius = ImageDraw.Draw(canvas), pen * _FINE / 2
    for stroke in strokes:
        dots = stroke * _FINE - 0.5
        if len(dots) > 1:
            draw.line([tuple(dot) for dot in dots], fill=1, width=round(pen * _FINE))
        for x, y in dots:  # round ends and joints
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=1)
    fine = np.asarray(canvas, dtype=np.float64)
    return np.asarray(fine.reshape(side, _FINE, side, _FINE).mean((1, 3)))


def _box(strokes: Strokes) -> tuple[Points, Points]:
    points = np.concatenate(strokes)
    return points.min(0), points.max(0)


def length(strokes: Strokes) -> float:
    """Of all strokes together, in their unit."""
    return float(sum(np.hypot(*np.diff(stroke, axis=0).T).sum() for stroke in strokes))


def _close(stroke: Points) -> Points:
    """The stroke with points so close that its edges in a narrow band are seen."""
    if len(stroke) < 2:
        return stroke
    fractions = np.linspace(0, 1, 16, endpoint=False)[:, None, None]
    between = stroke[:-1] + fractions * np.diff(stroke, axis=0)
    return np.concatenate([between.reshape(-1, 2), stroke[-1:]])
