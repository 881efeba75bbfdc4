# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of `lenet5_mnist`."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor

import pyro_bbb as bbb
from _helpers.repeats import shown
from _helpers.run import Data, Picture, Run, Table
from _helpers.scores import MEASURES, score_cells
from pyro_bbb import plots

Answers: TypeAlias = dict[str, bbb.ClassificationPrediction]
Scores: TypeAlias = dict[str, Any]
NOISE = "Gaussian noise"
PUBLISHED_CUT_OFF = 0.2

PUBLISHED = {  # LeNet-5 of uncertainty-baselines, github.com/google/uncertainty-baselines
    "mnist": {
        "variational": {"accuracy": 0.985, "nll": 0.048, "ece": 0.010},
        "deterministic": {"accuracy": 0.991, "nll": 0.037},
    },
    "fashion_mnist": {
        "variational": {"accuracy": 0.895, "nll": 0.292, "ece": 0.011},
        "deterministic": {"accuracy": 0.910, "nll": 0.321},
    },
}

ALL = "all layers"
NUM_SHOWN = 500  # validation images of a snapshot; a fifth as many are noise


@dataclass(frozen=True)
class Sets:
    """The images of a run, ``[n, 1, 28, 28]``, and labels ``[n]``."""

    train: Data
    valid: Data
    test: Data
    ood: dict[str, Tensor]


@dataclass(frozen=True)
class Snapshot:
    """Posterior and its predictions at one step of the training."""

    step: int
    guide: bbb.AutoSoftplusNormal
    inside: bbb.ClassificationPrediction
    noise: bbb.ClassificationPrediction


def noise(count: int, seed: int) -> Tensor:
    """Images of which every pixel is an independent draw from N(0, 1)."""
    return torch.randn(count, 1, 28, 28, generator=torch.Generator().manual_seed(seed))


def scores_table(dataset: str, summary: Scores, variants: dict[str, Scores]) -> Table:
    """Tabulate scores on the test images, and published ones."""
    rows = [
        ("ensemble", summary, "test"),
        ("network of mean weights", summary, "mean_network"),
    ]
    rows += [(f"ensemble, random: {name}", each, "test") for name, each in variants.items()]
    cells = [(name, *score_cells(each, key)) for name, each, key in rows]
    for name, known in PUBLISHED[dataset].items():
        ece = f"{100 * known['ece']:.1f}" if "ece" in known else "–"
        cells.append(
            (f"published, {name}", f"{100 * known['accuracy']:.1f}", f"{known['nll']:.3f}", ece)
        )
    return Table(("on the test images", "accuracy (%)", "NLL (nats)", "ECE (%)"), cells)


def ood_table(summaries: dict[str, Scores]) -> Table:
    """AUROC of three measures, by random layers and kind of image."""
    cells = [
        (f"{kind}; random: {name}", *(shown(s, "foreign", kind, m, digits=1) for m in MEASURES))
        for kind in next(iter(summaries.values()))["mean"]["foreign"]
        for name, s in summaries.items()
    ]
    return Table(("AUROC (%) against test images", *MEASURES), cells)


def refusal_table(summary: Scores) -> Table:
    """Tabulate the rates of refusal at both cut-offs."""
    cells = [
        (
            kind,
            *(shown(summary, "refused", kind, at, digits=1) for at in ("published", "validation")),
        )
        for kind in summary["mean"]["refused"]
    ]
    cut_off = shown(summary, "cut_off", factor=1)
    return Table(("refused (%)", f"cut-off {PUBLISHED_CUT_OFF}", f"cut-off {cut_off}"), cells)


def draw_weights(snapshots: list[Snapshot]) -> Figure:
    """Means and standard deviations of the weights by layer, a row for each look."""
    figure, axes = plt.subplots(len(snapshots), 2, figsize=(9, 3 * len(snapshots)), squeeze=False)
    for (left, right), each in zip(axes, snapshots, strict=True):
        plots.weight_locs(left, each.guide).set_title(f"Step {each.step:,}: means")
        plots.weight_scales(right, each.guide).set_title("standard deviations")
        left.set_xlim(-1.0, 1.0)
        right.set(xlim=(1e-3, 2.0), xticks=(1e-3, 1e-2, 1e-1, 1.0))
    return figure


def draw_answers(x: Tensor, titles: list[str], rows: Answers, chosen: list[int]) -> Figure:
    """Images, and under each what every draw says of it, a row for each prediction."""
    size = (1.55 * len(chosen), 1.3 + 1.5 * len(rows))
    figure, axes = plt.subplots(
        1 + len(rows), len(chosen), figsize=size, height_ratios=[1.0] + [1.2] * len(rows)
    )
    for column, index in enumerate(chosen):
        plots.image(axes[0, column], x[index]).set_title(titles[column])
        for row, prediction in zip(axes[1:], rows.values(), strict=True):
            plots.class_probabilities(row[column], prediction, index).label_outer()
    for row, name in zip(axes[1:], rows, strict=True):
        row[0].set_ylabel(name)
    for ax in axes[1:].flat:
        ax.tick_params(labelsize="x-small")
    handles = axes[1, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower right", ncols=2)
    return figure


def draw_steps(run: Run, sets: Sets, snapshots: list[Snapshot]) -> list[Picture]:
    """Write the figures of every snapshot to ``steps/``; compare the first and the last."""
    x, y = sets.valid
    first, last = snapshots[0], snapshots[-1]
    uncertain = last.inside.entropy.argsort(descending=True)[:2].tolist()
    chosen = [i for i in range(10) if i not in uncertain][:8] + uncertain
    truths = [f"a {int(label)}" for label in y[:NUM_SHOWN]]
    (run.folder / "steps").mkdir(exist_ok=True)
    with plots.style():
        for each in snapshots:
            nats = float(each.inside.log_prob(y[:NUM_SHOWN]).mean())
            figure = draw_answers(x, truths, {"probability": each.inside}, chosen)
            figure.suptitle(f"Step {each.step:,}: held-out log-probability {nats:.3f} nats")
            run.picture(figure, f"steps/{each.step:05}_answers", "")
            run.picture(draw_weights([each]), f"steps/{each.step:05}_weights", "")
        rows = {f"step {each.step:,}": each.inside for each in (first, last)}
        answers = draw_answers(x, truths, rows, chosen)
        answers.suptitle("Draws agree on plain images, and disagree on ambiguous ones")
        weights = draw_weights([first, last])
    return [
        run.picture(
            answers,
            "first_and_last",
            "Eight validation images as they come, and the two on which the trained network is "
            "least sure (right). Points: the class probabilities of every draw; bars: average.",
        ),
        run.picture(weights, "weights", "Random kernels by layer, early and at the end."),
    ]


def draw_progress(run: Run, steps: list[Scores], history: bbb.History) -> list[Picture]:
    """Plot the loss, and the scores of every snapshot."""
    at = [each["step"] for each in steps]
    with plots.style():
        loss, ax = plt.subplots()
        plots.loss_parts(ax, history.steps, unit="step").set_title("Loss of one minibatch")
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
        left.plot(at, [each["held_out_nats"] for each in steps], "o-", ms=4)
        left.set(xlabel="step", ylabel="held-out nats per image", title="Held-out log-probability")
        for key, label, line in (("entropy", "validation", "o-"), ("noise_entropy", NOISE, "s--")):
            right.plot(at, [each[key] for each in steps], line, ms=4, label=label)
        right.set(xlabel="step", ylabel="mean entropy (nats)", title="Predictive entropy")
        right.legend()
    return [
        run.picture(figure, "steps", f"Seen every {at[0]} steps on {NUM_SHOWN} validation images."),
        run.picture(loss, "loss_parts", "KL, weighted, and negative log-likelihood, per step."),
    ]


def draw_noise(run: Run, snapshots: list[Snapshot]) -> Picture:
    """Plot the draws' predictions on noise, early and at the end."""
    count = 5
    rows = {f"step {each.step:,}": each.noise for each in (snapshots[0], snapshots[-1])}
    with plots.style():
        figure = draw_answers(noise(NUM_SHOWN // 5, seed=2), [""] * count, rows, list(range(count)))
        figure.suptitle("Pure noise: predictions of every draw")
    return run.picture(figure, "noise", "Five noise images; points are draws, bars their average.")


def draw_refusal(run: Run, sets: Sets, everything: Answers, variants: Answers) -> list[Picture]:
    """Entropies of every kind of image, and risk against coverage."""
    (inside, answer), *others = everything.items()
    with plots.style():
        entropies, ax = plt.subplots()
        plots.entropy_histogram(ax, answer.entropy, {k: p.entropy for k, p in others})
        ax.set_title(f"Entropy: {inside} and out-of-distribution images")
        risks, ax = plt.subplots()
        plots.risk_coverage(ax, {ALL: answer, **variants}, sets.test[1], minimum=0.8)
        ax.set_title("Risk-coverage")
    return [
        run.picture(entropies, "entropy", "ln 10 = 2.3 nats is a uniform guess."),
        run.picture(
            risks,
            "risk_coverage",
            "Refusing the least confident test images; by layers of random weights.",
        ),
    ]
