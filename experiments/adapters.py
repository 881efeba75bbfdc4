# SPDX-License-Identifier: Apache-2.0
"""Bayesian adapters of pretrained networks, beside MAP, dropout, ensembles and Laplace.

    python experiments/adapters.py [--tasks mnist_hundredth decimal] [--seeds 3]

A convolutional net of 128,000 weights is trained on Fashion-MNIST, then frozen. Adapters of rank 8
on its layers and a new last layer learn MNIST, from all 55,000 labels, a tenth and a hundredth of
them. A transformer of 160,000 weights is trained on the characters of the docstrings of Python's
standard library; adapters learn those of decimal arithmetic, of which the last quarter is scored.

Needs `pip install -e ".[hf]"`. Settings were chosen by one seed's likelihood on validation data
(`--scored validation`). Of MAP on 550 digits, learning rates 0.001, 0.003, 0.01, 0.03: NLL 0.460,
0.366, 0.357, 0.393, and 0.459 or more with a prior of unit gain; on the text, 20 epochs, 0.003,
0.01, 0.03: 1.204, 1.153, 1.142, and 40 epochs 1.164 (0.01) and 1.151 (0.03). Of Bayesian adapters
on 550 digits, both factors random: rate 0.01 and temperature 0.03, 0.1, 0.3: 0.318, 0.300, 0.346;
rate 0.03 and 0.03, 0.1: 0.268, 0.263, with less calibration error at 0.03; a rate of 0.1 diverged,
as did 0.03 in minibatches of 32; a prior of gain 3 0.291. On 5,500 digits, MAP 0.107: rates 0.01
and 0.03 at 0.03 both 0.098, on 55,000 0.033 and 0.047, MAP 0.036; `local_reparam` at 0.01 0.095 and
0.033, at 0.03 0.091 on 5,500, flipout 0.097. Three guides at half the epochs: 0.228 on 550, on
5,500 0.078 (0.01) and 0.077 (0.03). With A alone random at rate 0.003, temperature 0.1, 550 digits
had 0.348. A small ViT instead of the convolutional net reached 60 % of 550 digits, however it was
adapted.

Of Bayesian adapters on the text, rate 0.03 and 40 epochs: temperature 0.03, 0.1 in minibatches of
128 1.135, 1.132; temperature 0.1, 0.3 in minibatches of 16 1.086, 1.119, with flipout 1.093, 64
epochs 1.090; a rank-1 ensemble of five, 64 epochs, 1.109; three guides at half the epochs,
temperature 0.05, 0.1: 1.056, 1.064; five at a third 1.069. On a tenth of the text, where MAP had
1.956 (in minibatches of 16 2.105) and five of them 1.558: temperature 0.1, 0.2, 0.3, 1 in
minibatches of 16 1.619, 1.486, 1.447, 1.660; three guides at half the epochs, temperature 0.1, 0.2:
1.508, 1.466; a rank-1 ensemble of five 1.446.

Every cell (task, method, seed) is a file in the folder of results as soon as it is done: a run that
was interrupted goes on where it was when it is started again from the same commit.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tyro
from _helpers import adapter_report as report
from _helpers.adapter_methods import methods
from _helpers.adapter_tasks import ADAPTATIONS, Adaptations
from _helpers.posterior_cells import Scores, over_cells
from _helpers.run import DataSettings, Run, Section, check_names, chosen


@dataclass(frozen=True)
class Config(DataSettings):
    """Settings of one run."""

    tasks: tuple[str, ...] = tuple(ADAPTATIONS)
    """Tasks: mnist, mnist_tenth, mnist_hundredth, decimal, decimal_tenth."""
    methods: tuple[str, ...] = ()
    """Methods, instead of all."""
    seeds: int = 3
    """Trainings with consecutive seeds; tables show their means and standard deviations."""
    scored: Literal["test", "validation"] = "test"
    """Data that are scored; settings were chosen on those of validation."""
    output: Path = Path("results/adapters")
    """Folder for results, and for the cells (task, method, seed) that are done."""


def compare(config: Config, folder: Path, name: str) -> dict[str, Scores]:
    """All methods on one task: the figures of the seeds, their means and deviations."""
    trainings = Adaptations(
        root=config.output / "trainings", data_root=config.data_root, smoke=config.smoke
    )
    sets = trainings.sets(name, testing=config.scored == "test")
    available = methods(name)
    seeds = range(config.seed, config.seed + config.seeds)
    found: dict[str, Scores] = {}
    for each in chosen(available, config.methods):
        task_of = partial(trainings.task, name, each, sets=sets)
        found[each] = over_cells(folder / name / each, task_of, available[each], sets, seeds)
    return found


def main(config: Config) -> dict[str, Any]:
    """Trains and scores every method on every task, prints the tables and writes the results."""
    check_names("--tasks", config.tasks, ADAPTATIONS)
    known = (name for task in config.tasks for name in methods(task))
    check_names("--methods", config.methods, known)
    if config.smoke:
        tasks, few = ("mnist_hundredth", "decimal"), ("map", "bayes")
        config = replace(config, tasks=tasks, methods=config.methods or few, seeds=1)
    run = Run(config)
    folder = run.seeds("tasks", "methods", "seeds")
    results = {name: compare(config, folder, name) for name in config.tasks}
    scaled = all("map" in found for found in results.values())
    pictures = [report.draw(run, results)] if scaled else []
    record = run.finish({"tasks": results})
    tables = [report.table(name, found) for name, found in results.items()]
    section = Section("Adapted networks", EXPLANATION, tables, pictures)
    run.report("Bayesian adapters", SUMMARY, [section], record)
    return record


SUMMARY = (
    "A frozen network and small adapters: what a posterior of them is worth, and what it costs."
)
EXPLANATION = (
    "NLL is the negative log-probability of the true class or character, ECE the gap between "
    "confidence and accuracy, AUROC the probability that an image of Fashion-MNIST has a higher "
    "entropy than a digit; ± is the standard deviation over seeds. Training is in multiples of "
    "that of adapters without a posterior."
)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
