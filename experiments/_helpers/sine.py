# SPDX-License-Identifier: Apache-2.0
"""Noisy sine: data and figures of `sine_regression`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import pyro_bbb as bbb
from _helpers.run import Data, Picture, Run
from pyro_bbb import plots

UNIT_SCALE = math.log(math.e - 1)  # the rho at which softplus(rho) = 1
BANDS = "bands"


@dataclass(frozen=True)
class Problem:
    """Data of one seed, and the inputs of predictions."""

    data: Data
    x: Tensor
    noise: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, seed: int, *, even_noise: bool) -> "Problem":
        """32 points with noise of sd 1; or 512 whose noise grows from 0.2 to 2.2."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.linspace(-0.5, 0.5, 32 if even_noise else 512)[:, None]
        noise = torch.ones_like if even_noise else growing
        y = sine(x) + noise(x) * torch.randn(x.shape, generator=generator)
        return cls((x, y), torch.linspace(-1.5, 1.5, 1000)[:, None], noise)


def sine(x: Tensor) -> Tensor:
    """The truth without its noise."""
    return 10 * torch.sin(2 * math.pi * x)


def growing(x: Tensor) -> Tensor:
    """Standard deviation of the uneven noise."""
    return 0.2 + 2 * (x + 0.5)


def draw_bands(
    run: Run, bands: dict[str, Any], nuts: bbb.RegressionPrediction | None, ratios: dict[str, float]
) -> list[Picture]:
    """Plot predictive bands, a panel per variant and one for NUTS."""
    panels: dict[str, Any] = {}
    for name, (problem, prediction, _) in bands.items():
        title = f"{name}: {ratios[name]:.1f} times the epistemic sd off the data"
        panels[name] = problem, prediction, title
        if nuts is not None and not panels.get("NUTS"):
            panels["NUTS"] = problem, nuts, f"NUTS, {name}: {ratios['NUTS']:.1f} times"
    with plots.style():
        rows = math.ceil(len(panels) / 2)
        figure, axes = plt.subplots(
            rows, 2, sharex=True, sharey=True, figsize=(9.6, 3.4 * rows), squeeze=False
        )
        for ax in axes.flat[len(panels) :]:
            ax.set_visible(False)
        for ax, (problem, prediction, title) in zip(axes.flat, panels.values(), strict=False):
            truth = sine(problem.x)
            plots.regression_band(ax, problem.x, prediction, data=problem.data, truth=truth)
            ax.set_title(title, fontsize=10)
            ax.label_outer()
        axes.flat[len(panels) - 2].tick_params(labelbottom=True)  # nothing below it
        for name, ax in zip(panels, axes.flat, strict=False):
            if name in bands:
                mean = bands[name][2]
                ax.plot(bands[name][0].x, mean, color="black", lw=1, ls=":", label="mean network")
        axes[0, 0].set_ylim(-45, 45)
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    caption = (
        "Mean and 2 sd bands of the posterior's networks. The dark band is what more data would "
        "remove, the light one adds the noise. Dotted: the one network of mean weights."
    )
    return [run.picture(figure, BANDS, caption)]


def draw_noise(run: Run, problem: Problem, prediction: bbb.RegressionPrediction) -> Picture:
    """The two kinds of uncertainty apart."""
    x = problem.x.flatten()
    inside = x.abs() <= 0.5
    with plots.style():
        figure, ax = plt.subplots()
        ax.plot(x, prediction.aleatoric_std.flatten(), label="aleatoric")
        ax.plot(x, prediction.epistemic_std.flatten(), label="epistemic")
        ax.plot(x[inside], problem.noise(x)[inside], "k--", lw=1.2, label="true noise")
        ax.axvspan(-0.5, 0.5, color="0.92", zorder=0)
        ax.set(xlabel="x", ylabel="standard deviation", yscale="log")
        ax.set_title("The noise is learned where there are data")
        figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    caption = "The shaded range has data. Beyond it nothing is known of the noise either."
    return run.picture(figure, "noise", caption)


def draw_mixture(run: Run, path: list[tuple[float, float, float]]) -> Picture:
    """The learned prior over training, and as a density."""
    start, end = path[0], path[-1]
    with plots.style():
        figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.6))
        for values, label in zip(
            zip(*path, strict=True), ("pi", "sigma 1", "sigma 2"), strict=True
        ):
            left.plot(values, label=label)
        left.set(xlabel="step", ylabel="value", ylim=(0, None))
        left.set_title("The prior's three parameters in training")
        left.legend()
        w = torch.linspace(-4, 4, 801)
        for values, label in ((start, "at the start"), (end, "learned")):
            right.plot(w, bbb.ScaleMixtureNormal(*values).log_prob(w).exp(), label=label)
        right.set(xlabel="weight", ylabel="density", yscale="log")
        right.set_title("The prior of every weight")
        right.legend()
    caption = "One pi, sigma 1 and sigma 2 for all weights, learned by maximising the ELBO."
    return run.picture(figure, "learned_mixture", caption)
