"""Tables and figures of `posteriors`."""

from typing import Any, TypeAlias

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

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
        height = 1.2 + 0.28 * max(map(len, results.values()))
        figure, axes = plt.subplots(
            1, len(results), figsize=(6.4 * len(results), height), squeeze=False
        )
        for ax, (name, summaries) in zip(axes[0], results.items(), strict=True):
            cost = [summary["mean"]["training"] for summary in summaries.values()]
            nll = [summary["mean"]["nll"] for summary in summaries.values()]
            error = [summary.get("sd", {}).get("nll", 0.0) for summary in summaries.values()]
            ax.errorbar(cost, nll, error, fmt="o", markersize=5, capsize=2)
            ax.set_xscale("log")
            ax.set(xlabel="training, multiples of the deterministic network's", ylabel="NLL (nats)")
            ax.set_title(PROBLEMS[name].title)
            label_in_margin(ax, [METHODS[each].label for each in summaries], cost, nll)
    return run.picture(
        figure,
        "costs",
        "Mean over seeds; bars are standard deviations. Down and left is better.",
    )


def label_in_margin(ax: Axes, labels: list[str], x: list[float], y: list[float]) -> None:
    """Write labels in a column right of the axes, in the order of y, with lines to the points."""
    heights = np.linspace(0.02, 0.98, len(labels)) if len(labels) > 1 else [0.5]
    line = {"arrowstyle": "-", "linewidth": 0.5, "color": "0.6", "shrinkB": 4, "relpos": (0, 0.5)}
    for height, i in zip(heights, np.argsort(y), strict=True):
        ax.annotate(
            labels[i],
            (x[i], y[i]),
            xytext=(1.05, height),
            textcoords="axes fraction",
            va="center",
            arrowprops=line,
        )
