# SPDX-License-Identifier: Apache-2.0
"""Drawings for training that scikit-learn's digits lack: habits of other countries, and scribbles.

Nearly all of its 7s have a bar, its 4s a closed or slanted top, and few of its 1s a long flag.
"""

from __future__ import annotations

import numpy as np

from pyro_bbb.play.rasterize import Points, Strokes, length

# Corners of straight strokes, on a square of side 1, y down.
HABITS: dict[int, list[list[tuple[float, float]]]] = {
    1: [[(0.1, 0.3), (0.5, 0.0)], [(0.5, 0.0), (0.5, 1.0)]],
    4: [[(0.1, 0.0), (0.0, 0.6), (0.8, 0.6)], [(0.6, 0.0), (0.6, 1.0)]],
    7: [[(0.0, 0.0), (0.7, 0.0), (0.3, 1.0)]],
}
_LONG = 3.5  # length against the diagonal of its box; a digit has 1 to 3


def digit(number: int, rng: np.random.Generator) -> Strokes:
    """A digit of `HABITS`, its corners moved and its proportions changed at random."""
    proportions = rng.uniform(0.6, 1.4, 2)
    corners = [np.array(stroke) for stroke in HABITS[number]]
    return [(stroke + rng.normal(0, 0.05, stroke.shape)) * proportions for stroke in corners]


def scribble(rng: np.random.Generator) -> Strokes:
    """One drawing, its strokes in any unit."""
    while True:
        strokes = [_stroke(rng) for _ in range(int(rng.integers(1, 8)))]
        points = np.concatenate(strokes)
        if length(strokes) > _LONG * np.hypot(*np.ptp(points, axis=0)):
            return strokes


def _stroke(rng: np.random.Generator) -> Points:
    start, size = rng.uniform(-0.5, 0.5, 2), rng.choice([0.1, 0.25, 0.5])
    kind = rng.integers(3)
    if kind == 0:  # straight lines from corner to corner
        return np.asarray(start + np.cumsum(rng.normal(0, size, (int(rng.integers(2, 12)), 2)), 0))
    along = np.linspace(0, 1, 40)[:, None]
    if kind == 1:  # waves of random amplitude and phase
        waves = np.arange(1, 4)
        phases = rng.uniform(0, 2 * np.pi, (2, 1, 3))
        curve = np.sin(np.pi * along * waves * rng.uniform(0.5, 2) + phases) @ rng.normal(0, 1, 3)
        return np.asarray(start + size * curve.T)
    angle = 2 * np.pi * along[:, 0] * rng.uniform(0.5, 3) + rng.uniform(0, 2 * np.pi)
    inner = rng.uniform(0, 0.4) if angle[-1] - angle[0] > 2 * np.pi else 1.0  # twice round is no 0
    radii = size * rng.uniform(0.3, 1, 2) * np.linspace(inner, 1, 40)[:, None]
    return np.asarray(start + radii * np.stack([np.cos(angle), np.sin(angle)], 1))
