# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of `continual`."""

from typing import Any, TypeAlias

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator

from _helpers import repeats
from _helpers.continual_learning import METHODS, PROTOCOLS
from _helpers.run import Picture, Run, Table
from pyro_bbb import plots

Summaries: TypeAlias = dict[str, dict[str, Any]]  # by method


def table(name: str, found: Summaries) -> Table:
    """Average accuracy after the last task, and forgetting; with published accuracies."""
    protocol = PROTOCOLS[name]
    columns = (
        ("accuracy (%)", "accuracy", 100, 2),
        ("forgetting (%)", "forgetting", 100, 2),
        ("NLL (nats)", "nll", 1, 3),
        ("ECE (%)", "ece", 100, 2),
    )
    published = {
        f"published: {method}": (f"{100 * average:.1f}", *("–",) * 3)
        for method, average in protocol.published.items()
    }
    labelled = {METHODS[name][method].label: summary for method, summary in found.items()}
    title = f"{protocol.title}, after the last task"
    return repeats.table(title, labelled, columns, published)


def draw_matrices(run: Run, name: str, found: Summaries) -> Picture:
    """Accuracy on every task after every task, a panel for each method."""
    first = {method: each["seeds"][0] for method, each in found.items()}
    matrices = {method: each["matrix"] for method, each in first.items() if "matrix" in each}
    rows = 1 if len(matrices) < 4 else 2
    columns = -(-len(matrices) // rows)
    with plots.style():
        figure, axes = plt.subplots(
            rows, columns, figsize=(3.3 * columns + 0.8, 3.1 * rows + 0.4), squeeze=False
        )
        for ax, (method, matrix) in zip(axes.flat, matrices.items(), strict=False):
            size = len(matrix)
            values = np.full((size, size), np.nan)
            for i, row in enumerate(matrix):
                values[i, : len(row)] = row
            picture = ax.imshow(100 * values, vmin=50, vmax=100, cmap="viridis")
            ax.set_title(METHODS[name][method].label, fontsize="small")
            ticks = range(0, size, 1 if size < 8 else 3)
            ax.set_xticks(ticks, [str(i + 1) for i in ticks])
            ax.set_yticks(ticks, [str(i + 1) for i in ticks])
            ax.set(xlabel="scored on task", ylabel="after task")
        for ax in axes.flat[len(matrices) :]:
            ax.set_axis_off()
        figure.colorbar(picture, ax=axes, label="accuracy (%)", shrink=0.8)
    return run.picture(figure, f"{name}_matrices", f"{PROTOCOLS[name].title}, the first seed.")


def draw_averages(run: Run, name: str, found: Summaries) -> Picture:
    """Errors on the tasks so far, by their number."""
    with plots.style():
        figure, ax = plt.subplots(figsize=(8, 4))
        for method, summary in found.items():
            label = METHODS[name][method].label
            if "matrix" in summary["seeds"][0]:
                right = np.array([record["averages"] for record in summary["seeds"]])
                errors = 100 * (1 - right.mean(0))
                ax.plot(np.arange(1, len(errors) + 1), errors, "o-", ms=4, label=label)
            else:
                error = 100 * (1 - summary["mean"]["accuracy"])
                ax.axhline(error, color="0.6", ls="--", label=label)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set(
            xlabel="tasks learned",
            ylabel="wrong on these tasks (%)",
            yscale="log",
            title=PROTOCOLS[name].title,
        )
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.tick_params(axis="y", which="minor", labelleft=False)
        ax.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return run.picture(figure, f"{name}_averages", "Means over seeds.")


def draw_capacity(run: Run, name: str, found: Summaries) -> Picture:
    """Plot the distribution of the weights' signal-to-noise ratio after each task."""
    method = next(m for m in found if "snr" in found[m]["seeds"][0])
    by_task = found[method]["seeds"][0]["snr"]
    with plots.style():
        figure, ax = plt.subplots(figsize=(6.4, 4))
        colors = plt.colormaps["viridis"](np.linspace(0, 0.9, len(by_task)))
        for i, (levels, color) in enumerate(zip(by_task, colors, strict=True), start=1):
            fractions = np.linspace(0, 1, len(levels))
            ax.plot(levels, 100 * (1 - fractions), color=color, label=f"task {i}")
        ax.set(
            xlim=(-40, 25),
            xlabel="signal-to-noise ratio |loc| / scale (dB)",
            ylabel="weights above it (%)",
            title=f"{PROTOCOLS[name].title}: {METHODS[name][method].label}",
        )
        ax.legend(fontsize="x-small")
    return run.picture(figure, f"{name}_capacity", "Weights of the layers that tasks share.")
