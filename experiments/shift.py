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
chosen on shifted images. Two methods are added that were, on 1,000 corrupted held-out images and
one seed. On Fashion-MNIST IVON, five draws, had a Brier score of 0.502 at temperature 0.1, 0.473 at
0.3, and 0.455 at 1, where clean images cost 0.283, 0.318 and 0.408 nats (five networks: 0.494 and
0.291 nats). 0.3 is in between. On MNIST one network by IVON at 0.3, twice the epochs and five
draws, had 0.171, and three networks, one draw each, 0.160 with the epochs of the deterministic
network and 0.152 with 1.5 times as many (five networks: 0.159). A third more is what costs less
than five networks on both data sets. Their learning rate rises from 0: without that one of ten
LeNet-5 died in its first epoch, and knew no more than how frequent the classes are; with it none of
the nine of the record did.

``docs/development/experiments.md`` has the other settings, and those tried.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib.pyplot as plt
import tyro
from _helpers import repeats
from _helpers.posterior_methods import METHODS, PROBLEMS, UNDER_SHIFT
from _helpers.posterior_tasks import Trainings
from _helpers.repeats import over_seeds, resumed
from _helpers.run import DataSettings, Picture, Run, Table, check_names, chosen
from _helpers.shifts import SEVERITIES, Scores, mean, measure
from matplotlib.axes import Axes
from matplotlib.patches import Patch

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


@dataclass(frozen=True)
class Config(DataSettings):
    """Settings of one run."""

    problems: tuple[str, ...] = ("fashion_mlp", "mnist_lenet5")
    """Problems: fashion_mlp, mnist_lenet5."""
    methods: tuple[str, ...] = ()
    """Methods, instead of all."""
    seeds: int = 3
    """Trainings with consecutive seeds; tables show their means and standard deviations."""
    images: int = 2000
    """Test images, of which there are 10,000."""
    trainings: Path | None = None
    """Folder of trainings, instead of one in the folder of results."""
    output: Path = Path("results/shift")
    """Folder for results."""


def compare(config: Config, folder: Path, name: str) -> dict[str, Scores]:
    """All methods on one problem: means and standard deviations over the seeds."""
    root = config.trainings or config.output / "trainings"
    epochs = 1 if config.smoke else None
    trainings = Trainings(root=root, data_root=config.data_root, smoke=config.smoke, epochs=epochs)
    sets = trainings.sets(name)
    data = sets.scored[0][: config.images], sets.scored[1][: config.images]
    seeds = range(config.seed, config.seed + config.seeds)

    def one(method: str, seed: int) -> Scores:
        posterior = METHODS[method].train(trainings.task(name, method, seed, sets))
        predict = partial(trainings.method(method).prediction, posterior, seed=seed)
        return measure(predict, data, moved=PROBLEMS[name].dataset == "mnist")

    found: dict[str, Scores] = {}
    for method in chosen(UNDER_SHIFT, config.methods):
        what = f"{PROBLEMS[name].title}, {METHODS[method].label}"
        figures = resumed(folder / name / method, seeds, partial(one, method), what)
        found[method] = over_seeds([with_means(record) for record in figures["seeds"]])
        for single in ("corruptions", "thresholds"):
            found[method].get("sd", {}).pop(single, None)
    return found


def with_means(figures: Scores) -> Scores:
    """Figures, with their means over all angles and all distances if they have any."""
    kinds = {"rotation": "rotated", "translation": "translated"}
    return figures | {kinds[kind]: mean(figures[kind]) for kind in kinds if kind in figures}


def main(config: Config) -> dict[str, Any]:
    """Scores every method under shift, prints the tables and writes the results."""
    check_names("--problems", config.problems, ("fashion_mlp", "mnist_lenet5"))
    check_names("--methods", config.methods, UNDER_SHIFT)
    if config.smoke:
        methods = config.methods or ("map", "temperature", "rank1")
        config = replace(config, problems=("mnist_lenet5",), methods=methods, seeds=1, images=50)
    run = Run(config)
    folder = run.seeds("problems", "methods", "seeds", "trainings")
    results = {name: compare(config, folder, name) for name in config.problems}
    tables, pictures = [], []
    for name, found in results.items():
        tables += [shifted_table(name, found), confidence_table(found)]
        pictures.append(draw_boxes(run, name, found))
        if PROBLEMS[name].dataset == "mnist":
            tables.append(moved_table(found))
            pictures.append(draw_moved(run, name, found))
    record = run.finish({"problems": results})
    run.report("Calibration under shift", SUMMARY, record, tables, pictures)
    return record


SUMMARY = (
    "Networks trained on clean images, scored on corrupted, turned and moved ones: does the "
    "confidence fall as the accuracy does? Scores that do not say clean are means over fifteen "
    "corruptions and five severities; AUROC is of telling shifted images from clean ones by "
    "entropy, AURC the area under risk-coverage; ± is the standard deviation over seeds."
)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
