# SPDX-License-Identifier: Apache-2.0
"""The two pictures of ``README.md``, made by the code that is shown above them there.

    python docs/readme_figures.py

runs the README's Python blocks and writes ``docs/images/gap.png`` and ``docs/images/answers.png``.
A network of scikit-learn is compared in each.
"""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.neural_network import MLPClassifier, MLPRegressor

import pyro_bbb as bbb
from pyro_bbb import plots

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments"))
from quickstart import ood_inputs  # noqa: E402

IMAGES = ROOT / "docs" / "images"


def run_blocks() -> list[dict[str, Any]]:
    """Run each Python block of the README; return their variables."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    variables: list[dict[str, Any]] = []
    for block in blocks:
        pyro.set_rng_seed(0)  # torch, numpy and random
        variables.append({})
        exec(block, variables[-1])
    return variables


def draw_gap(values: dict[str, Any]) -> None:
    """Draw the regression of the first block."""
    x, y, grid = (values[name] for name in ("x", "y", "x_new"))
    network = MLPRegressor(
        hidden_layer_sizes=(50, 50), solver="lbfgs", max_iter=5_000, random_state=0
    ).fit(x, y)
    with plots.style():
        figure = Figure(figsize=(6.4, 3.0), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        right.fill_between(
            grid[:, 0], values["low"], values["high"], color=plots.SKY, alpha=0.6, label="90 %"
        )
        fits = (left, network.predict(grid)), (right, values["mean"])
        for ax, fit in fits:
            ax.plot(grid, fit, color=plots.BLUE, linewidth=2.0, label="prediction")
            ax.plot(grid, np.sin(2.2 * grid), "k--", linewidth=1.2, label="truth")
            ax.plot(x, y, "o", color=plots.VERMILLION, markersize=3.0, label="data")
            ax.set(xlim=(-2.7, 2.7), ylim=(-2.2, 2.2))
        left.set_title("MLPRegressor")
        right.set_title("BayesianRegressor")
        figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=4)
        figure.savefig(IMAGES / "gap.png")


def draw_answers(values: dict[str, Any]) -> None:
    """Draw digits and other images, each with the confidence of one network and of a hundred."""
    x_test = values["x_test"]
    with warnings.catch_warnings(action="ignore"):  # that it would train on
        plain = MLPClassifier((100, 100), max_iter=300, random_state=0)
        plain.fit(values["x_train"].numpy(), values["y_train"].numpy())
    photographs, shuffled, noise = ood_inputs(x_test, 0).values()
    shown = [
        *(("digit", image) for image in x_test[:2]),
        *(("photo", image) for image in photographs[100:102]),
        ("shuffled", shuffled[100]),
        ("noise", noise[100]),
    ]
    images = torch.stack([image for _, image in shown])
    hundred = bbb.predict(values["model"], values["guide"], images).confidence.tolist()
    one = plain.predict_proba(images.numpy()).max(-1).tolist()
    with plots.style():
        figure = Figure(figsize=(6.4, 2.4), layout="constrained")
        rows = figure.subplots(2, len(shown), height_ratios=[3, 2])
        for (picture, bars), (kind, image), *pair in zip(rows.T, shown, one, hundred, strict=True):
            plots.image(picture, image)
            picture.set_title(kind, fontweight="normal", loc="center")
            draw_bars(bars, *pair)
        rows[1, 0].set_yticks([0, 1], ["one network", "100 networks"])
        figure.savefig(IMAGES / "answers.png")


def draw_bars(ax: Axes, one: float, hundred: float) -> None:
    """Draw two confidences."""
    bars = ax.barh([0, 1], [one, hundred], color=[plots.ORANGE, plots.BLUE])
    ax.bar_label(bars, [f"{value:.0%}" for value in (one, hundred)], padding=2)
    ax.set(xlim=(0, 1.9), xticks=[], yticks=[])
    ax.invert_yaxis()
    ax.spines["bottom"].set_visible(False)


if __name__ == "__main__":
    table, network = run_blocks()
    draw_gap(table)
    draw_answers(network)
