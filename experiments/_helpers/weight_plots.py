# SPDX-License-Identifier: Apache-2.0
"""Pictures of a posterior's weights."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt

import pyro_bbb as bbb
from _helpers.run import Picture, Run
from pyro_bbb import plots


def draw_weights(run: Run, guide: bbb.AutoSoftplusNormal) -> list[Picture]:
    """Means and standard deviations of the weights by layer."""
    with plots.style():
        means, ax = plt.subplots()
        plots.weight_locs(ax, guide).set_title("Posterior means by layer")
        scales, ax = plt.subplots()
        plots.weight_scales(ax, guide).set_title("Posterior standard deviations by layer")
    return [
        run.picture(means, "weight_locs", "Posterior means."),
        run.picture(scales, "weight_scales", "Posterior standard deviations."),
    ]


def draw_pruning(
    run: Run,
    name: str,
    caption: str,
    fractions: Sequence[float],
    accuracies: Sequence[float],
    reference: Any = None,
) -> Picture:
    """Plot accuracy by pruned fraction; the title says how much one point of accuracy buys."""
    spared = max(f for f, a in zip(fractions, accuracies, strict=True) if a >= accuracies[0] - 0.01)
    with plots.style():
        figure, ax = plt.subplots()
        plots.pruning_curve(ax, fractions, accuracies, reference=reference)
        ax.set_title(f"Removing {spared:.0%} costs at most one point")
    return run.picture(figure, name, caption)
