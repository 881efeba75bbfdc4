# SPDX-License-Identifier: Apache-2.0
"""Bayesian adapters of pretrained networks, beside MAP, dropout, ensembles and Laplace.

    python experiments/adapters.py [--tasks mnist_hundredth decimal] [--seeds 3]

A convolutional net of 128,000 weights is trained on Fashion-MNIST, then frozen. Adapters of rank 8
on its layers and a new last layer learn MNIST, from all 55,000 labels, a tenth and a hundredth of
them. A transformer of 160,000 weights is trained on the characters of the docstrings of Python's
standard library; adapters learn those of decimal arithmetic, of which the last quarter is scored.

``docs/development/experiments.md`` has the other settings, and those tried.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tyro
from _helpers import adapters as report
from _helpers.adapters import ADAPTATIONS, Adaptations, methods
from _helpers.posterior_tasks import Scores, over_cells
from _helpers.run import DataSettings, Run, check_names, chosen


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
    run.report("Bayesian adapters", SUMMARY, record, tables, pictures)
    return record


SUMMARY = (
    "A frozen network and small adapters: what a posterior of them is worth, and what it costs. ± "
    "is the standard deviation over seeds; training is in multiples of that without a posterior."
)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
