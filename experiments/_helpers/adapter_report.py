# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of `adapters`."""

import math
from typing import Any, TypeAlias

import matplotlib.pyplot as plt

from _helpers.adapter_methods import methods
from _helpers.adapter_tasks import ADAPTATIONS
from _helpers.repeats import shown
from _helpers.run import Picture, Run, Table
from _helpers.scores import score_cells
from pyro_bbb import plots

Summaries: TypeAlias = dict[str, dict[str, Any]]  # by method
SCORES = {"nll": "NLL, over that of MAP", "ece": "ECE, over that of MAP"}


def table(name: str, found: Summaries) -> Table:
    """Scores and costs of every method on one adaptation."""
    family = ADAPTATIONS[name].family
    images, available = family == "images", methods(name)
    rows = [
        (
            available[method].label,
            *score_cells(summary, digits=4),
            shown(summary, "ood", "entropy", digits=1)
            if images
            else shown(summary, "nll", factor=1 / math.log(2), digits=3),
            str(available[method].draws or "–"),
            shown(summary, "training", factor=1, digits=1),
        )
        for method, summary in found.items()
    ]
    last = "AUROC, ood (%)" if images else "bits per character"
    columns = ("accuracy (%)", "NLL (nats)", "ECE (%)", last, "draws", "training")
    return Table((ADAPTATIONS[name].title, *columns), rows)


def draw(run: Run, results: dict[str, Summaries]) -> Picture:
    """Plot NLL and ECE of every method over those of MAP, a row for each adaptation."""
    everywhere = methods("mnist")
    with plots.style():
        height = 1.4 + 0.6 * len(results)
        figure, axes = plt.subplots(1, len(SCORES), figsize=(9, height), sharey=True)
        colors = plt.rcParams["axes.prop_cycle"].by_key()["color"]
        for ax, (score, label) in zip(axes, SCORES.items(), strict=True):
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
