# SPDX-License-Identifier: Apache-2.0
"""The picture of a training step's time against the number of weights."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import matplotlib.pyplot as plt

from _parts.small import HAND_WRITTEN, IN_A_PICTURE, OF_SIZE, OURS
from _parts.timing import Comparison

WIDTHS = {OURS: 2.4}
STYLES = {OURS: "-", HAND_WRITTEN: "--"}


def draw_sizes(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draw the comparisons of growing networks, if there are any."""
    of_sizes = [each for each in comparisons if each.title.endswith(OF_SIZE)]
    if not of_sizes:
        return
    figure, axes = plt.subplots(figsize=(7.0, 4.4), layout="constrained")
    for name in IN_A_PICTURE:
        found = [each for each in of_sizes if name in each.rounds]
        weights = [int(each.title.removesuffix(OF_SIZE)) for each in found]
        times = [1e3 * median(each.times(name)) for each in found]
        style = {"linestyle": STYLES.get(name, ":"), "linewidth": WIDTHS.get(name, 1.5)}
        axes.plot(weights, times, marker="o", markersize=4, label=name, **style)
    axes.set(xscale="log", yscale="log", xlabel="weights and biases", ylabel="time per step, µs")
    axes.set_title("A step of a 10-H-H-1 network, 128 rows")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
