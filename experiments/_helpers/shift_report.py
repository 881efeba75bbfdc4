# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of `shift`."""

from typing import Any, TypeAlias

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from _helpers import repeats
from _helpers.posterior_methods import METHODS, PROBLEMS
from _helpers.run import Picture, Run, Table
from _helpers.shifts import SEVERITIES
from pyro_bbb import plots

Summaries: TypeAlias = dict[str, dict[str, Any]]  # by method
IN_PICTURES = (
    *("map", "temperature", "dropout", "ensemble"),
    *("bbb_normal_local_reparam", "ivon_warm", "ivon_warm3", "rank1"),
)
COLORS = (*plots.CYCLE, "0.8", "0.45")
LABELS = {"ece": "ECE", "brier": "Brier score", "accuracy": "accuracy"}


def shifted_table(name: str, found: Summaries) -> Table:
    """Scores on clean images, and means over corruptions and severities."""
    columns = (
        ("accuracy (%), clean", "clean.accuracy", 100, 2),
        ("accuracy", "shifted.accuracy", 100, 2),
        ("NLL (nats)", "shifted.nll", 1, 3),
        ("Brier, clean", "clean.brier", 1, 3),
        ("Brier", "shifted.brier", 1, 3),
        ("ECE (%), clean", "clean.ece", 100, 1),
        ("ECE (%)", "shifted.ece", 100, 1),
        ("AUROC (%)", "shifted.auroc", 100, 1),
        ("AURC (%)", "shifted.area_under_risk_coverage", 100, 1),
    )
    return repeats.table(PROBLEMS[name].title, _labelled(found), columns)


def confidence_table(found: Summaries) -> Table:
    """Mean confidence by severity."""
    columns = [("clean", "clean.confidence", 100, 1)]
    columns += [(str(s), f"severity.{s}.confidence", 100, 1) for s in SEVERITIES]
    return repeats.table("mean confidence (%)", _labelled(found), columns)


def moved_table(found: Summaries) -> Table:
    """Means of scores over rotations and translations."""
    columns = (
        ("rotated: accuracy", "rotated.accuracy", 1, 3),
        ("Brier", "rotated.brier", 1, 3),
        ("translated: accuracy", "translated.accuracy", 1, 3),
        ("Brier", "translated.brier", 1, 3),
    )
    return repeats.table("means over all angles and distances", _labelled(found), columns)


def _labelled(found: Summaries) -> Summaries:
    return {METHODS[method].label: summary for method, summary in found.items()}


def pictured(found: Summaries) -> dict[str, tuple[str, dict[str, Any]]]:
    """Colour and means of the methods in pictures, or of the first ones if it has none of these."""
    names = [name for name in IN_PICTURES if name in found] or list(found)
    return {name: (color, found[name]["mean"]) for name, color in zip(names, COLORS, strict=False)}


def draw_boxes(run: Run, name: str, found: Summaries) -> Picture:
    """Boxes of ECE and Brier score over the corruptions, by severity."""
    with plots.style():
        figure, axes = plt.subplots(2, 1, figsize=(9.6, 6.4), sharex=True)
        for ax, score in zip(axes, ("ece", "brier"), strict=True):
            draw_score(ax, found, score)
        methods = pictured(found).items()
        handles = [Patch(color=color, label=METHODS[m].label) for m, (color, _) in methods]
        figure.legend(handles=handles, ncols=4, fontsize="small", loc="outside lower center")
        axes[-1].set_xlabel("severity of the corruption")
        axes[0].set_title(PROBLEMS[name].title)
    caption = "Means over seeds. A box has the quartiles of fifteen corruptions, a whisker all."
    return run.picture(figure, f"{name}_boxes", caption)


def draw_score(ax: Axes, found: Summaries, score: str) -> None:
    """One box for each severity and method."""
    methods = pictured(found)
    width = 0.8 / len(methods)
    for i, (color, means) in enumerate(methods.values()):
        left = (i - (len(methods) - 1) / 2) * width
        ax.plot([left], [means["clean"][score]], "o", ms=4, color=color)
        values = [
            [each[score] for each in means["corruptions"][str(severity)].values()]
            for severity in SEVERITIES
        ]
        ax.boxplot(
            values,
            positions=[severity + left for severity in SEVERITIES],
            widths=0.85 * width,
            whis=(0, 100),
            patch_artist=True,
            boxprops={"facecolor": color, "lw": 0.5},
            medianprops={"color": "black"},
            whiskerprops={"lw": 0.7},
            showcaps=False,
            manage_ticks=False,
        )
    ax.set_xticks([0, *SEVERITIES], ["clean", *map(str, SEVERITIES)])
    ax.set_ylabel(LABELS[score])


def draw_moved(run: Run, name: str, found: Summaries) -> Picture:
    """Accuracy, Brier score and ECE by the angle and by the distance."""
    scores = ("accuracy", "brier", "ece")
    kinds = {"rotation": "degrees", "translation": "pixels"}
    with plots.style():
        figure, axes = plt.subplots(2, 3, figsize=(11, 5.6))
        for row, (kind, unit) in zip(axes, kinds.items(), strict=True):
            for ax, score in zip(row, scores, strict=True):
                for method, (color, means) in pictured(found).items():
                    x, y = zip(*means[kind].items(), strict=True)
                    values = [each[score] for each in y]
                    ax.plot([*map(int, x)], values, color=color, label=METHODS[method].label)
                ax.set(xlabel=f"{kind} ({unit})", ylabel=LABELS[score])
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, ncols=4, fontsize="small", loc="outside lower center")
        figure.suptitle(PROBLEMS[name].title)
    return run.picture(figure, f"{name}_moved", "Test images turned and translated.")
