# SPDX-License-Identifier: Apache-2.0
"""Figures of `active_learning`."""

from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter

from _helpers.label_pool import RANDOM
from _helpers.run import Data, Picture, Run
from pyro_bbb import plots

TARGETS = {"90": 0.90, "95": 0.95}


@dataclass(frozen=True)
class Sets:
    """Images ``[n, 1, 28, 28]`` and their labels: to buy from, and to measure on."""

    pool: Data
    measured: Data


def draw_curves(run: Run, summary: dict[str, Any], rules: tuple[str, ...]) -> Picture:
    """Test error by number of labels: median and range over the seeds."""
    with plots.style():
        figure, ax = plt.subplots(figsize=(6.4, 4.2))
        for rule, line in zip(rules, ("-", "--", "-.", ":", "-"), strict=False):
            curves = [each[rule]["curve"] for each in summary["seeds"].values()]
            error = 100 * (1 - np.array([curve["accuracy"] for curve in curves]))
            labels = curves[0]["labels"]
            (middle,) = ax.plot(labels, np.median(error, axis=0), line, label=rule)
            colour = middle.get_color()
            ax.fill_between(labels, error.min(0), error.max(0), color=colour, alpha=0.2, lw=0)
        for name, target in TARGETS.items():
            level = 100 * (1 - target)
            ax.axhline(level, color="0.5", lw=0.8, ls=":")
            where = {"transform": ax.get_yaxis_transform(), "va": "bottom", "color": "0.4"}
            ax.text(0.01, level, f"accuracy {name} %", **where)
        ax.set(xscale="log", yscale="log", xlabel="labels", ylabel="error (%)")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(FuncFormatter(lambda value, _: few(value)))
        ax.set_title(finding(summary, rules))
        ax.legend()
    caption = f"Median and range of {len(summary['seeds'])} run(s); both axes logarithmic."
    return run.picture(figure, "curves", caption)


def few(value: float) -> str:
    """The minor ticks' labels that have room: 2 and 5 of each decade."""
    return f"{value:g}" if f"{value:.0e}"[0] in "25" else ""


def finding(summary: dict[str, Any], rules: tuple[str, ...]) -> str:
    """The title of the curves."""
    saved = summary["mean"]["times_fewer_labels"]
    if "BALD" not in saved:
        return "Error by number of labels"
    least = "" if reached(summary, RANDOM, "95") else "at least "
    return f"BALD needs {least}{saved['BALD']['95']:.1f} times fewer labels for 95 %"


def reached(summary: dict[str, Any], rule: str, target: str) -> bool:
    """True if a rule reached a target with every seed."""
    return all(run[rule]["reached"][target] for run in summary["seeds"].values())
