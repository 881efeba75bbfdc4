# SPDX-License-Identifier: Apache-2.0
"""Figures: each method's cost over the deterministic floor, and time against the network's size."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from _parts.methods import FLOOR
from _parts.results import Results
from _parts.small import HAND_WRITTEN, IN_A_PICTURE, OF_SIZE, OURS
from _parts.timing import Comparison
from pyro_bbb import plots

Panel = tuple[str, Mapping[str, Mapping[str, float]]]  # title, and ratios by case and method


def panels(results: Results) -> Iterator[Panel]:
    """Yield a panel for each suite that ran."""
    if widths := results.widths():
        cases = {f"width {width}": _ratios(found) for width, found in widths.items()}
        yield "time of a training step / deterministic one", cases
    for found in results.of("epoch"):
        yield "time of an epoch / deterministic loop", {found.title: _ratios(found)}
    if by_count := results.predictions():
        samples = results.budget.samples
        title = f"time of {samples} draws / {samples} deterministic passes"
        yield title, {f"inputs: {n:,}": _ratios(found) for n, found in by_count.items()}
    ratios = {name: results.memory_ratio(name) for name in results.training_memory}
    if peaks := {name: ratio for name, ratio in ratios.items() if ratio and name != FLOOR}:
        title = "largest sum of tensors in a step / deterministic one"
        yield title, {f"width {results.budget.memory_width}": peaks}


def draw(results: Results, path: Path) -> None:
    """Write the figure of all suites."""
    shown = list(panels(results))
    if not shown:
        return
    with plots.style():
        size = (9.0, 4.0 * len(shown))
        figure, axes = plt.subplots(len(shown), figsize=size, squeeze=False)
        for ax, (title, cases) in zip(axes[:, 0], shown, strict=True):
            _bars(ax, cases)
            ax.set_title(title)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def draw_sizes(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draw time per step against the number of weights, if growing networks were measured."""
    of_sizes = [found for found in comparisons if found.title.endswith(OF_SIZE)]
    if not of_sizes:
        return
    figure, axes = plt.subplots(figsize=(7.0, 4.4), layout="constrained")
    for name in IN_A_PICTURE:
        found = [comparison for comparison in of_sizes if name in comparison.rounds]
        weights = [int(comparison.title.removesuffix(OF_SIZE)) for comparison in found]
        times = [1e3 * median(comparison.times(name)) for comparison in found]
        line = {OURS: "-", HAND_WRITTEN: "--"}.get(name, ":")
        axes.plot(weights, times, f"o{line}", markersize=4, label=name)
    axes.set(xscale="log", yscale="log", xlabel="weights and biases", ylabel="time per step, µs")
    axes.set_title("A step of a 10-H-H-1 network, 128 rows")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _ratios(comparison: Comparison) -> dict[str, float]:
    names = [name for name in comparison.rounds if name != comparison.floor]
    return {name: comparison.ratio(name) for name in names}


def _bars(ax: Axes, cases: Mapping[str, Mapping[str, float]]) -> None:
    """Draw a bar for each method and case, the cheapest of the first case on top."""
    first = next(iter(cases.values()))
    every = dict.fromkeys(name for case in cases.values() for name in case)
    names = sorted(every, key=lambda name: first.get(name, np.inf))
    height = 0.8 / len(cases)
    for number, (label, case) in enumerate(cases.items()):
        rows = [names.index(name) + (number - (len(cases) - 1) / 2) * height for name in case]
        bars = ax.barh(rows, [*case.values()], height, alpha=1 - 0.3 * number, label=label)
        ax.bar_label(bars, fmt="%.3g", fontsize="x-small", padding=2)
    ax.set(xscale="log", yticks=range(len(names)), yticklabels=names)
    ax.axvline(1, color="black", linewidth=0.8)
    ax.invert_yaxis()
    ax.legend()
