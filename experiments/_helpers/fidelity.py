# SPDX-License-Identifier: Apache-2.0
"""Predictions compared with the reference posteriors, and pictures of their functions."""

import math
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
import torch
from pyro.distributions import Normal
from torch import Tensor

import pyro_bbb as bbb
from _helpers.run import Picture, Run
from _helpers.tables import Table, over
from pyro_bbb import plots
from pyro_bbb.data import Reference
from pyro_bbb.prediction import GaussianPrediction

SUMMARY = (
    "Distances are between the functions that a method draws and those of NUTS: the 1-Wasserstein "
    "distance between the draws of the network's output (of the probability, for classes; of the "
    "log-rate, for counts) at one input, averaged over inputs, in standard deviations of NUTS's "
    "draws. A point in their middle would score about 0.8. Sd: the standard deviation of the "
    "draws over that of NUTS's; the ideal is 1. The first row is NUTS against itself, one half of "
    "the chains against the other: smaller distances are noise."
)
LEVEL = 0.9


def drawn(prediction: bbb.Prediction, num_samples: int) -> bbb.Prediction:
    """Return the prediction by draws of each input's function, a Normal in closed form."""
    if not isinstance(prediction, GaussianPrediction):
        return prediction
    noise = torch.randn(num_samples, *prediction.mean.shape)
    loc = prediction.mean + prediction.function_std * noise
    return bbb.RegressionPrediction(Normal(loc, prediction.noise_std.expand_as(loc)))


def functions(
    reference: Reference,
    model: bbb.BayesianModel,
    posterior: Any,
    num_samples: int,
    seed: int,
    *,
    linearized: bool = False,
) -> Tensor:
    """Draws of the function at the reference's probes, ``[draws, probes]``."""
    options = {"num_samples": num_samples, "seed": seed, "linearized": linearized}
    prediction = bbb.predict(model, posterior, reference.probes, **options)
    return reference.as_draws(drawn(prediction, num_samples))


def mean_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Means of equally nested figures of several seeds; of failed ones the first."""
    failed = [record for record in records if "failed" in record]
    means: dict[str, Any] = failed[0] if failed else over(fmean, records)
    return means


def title(name: str) -> str:
    """Return the name of a problem in words."""
    return name.replace("_", " ").capitalize()


def nuts_table(records: dict[str, Any]) -> Table:
    """Convergence and costs of NUTS on every problem, given its diagnostics."""
    columns = ("NUTS", "R-hat, on", "off", "ESS, on", "off", "floor, off", "gradients", "seconds")
    rows = []
    for name, nuts in records.items():
        cells = [f"{nuts['r_hat'][at]:.3f}" for at in ("on", "off")]
        cells += [f"{nuts['ess'][at]:,.0f}" for at in ("on", "off")]
        cells += [f"{nuts['floor']['off']['function']:.3f}", f"{nuts['gradients_per_draw']:.0f}"]
        rows.append([title(name), *cells, f"{nuts['seconds']:.0f}"])
    return Table(columns, rows)


def draw_bands(
    run: Run,
    name: str,
    reference: Reference,
    figures: dict[str, Any],
    drawn_by: dict[str, Tensor],
) -> Picture:
    """Draw the functions of one input by every method in a panel, NUTS outlined in all."""
    order = reference.probes[:, 0].argsort()
    path, gold = reference.probes[order, 0], reference.functions[:, order, 0].float()
    rows = math.ceil(len(drawn_by) / 4)
    with plots.style():
        figure, axes = plt.subplots(
            rows, 4, figsize=(9.6, 1.9 * rows + 0.5), sharex=True, sharey=True, squeeze=False
        )
        for ax, (method, draws) in zip(axes.flat, drawn_by.items(), strict=False):
            data = (reference.x, reference.y)
            values = draws[:, order].float()
            plots.function_band(ax, path, values, reference=gold, data=data, level=LEVEL)
            ratio = figures[method]["off"]["sd_ratio"]
            ax.set_title(f"{method}\noff the data {ratio:.0%} of NUTS's sd", fontsize="x-small")
        for ax in axes.flat[len(drawn_by) :]:
            ax.set_axis_off()
        # NUTS's functions, and a quarter of their range on both sides
        low, high = float(gold.quantile(0.05, 0).min()), float(gold.quantile(0.95, 0).max())
        axes.flat[0].set_ylim(low - (high - low) / 4, high + (high - low) / 4)
        figure.supxlabel("x", fontsize="medium")
        figure.supylabel("f(x)", fontsize="medium")
        handles, labels = axes.flat[0].get_legend_handles_labels()
        labels = [label.replace("reference", "NUTS") for label in labels]
        figure.legend(handles, labels, loc="outside upper center", ncols=5)
    caption = (
        f"{title(reference.name)}. Blue: the central {LEVEL:.0%} of each method's functions; black "
        "lines: NUTS, the same in all panels."
    )
    return run.picture(figure, f"fidelity_{name}", caption)
