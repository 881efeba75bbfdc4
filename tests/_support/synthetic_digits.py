# SPDX-License-Identifier: Apache-2.0
"""Digits and scribbles as a hand draws them: strokes on a square pad, from a few styles each.

`report` has what the network of ``pyro-bbb play`` says of 600 such digits and 400 scribbles.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from pyro_bbb.apps.digit_classifier import Classifier, train
from pyro_bbb.apps.strokes import pixels

Points = NDArray[np.float64]
Drawing = list[Points]

# Corner points that a smooth curve is drawn through, in per cent of a square; y points down.
# A style is its strokes with slashes between.
STYLES = {
    0: [
        "50,5 20,25 17,65 45,95 78,70 80,30 50,5",
        "50,14 20,30 17,62 45,86 78,66 80,34 50,14",
        "50,5 80,30 78,70 45,95 17,65 20,25 50,5 42,8",
    ],
    1: [
        "50,0 50,33 50,66 50,100",
        "60,0 55,50 48,100",
        "30,25 42,13 55,0 / 55,0 55,50 55,100",
    ],
    2: [
        "20,25 45,2 75,20 60,50 20,95 / 20,95 50,95 85,95",
        "22,20 50,0 78,22 65,55 30,90 20,85 35,80 60,95 85,90",
    ],
    3: [
        "20,12 50,0 75,20 45,45 / 45,45 80,68 55,98 18,88",
        "20,2 50,2 80,2 / 80,2 62,22 48,40 / 48,40 80,60 65,93 20,93",
    ],
    4: [
        "55,0 35,32 15,65 / 15,65 50,65 90,65 / 65,35 65,70 65,100",
        "25,0 22,25 20,50 / 20,50 50,50 80,50 / 75,0 73,50 70,100",
    ],
    5: [
        "80,2 55,2 30,2 / 30,2 27,20 25,42 / 25,42 60,38 80,68 55,97 20,90",
        "25,5 25,25 25,42 / 25,42 60,42 78,70 50,97 18,88 / 25,5 50,4 82,3",
    ],
    6: [
        "65,0 35,30 22,70 45,98 75,78 55,55 27,70",
        "72,8 45,5 22,45 25,85 55,98 78,72 50,50 24,65",
    ],
    7: [
        "18,4 50,4 82,4 / 82,4 60,50 42,100",
        "18,4 50,4 82,4 / 82,4 60,50 42,100 / 40,52 60,52 80,52",
    ],
    8: [
        "72,12 45,0 25,20 50,45 78,72 50,98 22,75 50,47 75,22 68,10",
        "50,0 25,20 50,44 75,20 50,0 / 50,44 20,72 50,99 80,72 50,44",
    ],
    9: [
        "75,20 50,0 25,22 45,47 73,25 / 74,20 72,60 65,100",
        "75,15 45,2 25,28 50,48 75,25 74,60 55,95 25,92",
    ],
}


def smooth(corners: Points, steps: int = 8) -> Points:
    """A Catmull-Rom curve through the corners."""
    padded = np.concatenate(
        [2 * corners[:1] - corners[1:2], corners, 2 * corners[-1:] - corners[-2:-1]]
    )
    t = np.linspace(0, 1, steps, endpoint=False)[:, None]
    a, b, c, d = (padded[i : len(padded) - 3 + i, None] for i in range(4))
    curve = b + 0.5 * t * (c - a + t * (2 * a - 5 * b + 4 * c - d + t * (3 * (b - c) + d - a)))
    return np.concatenate([curve.reshape(-1, 2), corners[-1:]])


def drawn(strokes: Drawing, rng: np.random.Generator) -> Drawing:
    """The strokes by an unsteady hand: somewhere on the pad, in some size, width and slant."""
    height, narrow, slant = rng.uniform(0.35, 0.9), rng.uniform(0.6, 1.0), rng.uniform(-0.15, 0.35)
    turn = rng.normal(0, 0.08)
    matrix = height * np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    matrix = matrix @ np.array([[narrow, -narrow * slant], [0, 1]])
    shaken = [stroke + rng.normal(0, 0.025, stroke.shape) for stroke in strokes]
    curves = [(smooth(stroke) - 0.5) @ matrix.T for stroke in shaken]
    corners = np.concatenate(curves)
    low, high = corners.min(0), corners.max(0)
    place = rng.uniform(0.03 - low, np.maximum(0.97 - high, 0.03 - low))
    return [curve + place for curve in curves]


def digit(number: int, style: int, rng: np.random.Generator) -> Drawing:
    """A digit in one of its styles."""
    strokes = STYLES[number][style % len(STYLES[number])].split(" / ")
    points = [[point.split(",") for point in stroke.split()] for stroke in strokes]
    return drawn([np.array(stroke, dtype=float) / 100 for stroke in points], rng)


def zigzag(rng: np.random.Generator) -> Drawing:
    turns = int(rng.integers(6, 14))
    x = np.linspace(0.1, 0.9, turns) + rng.normal(0, 0.03, turns)
    y = np.where(np.arange(turns) % 2, 0.15, 0.85) + rng.normal(0, 0.08, turns)
    return [np.stack([x, y], 1)]


def spiral(rng: np.random.Generator) -> Drawing:
    angle = np.linspace(0, 2 * np.pi * rng.uniform(2.5, 5), 100) + rng.uniform(0, 6)
    radius = np.linspace(0.02, 0.45, 100)
    return [0.5 + np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)]


def tangle(rng: np.random.Generator) -> Drawing:
    return [smooth(rng.uniform(0.1, 0.9, (int(rng.integers(10, 25)), 2)))]


def hatching(rng: np.random.Generator) -> Drawing:
    lines = int(rng.integers(5, 10))
    ends = np.linspace(0.1, 0.9, lines) + rng.normal(0, 0.02, lines)
    across = rng.random() < 0.5
    tops = [np.array([[x, 0.1], [x, 0.9]]) for x in ends]
    return [stroke[:, ::-1] if across else stroke for stroke in tops]


def grid(rng: np.random.Generator) -> Drawing:
    ends = rng.uniform(0.25, 0.75, 2).tolist() + [0.3, 0.7]
    return [np.array([[x, 0.1], [x, 0.9]]) for x in ends] + [
        np.array([[0.1, y], [0.9, y]]) for y in ends
    ]


def star(rng: np.random.Generator) -> Drawing:
    angles = rng.uniform(0, 1) + np.arange(int(rng.integers(4, 8))) * np.pi / 4
    ends = 0.42 * np.stack([np.cos(angles), np.sin(angles)], 1)
    return [np.stack([0.5 - end, 0.5 + end]) for end in ends]


def dots(rng: np.random.Generator) -> Drawing:
    return [centre + rng.normal(0, 0.01, (3, 2)) for centre in rng.uniform(0.1, 0.9, (12, 2))]


def face(rng: np.random.Generator) -> Drawing:
    angle = np.linspace(0, 2 * np.pi, 40)
    ring = np.stack([np.cos(angle), np.sin(angle)], 1)
    mouth = ring[3:18] * 0.25 + [0.5, 0.52]
    eyes = [ring * 0.04 + [x, 0.38] + rng.normal(0, 0.02, 2) for x in (0.35, 0.65)]
    return [ring * 0.42 + 0.5, mouth, *eyes]


SCRIBBLES: dict[str, Callable[[np.random.Generator], Drawing]] = {
    draw.__name__: draw for draw in (zigzag, spiral, tangle, hatching, grid, star, dots, face)
}


@cache
def quickly_trained() -> Classifier:
    """Train it as the first start does, in a quarter of the time."""
    return train(8, copies=3)


def report(classifier: Classifier) -> dict[str, float]:
    """Shares: digits recognised, answered, right among the answered; scribbles refused."""
    rng = np.random.default_rng(1)
    threshold = classifier.threshold
    labels = torch.arange(10).repeat_interleave(60)
    digits = [digit(int(label), i, rng) for i, label in enumerate(labels)]
    asked = classifier.predict(torch.stack([pixels(strokes) for strokes in digits]))
    right, answered = asked.label == labels, ~asked.refuse(threshold)
    shares = {
        "recognised": float(right.double().mean()),
        "answered": float(answered.double().mean()),
        "right where answered": float(right[answered].double().mean()),
    }
    for name, scribbled in SCRIBBLES.items():
        strange = torch.stack([pixels(scribbled(rng)) for _ in range(50)])
        shares[f"refused: {name}"] = float(
            classifier.predict(strange).refuse(threshold).double().mean()
        )
    shares["refused"] = sum(shares[f"refused: {name}"] for name in SCRIBBLES) / len(SCRIBBLES)
    return shares
