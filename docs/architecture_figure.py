# SPDX-License-Identifier: Apache-2.0
"""The picture of ``docs/architecture.md``: packages on their layers, and the flow of data.

    python docs/architecture_figure.py

writes ``docs/images/architecture.png``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

TARGET = Path(__file__).parent / "images" / "architecture.png"
WIDTH, HEIGHT, STEP = 100.0, 7.0, 11.0  # of the figure, of a package, from layer to layer

# package: layer, left, right, what is inside
PACKAGES: dict[str, tuple[int, float, float, str]] = {
    "_recorder": (1, 20, 40, "recorded operations"),
    "_utils": (1, 43, 60, "torch helpers"),
    "metrics": (3, 76, 95, "accuracy, NLL, ECE"),
    "data": (3, 4, 16, "x, y"),
    "distributions": (3, 20, 46, "densities, closed-form KLs"),
    "latents": (3, 49, 60, "one vector z"),
    "_param_store": (2, 20, 60, "parameters of their module"),
    "priors": (4, 20, 31, "p(w)"),
    "pruning": (4, 34, 45, "S/N ratio"),
    "guides": (4, 48, 59, "q(w)"),
    "estimators": (4, 62, 73, "of gradients"),
    "networks": (5, 20, 31, "Bayesian layers"),
    "likelihoods": (5, 34, 45, "p(y | outputs)"),
    "models": (6, 20, 45, "p(w) p(y | x, w)"),
    "persistence": (7, 20, 34, "save, load"),
    "elbo": (7, 37, 56, "free energy"),
    "prediction": (7, 76, 95, "draws, summaries"),
    "training": (8, 20, 73, ""),
    "mcmc": (8, 76, 84, "NUTS"),
    "deployment": (8, 86, 97, "plain torch"),
    "sklearn": (9, 20, 31, "estimators"),
    "bandits": (9, 34, 56, "decisions"),
    "plots": (9, 76, 95, "matplotlib"),
    "apps": (10, 20, 56, "train, predict, report; play"),
    "evaluation": (10, 76, 95, "all scores, one table"),
}
PARTS = {"batches": (22, 31), "objective": (36, 51), "step runner": (54, 64), "History": (66, 72)}

# what flows: the corners of its arrow, as (x, layer, shift in heights of a package), and a label
Corner = tuple[float, int, float]
FLOWS: list[tuple[list[Corner], str]] = [
    ([(10, 3, 0.5), (10, 8, -0.17), (22, 8, -0.17)], "data"),
    ([(25.5, 4, 0.5), (25.5, 5, -0.5)], ""),
    ([(25.5, 5, 0.5), (25.5, 6, -0.5)], ""),
    ([(39.5, 5, 0.5), (39.5, 6, -0.5)], ""),
    ([(41, 6, 0.5), (41, 7, -0.5)], "model"),
    ([(52, 4, 0.5), (52, 7, -0.5)], "guide"),
    ([(43.5, 7, 0.5), (43.5, 8, -0.42)], "loss"),
    ([(63, 4, 0.5), (63, 8, -0.42)], "noise"),
    ([(31, 8, -0.17), (36, 8, -0.17)], ""),
    ([(51, 8, -0.17), (54, 8, -0.17)], ""),
    ([(64, 8, -0.17), (66, 8, -0.17)], ""),
    ([(70.5, 8, -0.5), (70.5, 7, 0), (76, 7, 0)], "trained\nguide"),
    ([(69, 8, 0.08), (69, 9, 0), (76, 9, 0)], ""),
    ([(80, 8, -0.5), (80, 7, 0.5)], "chains"),
    ([(91, 7, 0.5), (91, 8, -0.5)], "draws"),
    ([(85.5, 7, -0.5), (85.5, 3, 0.5)], "probs, intervals"),
    ([(85.5, 9, 0.5), (85.5, 10, -0.5)], ""),
    ([(95, 7, 0), (98.5, 7, 0), (98.5, 9, 0), (95, 9, 0)], ""),
]
BOTH_WAYS = [((45, 4, 0), (48, 4, 0)), ((27, 7, 0.5), (27, 8, -0.5))]


def draw(ax: Axes) -> None:
    """Draw layers, packages and arrows on axes in units of a hundredth of the width."""
    for layer in range(1, 11):
        shade = "#f3f5f8" if layer % 2 else "#ffffff"
        ax.axhspan(_y(layer, 0) - STEP / 2, _y(layer, 0) + STEP / 2, color=shade, zorder=0)
        ax.text(1.2, _y(layer, 0), str(layer), color="#777777", fontsize=9, va="center")
    for name, (layer, left, right, inside) in PACKAGES.items():
        _box(ax, name, layer, left, right, inside)
    for part, (left, right) in PARTS.items():
        _part(ax, part, left, right)
    for corners, label in FLOWS:
        _flow(ax, [(x, _y(layer, shift)) for x, layer, shift in corners], label)
    for one, other in BOTH_WAYS:
        _arrow(ax, (one[0], _y(*one[1:])), (other[0], _y(*other[1:])), "<|-|>")


def _y(layer: int, shift: float) -> float:
    return STEP * (layer - 0.5) + HEIGHT * shift


def _box(ax: Axes, name: str, layer: int, left: float, right: float, inside: str) -> None:
    internal = name.startswith("_") or name == "distributions"
    face, edge = ("#eceff1", "#90a4ae") if internal else ("#e3ecf9", "#0072b2")
    style = f"round,pad=0,rounding_size={HEIGHT / 7}"
    corner = (left, _y(layer, -0.5))
    ax.add_patch(
        FancyBboxPatch(corner, right - left, HEIGHT, boxstyle=style, fc=face, ec=edge, zorder=2)
    )
    middle = (left + right) / 2
    _text(ax, middle, _y(layer, 0.2 if inside else 0.33), name, fontsize=9, weight="bold")
    _text(ax, middle, _y(layer, -0.22), inside)


def _text(ax: Axes, x: float, y: float, text: str, **style: Any) -> None:
    ax.text(x, y, text, **{"fontsize": 8, "ha": "center", "va": "center", "zorder": 4, **style})


def _part(ax: Axes, name: str, left: float, right: float) -> None:
    corner, width, height = (left, _y(8, -0.42)), right - left, 0.5 * HEIGHT
    style = "round,pad=0,rounding_size=0.6"
    ax.add_patch(
        FancyBboxPatch(corner, width, height, boxstyle=style, fc="white", ec="#0072b2", zorder=3)
    )
    _text(ax, (left + right) / 2, _y(8, -0.18), name)


def _flow(ax: Axes, points: list[tuple[float, float]], label: str) -> None:
    xs, ys = zip(*points, strict=True)
    ax.plot(xs[:-1], ys[:-1], color="#d55e00", lw=1.4, zorder=1.5, solid_joinstyle="miter")
    _arrow(ax, points[-2], points[-1], "-|>")
    (x, low), (_, high) = points[0], points[1]
    _text(ax, x + 0.8, (low + high) / 2, label, color="#a34700", ha="left")


def _arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], style: str) -> None:
    arrow = {"arrowstyle": style, "color": "#d55e00", "lw": 1.4, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", end, start, arrowprops=arrow, zorder=5)


def main() -> None:
    """Write the picture."""
    figure = Figure(figsize=(10, 8.2))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, WIDTH), ylim=(0, 10 * STEP))
    ax.axis("off")
    draw(ax)
    figure.savefig(TARGET, dpi=160, metadata={"Software": None})


if __name__ == "__main__":
    main()
