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
"""

import math
import statistics
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import tyro
from _helpers.regression_tables import Recipe, Task, digest, find_tables, made_up_tables, run_task
from _helpers.run import DataSettings, Run
from _helpers.tables import Table, over_splits

import pyro_bbb as bbb

Figure: TypeAlias = tuple[float, float | None]  # mean and standard error
PUBLISHED_METHODS = ("VI", "PBP", "tuned dropout")
THIS_RUN = "this run"
SCORES = {"rmse": "RMSE", "log_likelihood": "log-likelihood"}
LEVELS = (0.5, 0.8, 0.9, 0.95)

# VI (Graves 2011) and PBP as Gal and Ghahramani (2016, "Dropout as a Bayesian Approximation") print
# them; tuned dropout: grid search of 2018, https://github.com/yaringal/DropoutUncertaintyExps
PUBLISHED: dict[str, dict[str, tuple[Figure, Figure, Figure]]] = {
    "bostonHousing": {
        "rmse": ((4.32, 0.29), (3.01, 0.18), (2.90, 0.18)),
        "log_likelihood": ((-2.90, 0.07), (-2.57, 0.09), (-2.40, 0.04)),
    },
    "energy": {
        "rmse": ((2.65, 0.08), (1.80, 0.05), (0.54, 0.06)),
        "log_likelihood": ((-2.39, 0.03), (-2.04, 0.02), (-1.21, 0.01)),
    },
    "naval-propulsion-plant": {
        "rmse": ((0.01, None), (0.01, None), (0.00, None)),
        "log_likelihood": ((3.73, 0.12), (3.73, 0.01), (4.45, 0.00)),
    },
    "wine-quality-red": {
        "rmse": ((0.65, 0.01), (0.64, 0.01), (0.62, 0.01)),
        "log_likelihood": ((-0.98, 0.01), (-0.97, 0.01), (-0.93, 0.01)),
    },
    "yacht": {
        "rmse": ((6.89, 0.67), (1.02, 0.05), (0.67, 0.05)),
        "log_likelihood": ((-3.43, 0.16), (-1.63, 0.02), (-1.25, 0.01)),
    },
}

# the best of each column in uncertainty-baselines, by MC dropout, ensembles and refined VI, on
# other splits: https://github.com/google/uncertainty-baselines, baselines/uci
BEST_NLL = {
    "bostonHousing": 2.40,
    "energy": 0.61,
    "naval-propulsion-plant": -6.33,
    "wine-quality-red": 0.93,
    "yacht": 0.73,
}


def summary_of(scores: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the scores of one table for ``metrics.json``."""
    columns = {key: [split[key] for split in scores] for key in SCORES}
    # a target is in the central interval of a level where its predicted quantile q is near 1/2
    distances = np.abs(2 * np.concatenate([split["quantiles"] for split in scores]) - 1)
    covered = {f"{level:.0%}": float((distances <= level).mean()) for level in LEVELS}
    return {
        **{key: over_splits(values) for key, values in columns.items()},
        "coverage": covered,
        "splits": len(scores),
        "per_split": columns,
        "seconds_per_split": statistics.fmean(split["seconds"] for split in scores),
    }


def rows_of(name: str, summary: dict[str, Any], score: str) -> dict[str, Figure]:
    """Return a table's figures by method, with the published ones, if any."""
    ours = summary[score]["mean"], summary[score]["standard_error"]
    published = PUBLISHED.get(name, {}).get(score, ())
    return dict(zip(PUBLISHED_METHODS, published, strict=False)) | {THIS_RUN: ours}


def shown(figure: Figure) -> str:
    """Mean and standard error to the latter's first digit, with two decimals at least."""
    mean, error = figure
    if not error:
        return f"{mean:.2f}" if abs(mean) >= 0.1 or not mean else f"{mean:.2g}"
    digits = max(2, -math.floor(math.log10(error)))
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def score_table(summaries: dict[str, Any], score: str) -> Table:
    """One row per table, one column per method."""
    columns = (f"{SCORES[score]}, mean ± standard error", *PUBLISHED_METHODS, THIS_RUN)
    rows = []
    for name, summary in summaries.items():
        figures = rows_of(name, summary, score)
        cells = (shown(figures[method]) if method in figures else "–" for method in columns[1:])
        rows.append((name, *cells))
    return Table(columns, rows)


def methods_table(runs: dict[str, dict[str, Any]]) -> Table:
    """NLL of several runs by their names, one column for each table, and the best published."""
    rows = []
    for label, run in runs.items():
        values = (run[name]["log_likelihood"] for name in BEST_NLL)
        cells = [shown((-value["mean"], value["standard_error"])) for value in values]
        rows.append((label, *cells))
    rows.append(("best published, other splits", *map("{:.2f}".format, BEST_NLL.values())))
    return Table(("NLL (nats)", *BEST_NLL), rows)


def coverage_table(summaries: dict[str, Any]) -> Table:
    """Tabulate the coverage of central intervals in per cent."""
    levels = [f"{level:.0%}" for level in LEVELS]
    rows = [(n, *(f"{100 * s['coverage'][k]:.1f}" for k in levels)) for n, s in summaries.items()]
    return Table(("coverage (%) of intervals", *levels), rows)


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


def tasks_of(config: Config, recipe: Recipe, paths: dict[str, Path]) -> list[Task]:
    """Make tasks of all splits, large tables first; every table is checked."""
    tasks: list[tuple[int, Task]] = []
    for name, path in paths.items():
        table = bbb.data.read_uci(path)
        count = min(len(table.train_index), config.splits or len(table.train_index))
        common = (config.part, recipe, config.seed)
        tasks += [(table.x.numel(), Task(name, str(path), k, *common)) for k in range(count)]
    return [task for _, task in sorted(tasks, key=lambda pair: -pair[0])]


def main(config: Config) -> dict[str, Any]:
    """Run the splits that are not done, print the tables, write the results."""
    recipe = RECIPES[config.preset]
    made_up = config.smoke and not (config.data_root or config.datasets)
    paths = {} if made_up else find_tables(config.data_root, config.datasets)
    run = Run(config, free=("datasets", "splits", "workers"))
    if config.smoke:
        members = min(2, recipe.members)
        recipe = replace(recipe, members=members, least_epochs=1, least_steps=5, draws=5)
        config = replace(config, splits=min(2, config.splits or 2))
    paths = paths or made_up_tables(config.output / "made_up")
    tasks = tasks_of(config, recipe, paths)
    files = {name: digest(path) for name, path in paths.items()}
    jobs = {
        f"{task.name}-{files[task.name][:8]}/{task.seed}-{task.split}": partial(run_task, task)
        for task in tasks
    }
    scores: dict[str, list[dict[str, Any]]] = {name: [] for name in sorted(files)}
    for task, figures in zip(tasks, run.spread(jobs, config.workers), strict=True):
        scores[task.name].append(figures)
    summaries = {name: summary_of(splits) for name, splits in scores.items()}
    about = {"recipe": asdict(recipe), "files": files, "part": config.part}
    tables = [score_table(summaries, score) for score in SCORES]
    tables.append(coverage_table(summaries))
    scored = "test parts" if config.part == "test" else "validation parts, not test parts"
    text = f"Preset {config.preset}, scores on the {scored}."
    return run.report(__doc__, summaries | about, tables, remark=text)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
