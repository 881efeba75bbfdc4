# SPDX-License-Identifier: Apache-2.0
"""Figures of the digits in `quickstart`."""

from typing import TypeAlias

import matplotlib.pyplot as plt
from torch import Tensor

import pyro_bbb as bbb
from _helpers.run import Picture, Run
from pyro_bbb import plots

Predictions: TypeAlias = dict[str, bbb.ClassificationPrediction]
DIGITS = "test digits"
PHOTOGRAPHS = "photograph patches"


def draw_loss(run: Run, history: bbb.History) -> Picture:
    """Both costs over the epochs."""
    with plots.style():
        figure, ax = plt.subplots()
        plots.loss_parts(ax, history).set_title("The loss and its two parts")
    caption = (
        "Complexity cost: divergence of the posterior from the prior. Data cost: negative "
        "log-likelihood of all training digits."
    )
    return run.picture(figure, "loss_parts", caption)


def draw_entropies(run: Run, ensembles: Predictions) -> Picture:
    """Predictive entropy of each kind of input."""
    outside = {kind: p.entropy for kind, p in ensembles.items() if kind != DIGITS}
    with plots.style():
        figure, ax = plt.subplots()
        plots.entropy_histogram(ax, ensembles[DIGITS].entropy, outside)
        ax.set_title("How uncertain the ensemble is")
    caption = "Predictive entropy; ln 10 = 2.3 nats is a uniform guess among ten classes."
    return run.picture(figure, "entropy", caption)


def draw_votes(
    run: Run, inputs: dict[str, Tensor], ensembles: Predictions, y: Tensor
) -> list[Picture]:
    """Plot votes on digits of lowest and highest entropy, and on photographs of median entropy."""
    order = ensembles[DIGITS].entropy.argsort()
    middling = ensembles[PHOTOGRAPHS].entropy.argsort()
    half = len(middling) // 2
    groups = [
        ("confident", DIGITS, order[:3], "The three test digits of lowest entropy."),
        ("uncertain", DIGITS, order[-3:], "The three test digits of highest entropy."),
        (
            "ood",
            PHOTOGRAPHS,
            middling[half - 1 : half + 2],
            "Three photograph patches of median entropy.",
        ),
    ]
    pictures = []
    for name, kind, indices, caption in groups:
        prediction = ensembles[kind]
        with plots.style():
            figure, axes = plt.subplots(3, 2, figsize=(4.8, 5.4), width_ratios=(1, 2))
            for (left, right), index in zip(axes, indices.tolist(), strict=True):
                plots.image(left, inputs[kind][index])
                plots.votes(right, prediction, index)
                truth = f"a {int(y[index])}; " if kind == DIGITS else ""
                right.set_title(f"{truth}entropy {float(prediction.entropy[index]):.2f} nats")
            for ax in axes[:-1, 1]:
                ax.set_xlabel("")
            handles = axes[0, 1].get_legend_handles_labels()
            figure.legend(*handles, loc="outside lower center", ncols=2)
        pictures.append(run.picture(figure, f"votes_{name}", caption))
    return pictures
