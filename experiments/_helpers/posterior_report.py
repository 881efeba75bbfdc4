# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of `posteriors`."""

from typing import Any, TypeAlias

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from _helpers.posterior_methods import METHODS, PROBLEMS
from _helpers.posterior_training import Problem
from _helpers.repeats import shown
from _helpers.run import Picture, Run, Table
from _helpers.scores import score_cells
from pyro_bbb import plots

Summaries: TypeAlias = dict[str, dict[str, Any]]  # by method
COLUMNS = ("accuracy (%)", "NLL (nats)", "ECE (%)", "AUROC, ood (%)", "AURC (per mille)")
COSTS = ("draws", "training", "prediction")


def table(problem: Problem, summaries: Summaries) -> Table:
    """Scores and costs of every method, with published scores."""
    rows = [
        (
            METHODS[name].label,
            *score_cells(summary, digits=4),
            shown(summary, "ood", "entropy", digits=1),
            shown(summary, "area_under_risk_coverage", factor=1000),
            str(METHODS[name].draws or "–"),
            shown(summary, "training", factor=1, digits=1),
            shown(summary, "prediction", factor=1, digits=1),
        )
        for name, summary in summaries.items()
    ]
    for name, (accuracy, nll, ece) in problem.published.items():
        scores = (f"{100 * accuracy:.1f}", f"{nll:.3f}", f"{100 * ece:.1f}")
        rows.append((name, *scores, *("–",) * 5))
    return Table((problem.title, *COLUMNS, *COSTS), rows)


def ood_table(problem: Problem, summaries: Summaries) -> Table:
    """AUROC of out-of-distribution detection by three measures of uncertainty."""
    measures = ("entropy", "epistemic", "confidence")
    rows = [
        (METHODS[name].label, *(shown(summary, "ood", m, digits=1) for m in measures))
        for name, summary in summaries.items()
    ]
    return Table((f"{problem.title}: AUROC (%)", *measures), rows)


def draw_costs(run: Run, results: dict[str, Summaries]) -> Picture:
    """Plot NLL against training cost, a panel for each problem."""
    with plots.style():
        figure, axes = plt.subplots(
            1, len(results), figsize=(6.4 * len(results), 4.2), squeeze=False
        )
        for ax, (name, summaries) in zip(axes[0], results.items(), strict=True):
            draw_methods(ax, summaries)
            ax.set_title(PROBLEMS[name].title)
    return run.picture(
        figure,
        "costs",
        "Mean over seeds; bars are standard deviations. Down and left is better.",
    )


def draw_methods(ax: Axes, summaries: Summaries) -> None:
    """Plot a point for each method, with a marker and a colour of its own, the best first."""
    names, colors = list(METHODS), plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for name in sorted(summaries, key=lambda name: float(summaries[name]["mean"]["nll"])):
        mean, number = summaries[name]["mean"], names.index(name)
        ax.errorbar(
            mean["training"],
            mean["nll"],
            summaries[name].get("sd", {}).get("nll", 0.0),
            fmt="osD^v"[number % 5],
            color=colors[number % len(colors)],
            capsize=2,
            label=METHODS[name].label,
        )
    ax.set(xscale="log", xlabel="training, multiples of the deterministic network's")
    ax.set_ylabel("NLL (nats)")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 6)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
