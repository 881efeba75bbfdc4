# SPDX-License-Identifier: Apache-2.0
"""The two pictures on top of ``README.md`` and of the documentation's start.

    python docs/readme_figures.py

writes ``docs/images/gap.png``, a regression with a gap in its data, and
``docs/images/answers.png``, digits and other images. A deterministic network of the same layers
stands next to each.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pyro_bbb as bbb
from pyro_bbb import plots
from pyro_bbb.sklearn import BayesianRegressor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments"))
from _helpers.training import train_plain  # noqa: E402
from quickstart import ood_inputs  # noqa: E402

IMAGES = ROOT / "docs" / "images"
EACH_STEP = {"batch_size": 10_000, "lr": 1e-2, "lr_schedule": "constant"}  # all data
NOISE = 0.1  # standard deviation of the regression's targets


def truth(x: Tensor) -> Tensor:
    """Return the function behind the data."""
    return torch.sin(2.2 * x) + 0.2 * x


def deterministic(sizes: list[int], activation: type[nn.Module]) -> nn.Sequential:
    """Return a network of plain torch."""
    layers: list[nn.Module] = []
    for inputs, outputs in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def draw_gap() -> None:
    """Draw the regression."""
    x = torch.cat([torch.linspace(-2.5, -1.0, 40), torch.linspace(0.8, 2.5, 40)])[:, None]
    y = truth(x) + NOISE * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    grid = torch.linspace(-2.7, 2.7, 400)[:, None]
    regressor = BayesianRegressor(random_state=0).fit(x.numpy(), y[:, 0].numpy())
    prediction = regressor.posterior_predictive(grid.numpy())
    torch.manual_seed(3)  # which fits the data; others end in worse optima
    plain = deterministic([1, 50, 1], nn.ReLU)
    train_plain(plain, (x, y), 3000, loss=nn.MSELoss(), **EACH_STEP)
    with plots.style():
        figure = Figure(figsize=(8, 3.3), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        left.plot(grid, plain(grid).detach(), color=plots.BLUE, linewidth=2.0)
        left.plot(grid, truth(grid), color=plots.BLACK, linestyle="--", linewidth=1.2)
        left.plot(x, y, "o", color=plots.VERMILLION, markersize=3.5)
        left.set(title="One network: sure, and wrong in the gap", xlabel="x", ylabel="y")
        plots.regression_band(right, grid, prediction, data=(x, y), truth=truth(grid))
        right.set(title="By default: unsure in the gap", ylabel="")
        left.set(xlim=(-2.7, 2.7), ylim=(-2.0, 2.0))
        figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=5)
        figure.savefig(IMAGES / "gap.png")


def draw_answers() -> None:
    """Draw digits and other images, each with the confidence of one network and of a hundred."""
    x, y = (torch.tensor(each) for each in load_digits(return_X_y=True))
    (x, y), (x_test, _) = bbb.data.split(x.float() / 16, y, fraction=0.25, seed=0)
    torch.manual_seed(0)
    model = bbb.BayesianModel(
        bbb.BayesianMLP([64, 200, 200, 10]), bbb.likelihoods.Categorical(), num_data=len(x)
    )
    guide = bbb.AutoSoftplusNormal(model)
    bbb.fit(model, guide, (x, y), epochs=300, seed=0)
    plain = deterministic([64, 200, 200, 10], nn.ReLU)
    train_plain(plain, (x, y), 300, **EACH_STEP)
    others = zip(("photo", "shuffled", "noise"), ood_inputs(x_test, 0).values(), strict=True)
    shown = {"digit": x_test[:2], **{kind: images[100:102] for kind, images in others}}
    with plots.style():
        figure = Figure(figsize=(8, 2.3), layout="constrained")
        rows = figure.subplots(2, 8, height_ratios=[3, 2])
        columns = [(kind, image) for kind, images in shown.items() for image in images]
        for (picture, bars), (kind, image) in zip(rows.T, columns, strict=True):
            plots.image(picture, image)
            picture.set_title(kind, fontweight="normal", loc="center")
            alone = plain(image[None]).softmax(-1).max().item()
            draw_bars(bars, alone, bbb.predict(model, guide, image[None]).confidence.item())
        rows[1, 0].set_yticks([0, 1], ["one network", "100 networks"])
        figure.supxlabel("confidence: probability of the most probable digit", fontsize="small")
        figure.savefig(IMAGES / "answers.png")


def draw_bars(ax: Axes, one: float, hundred: float) -> None:
    """Draw two confidences."""
    bars = ax.barh([0, 1], [one, hundred], color=[plots.ORANGE, plots.BLUE])
    ax.bar_label(bars, [f"{value:.0%}" for value in (one, hundred)], padding=2, fontsize="small")
    ax.set(xlim=(0, 1.5), xticks=[], yticks=[])
    ax.invert_yaxis()
    ax.spines["bottom"].set_visible(False)


if __name__ == "__main__":
    draw_gap()
    draw_answers()
