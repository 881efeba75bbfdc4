# SPDX-License-Identifier: Apache-2.0
"""Figures of `fashion_mnist`."""

from itertools import compress
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor

import pyro_bbb as bbb
from _helpers.fashion_mnist import DIGITS, GARMENTS, Answers, Recipe, Scores, Sets, agreement
from _helpers.run import Picture, Run
from _helpers.training import make_prior
from pyro_bbb import metrics, plots
from pyro_bbb.training.history import Record

CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat") + (
    "sandal", "shirt", "sneaker", "bag", "boot",
)  # fmt: skip

WIDE, NARROW = "400-400", "100"
UNIFORM = "A uniform guess among ten classes has ln 10 = 2.3 nats"


def halfway(series: list[float]) -> int:
    """The step after which a noisy series has covered half of its way, smoothed over 50 steps."""
    width = min(50, len(series) // 4 or 1)
    smooth = np.convolve(series, np.ones(width) / width, mode="valid")
    middle = (smooth[0] + smooth[-1]) / 2
    return int(np.argmax((smooth - middle) * (smooth[0] - middle) <= 0)) + width


def draw_prior(run: Run, recipe: Recipe) -> Picture:
    """The prior; of a mixture the two components as well, and its spike from nearby."""
    distribution, spike = make_prior(recipe.prior), recipe.prior[-1]
    mixture = len(recipe.prior) > 1
    with plots.style():
        if not mixture:
            figure, ax = plt.subplots()
            plots.prior_density(ax, distribution).set_title("The prior of every weight")
        else:
            figure, (ax, near) = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True)
            plots.prior_density(ax, distribution).set_title("The prior: a spike and a slab")
            plots.prior_density(near, distribution).set_title("The spike")
            near.set(xlim=(-6 * spike, 6 * spike), ylabel="")
            near.get_legend().remove()
    return run.picture(figure, "prior", "Prior density of a single weight.")


def full_batches(steps: Record) -> Record:
    """The record without the steps on an epoch's last, short batch."""
    full = [weight == max(steps.kl_weight) for weight in steps.kl_weight]
    return Record(**{name: list(compress(series, full)) for name, series in vars(steps).items()})


def draw_training(run: Run, history: bbb.History) -> list[Picture]:
    """The loss and its parts at every step."""
    steps = full_batches(history.steps)
    falls = {name: halfway(getattr(steps, name)) for name in ("nll", "kl")}
    with plots.style():
        loss, ax = plt.subplots()
        plots.loss_parts(ax, steps, unit="step")
        ax.set_title(f"Half-way: data after {falls['nll']:,} steps, complexity {falls['kl']:,}")
        densities, ax = plt.subplots()
        at = range(1, len(steps) + 1)
        ax.plot(at, np.array(steps.log_guide) / 1e6, label="log q(w)")
        ax.plot(at, np.array(steps.log_prior) / 1e6, "--", label="log p(w)")
        ax.set(xlabel="step", ylabel="million nats")
        ax.set_title("Their difference is the KL")
        ax.legend()
    return [
        run.picture(
            loss,
            "loss_parts",
            "The loss of every minibatch: weighted KL (complexity) and negative log-likelihood.",
        ),
        run.picture(
            densities,
            "log_densities",
            "Log-density of each step's weights under the posterior and under the prior.",
        ),
    ]


def draw_components(run: Run, first: Scores) -> Picture:
    """Plot the accuracy of sampled networks, of the mean network and of the ensemble."""
    figures = first[WIDE]
    each = sorted(figures["components"]["each"])
    with plots.style():
        figure, ax = plt.subplots()
        ax.plot(range(1, len(each) + 1), each, "o", markersize=4, label="sampled networks, sorted")
        for (kind, label), line, colour in zip(
            (("mean_network", "mean weights"), ("ensemble", "their ensemble")),
            ("--", "-"),
            (plots.ORANGE, plots.BLACK),
            strict=True,
        ):
            ax.axhline(figures[kind]["accuracy"], linestyle=line, color=colour, label=label)
        gain = figures["ensemble"]["accuracy"] - figures["components"]["mean"]
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
        ax.margins(0.06)
        ax.set(xlabel="sampled network", ylabel="test accuracy", xticks=[])
        ax.set_title(f"Together {100 * gain:.1f} points better than one by one")
        figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return run.picture(figure, "components", "Test accuracy of networks drawn from the posterior.")


def draw_votes(x: Tensor, titles: list[str], prediction: Any) -> Figure:
    """Five images, and below each what the networks vote for."""
    figure, axes = plt.subplots(2, len(titles), figsize=(11, 4), height_ratios=(1, 1.2))
    for i, (above, below) in enumerate(axes.T):
        plots.image(above, x[i]).set_title(titles[i])
        plots.votes(below, prediction, i).set(xlabel="")
        below.set_xticks(range(10), CLASSES, rotation=90, fontsize="small")
        below.label_outer()
    figure.legend(*axes[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def draw_ood(run: Run, sets: Sets, answers: Answers, ballots: Answers) -> list[Picture]:
    """Votes on garments and digits, and the entropies of all of them."""
    (x, y), digits = sets.test, sets.digits
    inside, outside = ballots.values()
    indices = [int((y == label).nonzero()[0]) for label in range(5)]
    with plots.style():
        known = draw_votes(
            x[indices],
            [CLASSES[label] for label in range(5)],
            bbb.ClassificationPrediction(inside.sample_log_probs[:, indices]),
        )
        known.suptitle(
            f"Garments: {agreement(inside):.0%} of the networks vote alike", weight="bold"
        )
        titles = [f"entropy {nats:.2f} nats" for nats in outside.entropy[:5].tolist()]
        ood = draw_votes(digits, titles, outside)
        ood.suptitle(f"Digits: {agreement(outside):.0%} vote alike", weight="bold")
        entropies, ax = plt.subplots()
        plots.entropy_histogram(ax, answers[GARMENTS].entropy, {DIGITS: answers[DIGITS].entropy})
        auroc = metrics.auroc(answers[DIGITS].entropy, answers[GARMENTS].entropy)
        ax.set_title(f"AUROC of digits against garments: {auroc:.0%}")
    over = f"Agreement is the mean over the first {len(inside.probs):,}"
    return [
        run.picture(known, "votes_garments", f"The first test image of five classes. {over}."),
        run.picture(ood, "votes_digits", f"The first five test digits of MNIST. {over}."),
        run.picture(entropies, "entropy", f"In domain are the test {GARMENTS}. {UNIFORM}."),
    ]
