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
from typing import Any

import tyro
from _helpers import shift_report as report
from _helpers.posterior_methods import METHODS, PROBLEMS, UNDER_SHIFT
from _helpers.posterior_tasks import Trainings
from _helpers.repeats import over_seeds, resumed
from _helpers.run import DataSettings, Run, check_names, chosen
from _helpers.shifts import Scores, mean, measure


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
        tables += [report.shifted_table(name, found), report.confidence_table(found)]
        pictures.append(report.draw_boxes(run, name, found))
        if PROBLEMS[name].dataset == "mnist":
            tables.append(report.moved_table(found))
            pictures.append(report.draw_moved(run, name, found))
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
