# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of `posteriors`."""

from typing import Any, TypeAlias

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from _helpers import repeats
from _helpers.posterior_methods import METHODS, PROBLEMS
from _helpers.posterior_training import Problem
from _helpers.run import Picture, Run, Table
from _helpers.scores import MEASURES, SCORES, draws
from pyro_bbb import plots

Summaries: TypeAlias = dict[str, dict[str, Any]]  # by method
COLUMNS = (
    *SCORES,
    ("AUROC, ood (%)", "ood.entropy", 100, 1),
    ("AURC (per mille)", "area_under_risk_coverage", 1000, 2),
    ("draws", draws),
    ("training", "training", 1, 1),
    ("prediction", "prediction", 1, 1),
)


def table(problem: Problem, summaries: Summaries) -> Table:
    """Scores and costs of every method, with published scores."""
    published = {
        name: (f"{100 * accuracy:.1f}", f"{nll:.3f}", f"{100 * ece:.1f}", *("–",) * 5)
        for name, (accuracy, nll, ece) in problem.published.items()
    }
    return repeats.table(problem.title, _labelled(summaries), COLUMNS, published)


def ood_table(problem: Problem, summaries: Summaries) -> Table:
    """AUROC of out-of-distribution detection by three measures of uncertainty."""
    columns = [(measure, f"ood.{measure}", 100, 1) for measure in MEASURES]
    return repeats.table(f"{problem.title}: AUROC (%)", _labelled(summaries), columns)


def _labelled(summaries: Summaries) -> Summaries:
    return {METHODS[name].label: summary for name, summary in summaries.items()}


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
