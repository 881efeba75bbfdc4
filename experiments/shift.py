# SPDX-License-Identifier: Apache-2.0
"""Calibration under shift: test images corrupted, turned and moved, for many posteriors.

    python experiments/shift.py [--problems fashion_mlp mnist_lenet5] [--seeds 3]
    python experiments/shift.py --trainings results/posteriors/trainings

After Ovadia et al. (2019), "Can you trust your model's uncertainty?", arXiv:1906.02530: networks
trained on clean images are scored on shifted ones. Test images are under the fifteen corruptions of
`pyro_bbb.data.corrupt` at five severities; those of MNIST are also turned by 0 to 180 degrees in
steps of 15, and translated by up to 14 pixels. Networks, trainings and methods are those of
`posteriors`, with MAP's temperature fitted on 5,000 held-out images, and ten deterministic
networks. Methods, their settings and what they cost are described there, and nothing in them was
chosen on shifted images, but two by IVON at temperature 0.3.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib.pyplot as plt
import tyro
from _helpers import tables as tabulate
from _helpers.posteriors import METHODS, PROBLEMS, UNDER_SHIFT, Trainings, labelled
from _helpers.run import Data, DataSettings, Picture, Run, SeveralSeeds, check_names
from _helpers.tables import Scores, Summaries, Table, over_seeds
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from torch import Tensor

import pyro_bbb as bbb
from pyro_bbb import metrics, plots

Answer: TypeAlias = bbb.ClassificationPrediction
Predict: TypeAlias = Callable[[Tensor], Answer]
SEVERITIES = range(1, 6)
DEGREES = range(0, 181, 15)  # as Ovadia et al. (2019)
PIXELS = range(0, 15, 2)


def measure(predict: Predict, data: Data, *, moved: bool) -> Scores:
    """Scores on clean and on shifted images, with ``moved`` ones on request.

    ``corruptions`` are by severity and name, ``severity`` has their means over the names, and
    ``shifted`` those over the severities too.
    """
    x, y = data
    clean = predict(x)
    names: dict[str, Scores] = {str(severity): {} for severity in SEVERITIES}
    for severity in names:
        for seed, name in enumerate(bbb.data.CORRUPTIONS):
            images = bbb.data.corrupt(x, name, int(severity), seed)
            names[severity][name] = score(predict(images), clean, y)
    by_severity = {severity: mean(scores) for severity, scores in names.items()}
    figures = {
        "clean": score(clean, clean, y),
        "corruptions": names,
        "severity": by_severity,
        "shifted": mean(by_severity),
    }
    if moved:
        turned = {str(d): bbb.data.rotate(x, d) for d in DEGREES}
        aside = {str(p): bbb.data.translate(x, p) for p in PIXELS}
        for movement, moves in {"rotation": turned, "translation": aside}.items():
            figures[movement] = {k: score(predict(x), clean, y) for k, x in moves.items()}
        means = {"rotated": "rotation", "translated": "translation"}
        figures |= {name: mean(figures[movement]) for name, movement in means.items()}
    return figures


def score(answer: Answer, clean: Answer, y: Tensor) -> dict[str, float]:
    """Scores of a prediction; ``auroc`` is of telling its images from clean ones by entropy."""
    right = answer.label == y
    figures = {
        "accuracy": right.double().mean().item(),
        "confidence": answer.confidence.double().mean().item(),
        "nll": -answer.log_prob(y).double().mean().item(),
        "brier": metrics.brier(answer.probs, y),
        "ece": metrics.ece(answer.probs, y),
        "auroc": metrics.auroc(answer.entropy, clean.entropy),
        "area_under_risk_coverage": metrics.area_under_risk_coverage(answer.confidence, right),
    }
    return {name: round(figure, 5) for name, figure in figures.items()}


def mean(found: dict[str, Scores]) -> Scores:
    """Means of scores over their names."""
    means: Scores = over_seeds(list(found.values()))["mean"]
    return means


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
    return tabulate.table(PROBLEMS[name].title, labelled(found), columns)


def confidence_table(found: Summaries) -> Table:
    """Mean confidence by severity."""
    columns = [("clean", "clean.confidence", 100, 1)]
    columns += [(str(s), f"severity.{s}.confidence", 100, 1) for s in SEVERITIES]
    return tabulate.table("mean confidence (%)", labelled(found), columns)


def moved_table(found: Summaries) -> Table:
    """Means of scores over rotations and translations."""
    columns = (
        ("rotated: accuracy", "rotated.accuracy", 1, 3),
        ("Brier", "rotated.brier", 1, 3),
        ("translated: accuracy", "translated.accuracy", 1, 3),
        ("Brier", "translated.brier", 1, 3),
    )
    return tabulate.table("means over all angles and distances", labelled(found), columns)


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
            [scores[score] for scores in means["corruptions"][str(severity)].values()]
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
    units = {"rotation": "degrees", "translation": "pixels"}
    with plots.style():
        figure, axes = plt.subplots(2, 3, figsize=(11, 5.6))
        for row, (movement, unit) in zip(axes, units.items(), strict=True):
            for ax, score in zip(row, scores, strict=True):
                for method, (color, means) in pictured(found).items():
                    x, y = zip(*means[movement].items(), strict=True)
                    values = [scores[score] for scores in y]
                    ax.plot([*map(int, x)], values, color=color, label=METHODS[method].label)
                ax.set(xlabel=f"{movement} ({unit})", ylabel=LABELS[score])
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, ncols=4, fontsize="small", loc="outside lower center")
        figure.suptitle(PROBLEMS[name].title)
    return run.picture(figure, f"{name}_moved", "Test images turned and translated.")


@dataclass(frozen=True)
class Config(SeveralSeeds, DataSettings):
    """Settings of one run."""

    problems: tuple[str, ...] = ("fashion_mlp", "mnist_lenet5")
    """Problems: fashion_mlp, mnist_lenet5."""
    methods: tuple[str, ...] = ()
    """Methods, instead of all."""
    images: int = 2000
    """Test images, of which there are 10,000."""
    trainings: Path | None = None
    """Folder of trainings, instead of one in the folder of results."""


def compare(config: Config, run: Run, name: str) -> Summaries:
    """All methods on one problem: means and standard deviations over the seeds."""
    root = config.trainings or config.output / "trainings"
    trainings = Trainings(root=root, data_root=config.data_root, smoke=config.smoke)
    sets = trainings.sets(name)
    data = sets.scored[0][: config.images], sets.scored[1][: config.images]

    def one(method: str, seed: int) -> Scores:
        posterior = METHODS[method].train(trainings.task(name, method, seed, sets))
        predict = partial(METHODS[method].prediction, posterior, seed=seed)
        return measure(predict, data, moved=PROBLEMS[name].dataset == "mnist")

    summaries = run.compare(one, UNDER_SHIFT, config.methods, name)
    for summary in summaries.values():
        del summary["seeds"]
        summary.get("sd", {}).pop("corruptions", None)
    return summaries


def main(config: Config) -> dict[str, Any]:
    """Scores every method under shift, prints the tables and writes the results."""
    check_names("--problems", config.problems, ("fashion_mlp", "mnist_lenet5"))
    check_names("--methods", config.methods, UNDER_SHIFT)
    if config.smoke:
        methods = config.methods or ("map", "temperature", "rank1")
        config = replace(config, problems=("mnist_lenet5",), methods=methods, seeds=1, images=50)
    run, tables, pictures = Run(config, free=("problems", "methods", "trainings")), [], []
    results = {name: compare(config, run, name) for name in config.problems}
    for name, summaries in results.items():
        tables += [shifted_table(name, summaries), confidence_table(summaries)]
        pictures.append(draw_boxes(run, name, summaries))
        if PROBLEMS[name].dataset == "mnist":
            tables.append(moved_table(summaries))
            pictures.append(draw_moved(run, name, summaries))
    return run.report(__doc__, {"problems": results}, tables, pictures)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
