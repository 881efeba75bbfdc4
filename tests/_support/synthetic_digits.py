# SPDX-License-Identifier: Apache-2.0
"""Digits and scribbles as a hand draws them: strokes on a square pad, from a few styles each.

    python tests/_support/synthetic_digits.py [--scribbles 0]

trains the network of ``pyro-bbb play``, with so many scribbles for each digit (a quarter), and
prints what it says of 600 such digits and 400 scribbles.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
import tyro
from numpy.typing import NDArray

from pyro_bbb.apps.digit_classifier import Classifier, train
from pyro_bbb.apps.strokes import pixels

Points = NDArray[np.float64]
Drawing = list[Points]

# Corner points that a smooth curve is drawn through, on a square of side 1; y points down.
OVAL = [(0.5, 0.05), (0.2, 0.25), (0.17, 0.65), (0.45, 0.95), (0.78, 0.7), (0.8, 0.3), (0.5, 0.05)]
STYLES: dict[int, list[list[list[tuple[float, float]]]]] = {
    0: [
        [OVAL],
        [[(x, y * 0.8 + 0.1) for x, y in OVAL]],
        [OVAL[::-1] + [(0.42, 0.08)]],
    ],
    1: [
        [[(0.5, 0.0), (0.5, 0.33), (0.5, 0.66), (0.5, 1.0)]],
        [[(0.6, 0.0), (0.55, 0.5), (0.48, 1.0)]],
        [[(0.3, 0.25), (0.42, 0.13), (0.55, 0.0)], [(0.55, 0.0), (0.55, 0.5), (0.55, 1.0)]],
    ],
    2: [
        [
            [(0.2, 0.25), (0.45, 0.02), (0.75, 0.2), (0.6, 0.5), (0.2, 0.95)],
            [(0.2, 0.95), (0.5, 0.95), (0.85, 0.95)],
        ],
        [
            [(0.22, 0.2), (0.5, 0.0), (0.78, 0.22), (0.65, 0.55), (0.3, 0.9), (0.2, 0.85)]
            + [(0.35, 0.8), (0.6, 0.95), (0.85, 0.9)]
        ],
    ],
    3: [
        [
            [(0.2, 0.12), (0.5, 0.0), (0.75, 0.2), (0.45, 0.45)],
            [(0.45, 0.45), (0.8, 0.68), (0.55, 0.98), (0.18, 0.88)],
        ],
        [
            [(0.2, 0.02), (0.5, 0.02), (0.8, 0.02)],
            [(0.8, 0.02), (0.62, 0.22), (0.48, 0.4)],
            [(0.48, 0.4), (0.8, 0.6), (0.65, 0.93), (0.2, 0.93)],
        ],
    ],
    4: [
        [
            [(0.55, 0.0), (0.35, 0.32), (0.15, 0.65)],
            [(0.15, 0.65), (0.5, 0.65), (0.9, 0.65)],
            [(0.65, 0.35), (0.65, 0.7), (0.65, 1.0)],
        ],
        [
            [(0.25, 0.0), (0.22, 0.25), (0.2, 0.5)],
            [(0.2, 0.5), (0.5, 0.5), (0.8, 0.5)],
            [(0.75, 0.0), (0.73, 0.5), (0.7, 1.0)],
        ],
    ],
    5: [
        [
            [(0.8, 0.02), (0.55, 0.02), (0.3, 0.02)],
            [(0.3, 0.02), (0.27, 0.2), (0.25, 0.42)],
            [(0.25, 0.42), (0.6, 0.38), (0.8, 0.68), (0.55, 0.97), (0.2, 0.9)],
        ],
        [
            [(0.25, 0.05), (0.25, 0.25), (0.25, 0.42)],
            [(0.25, 0.42), (0.6, 0.42), (0.78, 0.7), (0.5, 0.97), (0.18, 0.88)],
            [(0.25, 0.05), (0.5, 0.04), (0.82, 0.03)],
        ],
    ],
    6: [
        [
            [(0.65, 0.0), (0.35, 0.3), (0.22, 0.7), (0.45, 0.98), (0.75, 0.78), (0.55, 0.55)]
            + [(0.27, 0.7)]
        ],
        [
            [(0.72, 0.08), (0.45, 0.05), (0.22, 0.45), (0.25, 0.85), (0.55, 0.98), (0.78, 0.72)]
            + [(0.5, 0.5), (0.24, 0.65)]
        ],
    ],
    7: [
        [[(0.18, 0.04), (0.5, 0.04), (0.82, 0.04)], [(0.82, 0.04), (0.6, 0.5), (0.42, 1.0)]],
        [
            [(0.18, 0.04), (0.5, 0.04), (0.82, 0.04)],
            [(0.82, 0.04), (0.6, 0.5), (0.42, 1.0)],
            [(0.4, 0.52), (0.6, 0.52), (0.8, 0.52)],
        ],
    ],
    8: [
        [
            [(0.72, 0.12), (0.45, 0.0), (0.25, 0.2), (0.5, 0.45), (0.78, 0.72), (0.5, 0.98)]
            + [(0.22, 0.75), (0.5, 0.47), (0.75, 0.22), (0.68, 0.1)]
        ],
        [
            [(0.5, 0.0), (0.25, 0.2), (0.5, 0.44), (0.75, 0.2), (0.5, 0.0)],
            [(0.5, 0.44), (0.2, 0.72), (0.5, 0.99), (0.8, 0.72), (0.5, 0.44)],
        ],
    ],
    9: [
        [
            [(0.75, 0.2), (0.5, 0.0), (0.25, 0.22), (0.45, 0.47), (0.73, 0.25)],
            [(0.74, 0.2), (0.72, 0.6), (0.65, 1.0)],
        ],
        [
            [(0.75, 0.15), (0.45, 0.02), (0.25, 0.28), (0.5, 0.48), (0.75, 0.25), (0.74, 0.6)]
            + [(0.55, 0.95), (0.25, 0.92)]
        ],
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
    styles = STYLES[number]
    return drawn([np.array(stroke) for stroke in styles[style % len(styles)]], rng)


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
    each.__name__: each for each in (zigzag, spiral, tangle, hatching, grid, star, dots, face)
}


@cache
def quickly_trained() -> Classifier:
    """As the first start trains it, in a quarter of the time."""
    return train(8, copies=3)


def report(classifier: Classifier) -> dict[str, float]:
    """Shares: digits recognised, answered, right among the answered; scribbles refused."""
    rng = np.random.default_rng(1)
    side, threshold = classifier.side, classifier.threshold
    labels = torch.arange(10).repeat_interleave(60)
    digits = [digit(int(label), i, rng) for i, label in enumerate(labels)]
    asked = classifier.predict(torch.stack([pixels(strokes, side) for strokes in digits]))
    right, answered = asked.label == labels, ~asked.refuse(threshold)
    found = {
        "recognised": float(right.double().mean()),
        "answered": float(answered.double().mean()),
        "right where answered": float(right[answered].double().mean()),
    }
    for kind, scribbled in SCRIBBLES.items():
        strange = torch.stack([pixels(scribbled(rng), side) for _ in range(50)])
        found[f"refused: {kind}"] = float(
            classifier.predict(strange).refuse(threshold).double().mean()
        )
    found["refused"] = sum(found[f"refused: {kind}"] for kind in SCRIBBLES) / len(SCRIBBLES)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = tyro.cli(train)
    print(f"threshold {found.threshold:.2f}")
    for words, share in report(found).items():
        print(f"{words:22} {share:6.1%}")
