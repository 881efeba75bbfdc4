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

``metrics.json`` in ``--output`` has at its top level, for each table by its name,

    {"rmse": {"mean": m, "standard_error": s},            in the target's unit
     "log_likelihood": {"mean": m, "standard_error": s},  nats per row of the test part
     "splits": n, "coverage": {...}, "per_split": {...}, "seconds_per_split": t}

next to ``recipe``, ``seed`` and other keys of the run itself (`RESERVED`). Mean and standard error
are over the splits: s = sd / sqrt(n), where sd divides by n - 1 (null for one split). The
log-likelihood is the logarithm of the posterior predictive, a mixture over all draws, averaged over
the rows. Each split that is done is a file in ``splits/NAME``; a run that was interrupted goes on
from there, and splits of another recipe, seed or table are computed anew.

``--preset published`` is the plain recipe: one network, prior N(0, 1), one draw of all weights per
step, 40 epochs in batches of 32 (at most 64 per epoch), Adam with 0.01, noise of a learned scale.

``--preset ours`` trains an ensemble of eight networks, each with a factorised posterior and a noise
of its own, and predicts by the mixture of the eight. Their KL is weighted by 0.25, for a factorised
posterior of few rows else switches most units off. Prior N(0, 2 / fan-in); batches of 256 (at most
64 per epoch), at least 1,500 steps and 60 epochs, Adam from 0.025 along a cosine to 0.

``--preset heteroscedastic`` is as ours, but the noise's scale is a second output of the network,
the KL is weighted by 0.5, and training is longer: 20,000 steps by Adam from 0.01. It has the best
likelihoods, and larger errors where a few rows decide them. ``single`` is one of its eight
networks; ``ensemble5`` and ``ensemble10`` are deep ensembles of MAP networks with such noise (1,500
steps: with 20,000 they are overconfident), ``dropout`` is MC dropout with a rate of 0.05 (Gal and
Ghahramani 2016).

``--preset vbll`` is one network whose last layer alone is random, after Harrison et al. (2024),
"Variational Bayesian Last Layers", arXiv:2404.11599: the guide `LastLayer`, otherwise as ours, but
with the whole KL, and Adam from 0.01.

One recipe of ours serves all tables, found without test data: by a fifth of each split's train
part, as ``--part validation`` scores it (in the search a program that trains all splits at once
did). What was seen there, RMSE / log-likelihood:

- The KL's weight. Boston: 1 3.62 / -2.69 (one network), 0.5 3.44 / -2.62, 0.25 3.32 / -2.67, 0.12
  3.34 / -2.94. Energy: 1 1.27 / -1.76, 0.4 0.51 / -0.90, 0.2 0.45 / -0.72. Wine: 1 0.626 / -0.953,
  0.2 0.622 / -0.944. Naval: 0.4 0.0026 / 4.39, 0.2 0.0021 / 4.56.
- Steps. Yacht in batches of 64 with 0.01 and 2,500 steps 0.84 / -1.14, of 256 with 0.03 and 1,500
  steps 0.79 / -1.03; 0.05 is too much (0.84 / -1.09, energy 0.61 / -0.93 for 0.50 / -0.81).
- Of no use: learned scales of the prior (Boston 3.95 / -2.80 at weight 1, no change at 0.25), a
  prior three times as wide, the local reparameterisation, a wider start, noise by cross-validation.
  Noise that depends on the input helps one score and harms the other (Boston 3.87 / -2.42 at weight
  0.3, where one noise has 3.35 / -2.71), as Student-t noise does (4.08 / -2.60 at weight 1).
- With noise by input, log-likelihood (first three or four splits). Weight 0.25: Boston, energy,
  yacht, wine with 1,500 steps from 0.025 -2.38, -1.15, -0.49, -0.92; with 6,000 -2.38, -0.55,
  -0.21, -0.84; with 20,000 from 0.01 -2.53, -0.57, 0.00, -0.81, and naval 6.85 (from 0.025 training
  fails there). Weight 0.5, 20,000 steps: -2.42, -0.53, -0.29, -0.86, naval 6.59.
- Five MAP networks with noise by input, 1,500 steps: -6.04, -1.36, -1.12, -0.90; 20,000 steps:
  -482, -0.77, -10.6, -2.79. Dropout of 0.05, 20,000 steps: -2.67, -0.76, 0.01, -0.96; 4,000 steps:
  -2.66, -1.09, -0.01, -0.95; of 0.01, 20,000 steps: -3.58, -1.66, -0.28, -1.32.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import joblib
import tyro
from _helpers import uci_report as report
from _helpers.run import DataSettings, Run, Section
from _helpers.uci import Recipe, Task, digest, finished, run_and_write
from _helpers.uci_report import SCORES
from _helpers.uci_tables import find_tables, made_up_tables
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
        common = (config.part, recipe, config.seed, digest(path))
        tasks += [(table.x.numel(), Task(name, str(path), k, *common)) for k in range(count)]
    return [task for _, task in sorted(tasks, key=lambda pair: -pair[0])]


def run_all(config: Config, run: Run, tasks: list[Task]) -> dict[str, list[dict[str, Any]]]:
    """The scores of every table's splits, in their order; those that are done are read."""
    known = {(t.name, t.split): finished(config.output, t) for t in tasks}
    todo = [t for t in tasks if known[t.name, t.split] is None]
    run.started -= sum(scores["seconds"] for scores in known.values() if scores)  # as if done now
    parallel = joblib.Parallel(n_jobs=config.workers, return_as="generator_unordered")
    jobs = (joblib.delayed(run_and_write)(t, config.output, config.threads) for t in todo)
    bar = tqdm(total=len(tasks), initial=len(tasks) - len(todo), unit="split", dynamic_ncols=True)
    with bar:
        for task, scores in parallel(jobs):
            known[task.name, task.split] = scores
            bar.set_postfix_str(task.name, refresh=False)
            bar.update()
    return {
        name: [scores for (of, _), scores in sorted(known.items()) if of == name and scores]
        for name in sorted({t.name for t in tasks})
    }


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
    scores = run_all(config, run, tasks)
    summaries = {name: report.summary_of(splits) for name, splits in scores.items()}
    files = {task.name: task.digest for task in tasks}
    about = {"recipe": asdict(recipe), "files": files, "part": config.part}
    record = run.finish(summaries | about)
    tables = [report.score_table(summaries, score) for score in SCORES]
    finding = report.comparison(summaries)
    sections = [
        Section("Scores", finding, tables, report.draw_scores(run, summaries)),
        Section(
            "Intervals",
            "Central intervals of the predictive distribution, and their coverage of the targets.",
            [report.coverage_table(summaries)],
            [report.draw_coverage(run, scores)],
        ),
    ]
    kind = "test parts" if config.part == "test" else "validation parts, not test parts"
    run.report(
        "Regression tables", f"Preset {config.preset}, scores on the {kind}.", sections, record
    )
    return record


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
