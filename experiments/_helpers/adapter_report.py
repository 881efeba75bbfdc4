# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of `adapters`."""

import math
from typing import Any, TypeAlias

import matplotlib.pyplot as plt

from _helpers import repeats
from _helpers.adapter_methods import methods
from _helpers.adapter_tasks import ADAPTATIONS
from _helpers.run import Picture, Run, Table
from _helpers.scores import SCORES, draws
from pyro_bbb import plots

Summaries: TypeAlias = dict[str, dict[str, Any]]  # by method
RATIOS = {"nll": "NLL, over that of MAP", "ece": "ECE, over that of MAP"}


def table(name: str, found: Summaries) -> Table:
    """Scores and costs of every method on one adaptation."""
    available = methods(name)
    last = ("bits per character", "nll", 1 / math.log(2), 3)
    if ADAPTATIONS[name].family == "images":
        last = ("AUROC, ood (%)", "ood.entropy", 100, 1)
    columns = [*SCORES, last, ("draws", draws), ("training", "training", 1, 1)]
    labelled = {available[method].label: summary for method, summary in found.items()}
    return repeats.table(ADAPTATIONS[name].title, labelled, columns)


def draw(run: Run, results: dict[str, Summaries]) -> Picture:
    """Plot NLL and ECE of every method over those of MAP, a row for each adaptation."""
    everywhere = methods("mnist")
    with plots.style():
        height = 1.4 + 0.6 * len(results)
        figure, axes = plt.subplots(1, len(RATIOS), figsize=(9, height), sharey=True)
        colors = plt.rcParams["axes.prop_cycle"].by_key()["color"]
        for ax, (score, label) in zip(axes, RATIOS.items(), strict=True):
            for number, (name, method) in enumerate(everywhere.items()):
                at = [row for row, found in enumerate(results.values()) if name in found]
                ratio = [
                    found[name]["mean"][score] / found["map"]["mean"][score]
                    for found in results.values()
                    if name in found
                ]
                style = {"marker": "osD^vP"[number], "color": colors[number]}
                ax.plot(ratio, at, linestyle="none", label=method.label, **style)
            ax.axvline(1.0, color="0.6", linewidth=1.0, zorder=0)
            ax.set_xlabel(label)
        axes[0].set_yticks(range(len(results)), [ADAPTATIONS[name].title for name in results])
        axes[0].invert_yaxis()
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return run.picture(figure, "adapters", "Means over seeds; further left is better.")
