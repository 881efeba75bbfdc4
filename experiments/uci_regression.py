# SPDX-License-Identifier: Apache-2.0
"""Regression tables of the UCI repository in 20 fixed splits, the benchmark of many papers.

    python experiments/uci_regression.py --data-root DIR --datasets yacht energy --workers 2

The protocol is that of Hernandez-Lobato and Adams (2015), "Probabilistic Backpropagation for
Scalable Learning of Bayesian Neural Networks", arXiv:1502.05336: one hidden layer of 50 ReLU units
(100 for large tables, as protein), 90 % of the rows to train and 10 % to test, in the splits that
the data's files hold; inputs and targets standardised on the train part; scores in the target's own
units. Any table will do: ``DIR/NAME/data.npz`` (or ``DIR/uci/NAME/data.npz``) with ``X`` ``[n,
d]``, ``y`` ``[n]`` and the row numbers ``train_index`` and ``test_index``, each ``[splits, rows]``.
DIR is ``--data-root``, else ``$PYRO_BBB_DATA``; without ``--datasets`` all that are there are
taken.

``docs/development/experiments.md`` has the other settings, and those tried.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import joblib
import numpy as np
import tyro
from _helpers import uci_report as report
from _helpers.run import DataSettings, Run
from _helpers.uci import Recipe, Task, digest, find_tables, made_up_tables, scored
from _helpers.uci_report import SCORES
from tqdm import tqdm

import pyro_bbb as bbb

HE: dict[str, Any] = {"init_loc": "he"}
OURS = Recipe(
    prior="fan_in_normal",
    options={},
    guide="softplus_normal",
    guide_options={**HE, "init_rho": -5.0},
    noise="constant",
    members=8,
    dropout=0.0,
    temperature=0.25,
    lr=2.5e-2,
    lr_schedule="cosine",
    least_batch=256,
    most_batches=64,
    least_epochs=60,
    least_steps=1500,
)
BY_INPUT = replace(OURS, noise="by input", temperature=0.5, lr=1e-2, least_steps=20_000)
POINT = replace(BY_INPUT, guide="delta", guide_options=HE, temperature=1.0, draws=1)
RECIPES = {
    "published": replace(
        OURS,
        prior="normal",
        options={"scale": 1.0},
        members=1,
        temperature=1.0,
        lr=1e-2,
        lr_schedule="constant",
        least_batch=32,
        least_epochs=40,
        least_steps=0,
    ),
    "ours": OURS,
    "heteroscedastic": BY_INPUT,
    "single": replace(BY_INPUT, members=1),
    "vbll": replace(OURS, guide="vbll", guide_options={}, members=1, temperature=1.0, lr=1e-2),
    "dropout": replace(POINT, members=1, dropout=0.05, draws=100),
    "ensemble5": replace(POINT, members=5, least_steps=1500),
    "ensemble10": replace(POINT, members=10, least_steps=1500),
}


Preset: TypeAlias = Literal[
    "published", "ours", "heteroscedastic", "single", "vbll", "dropout", "ensemble5", "ensemble10"
]


@dataclass(frozen=True)
class Config(DataSettings):
    """Settings of one run."""

    preset: Preset = "ours"
    """Recipe, see above."""
    datasets: tuple[str, ...] = ()
    """Names of the tables, which are their folders'; by default all that are there."""
    part: Literal["test", "validation"] = "test"
    """Scored part; for validation a fifth of the train part is held out."""
    splits: int | None = None
    """Number of splits, from a table's first; by default all."""
    workers: int = 1
    """Processes that work on splits; -1 is one for each processor."""
    output: Path = Path("results/uci_regression")
    """Folder for results, and for the splits from which a run goes on."""


def tasks_of(config: Config, recipe: Recipe, paths: dict[str, Path]) -> list[Task]:
    """Make tasks of all splits, large tables first; every table is checked."""
    if config.splits is not None and config.splits < 1:
        raise ValueError(f"splits must be at least 1, got {config.splits}")
    tasks: list[tuple[int, Task]] = []
    for name, path in paths.items():
        table = bbb.data.read_uci(path)
        count = min(len(table.train_index), config.splits or len(table.train_index))
        common = (config.part, recipe, config.seed)
        tasks += [(table.x.numel(), Task(name, str(path), k, *common)) for k in range(count)]
    return [task for _, task in sorted(tasks, key=lambda pair: -pair[0])]


def run_all(
    config: Config, folder: Path, tasks: list[Task], files: dict[str, str]
) -> dict[str, list[dict[str, Any]]]:
    """The scores of every table's splits, in their order, each cached in a file."""
    parallel = joblib.Parallel(n_jobs=config.workers, return_as="generator")
    jobs = (
        joblib.delayed(scored)(
            task,
            folder / f"{task.name}-{files[task.name][:8]}" / f"{config.seed}-{task.split}.json",
            config.threads,
        )
        for task in tasks
    )
    found: dict[str, list[dict[str, Any]]] = {task.name: [] for task in tasks}
    for name, scores in tqdm(parallel(jobs), total=len(tasks), unit="split", dynamic_ncols=True):
        found[name].append(scores)
    return dict(sorted(found.items()))


def main(config: Config) -> dict[str, Any]:
    """Run the splits that are not done, print the tables, write the results."""
    recipe = RECIPES[config.preset]
    made_up = config.smoke and not (config.data_root or config.datasets)
    paths = {} if made_up else find_tables(config.data_root, config.datasets)
    run = Run(config)
    if config.smoke:
        members = min(2, recipe.members)
        recipe = replace(recipe, members=members, least_epochs=1, least_steps=5, draws=5)
        config = replace(config, splits=min(2, config.splits or 2))
    paths = paths or made_up_tables(config.output / "made_up")
    tasks = tasks_of(config, recipe, paths)
    files = {name: digest(path) for name, path in paths.items()}
    scores = run_all(config, run.seeds("datasets", "splits", "workers"), tasks, files)
    summaries = {name: report.summary_of(splits) for name, splits in scores.items()}
    about = {"recipe": asdict(recipe), "files": files, "part": config.part}
    record = run.finish(summaries | about)
    tables = [report.score_table(summaries, score) for score in SCORES]
    tables.append(report.coverage_table(summaries))
    kind = "test parts" if config.part == "test" else "validation parts, not test parts"
    text = f"Preset {config.preset}, scores on the {kind}. {report.comparison(summaries)}"
    levels = np.linspace(0.01, 0.99, 99)
    lines = {name: report.quantiles_of(splits) for name, splits in scores.items()}
    lines = {n: (levels, [report.coverage(q, level) for level in levels]) for n, q in lines.items()}
    axes = {"xlabel": "level of the interval", "ylabel": "coverage"}
    picture = run.curves("coverage", "Of the targets, all splits together.", {"": lines}, **axes)
    run.report("Regression tables", text, record, tables, [picture])
    return record


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
