# SPDX-License-Identifier: Apache-2.0
"""Drawings to click, for those who would not draw: digits, and things that are no digit."""

from __future__ import annotations

import numpy as np

from pyro_bbb.play.rasterize import Points, Strokes


def samples() -> dict[str, Strokes]:
    """Strokes by name, on a square of side 1, y down."""
    return {
        "3": [
            np.concatenate([_arc((0.5, 0.32), 0.17, -150, 90), _arc((0.5, 0.67), 0.18, -90, 150)])
        ],
        "4": _corners([(0.4, 0.15), (0.28, 0.55), (0.72, 0.55)], [(0.6, 0.35), (0.6, 0.85)]),
        "7": _corners([(0.3, 0.18), (0.7, 0.18), (0.45, 0.85)]),
        "a face": [
            _arc((0.5, 0.5), 0.36, 0, 360),
            _arc((0.38, 0.42), 0.03, 0, 360),
            _arc((0.62, 0.42), 0.03, 0, 360),
            _arc((0.5, 0.52), 0.2, 20, 160),
        ],
        "a zigzag": _corners([(0.1 + 0.08 * i, 0.2 + 0.6 * (i % 2)) for i in range(11)]),
    }


def _corners(*strokes: list[tuple[float, float]]) -> Strokes:
    return [np.array(stroke) for stroke in strokes]


def _arc(centre: tuple[float, float], radius: float, begin: float, end: float) -> Points:
    """Part of a circle between two angles in degrees, clockwise from the right."""
    angle = np.radians(np.linspace(begin, end, 48))
    return np.asarray(centre) + radius * np.stack([np.cos(angle), np.sin(angle)], 1)
