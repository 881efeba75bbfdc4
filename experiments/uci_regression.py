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

beside ``recipe``, ``seed`` and other keys of the run itself (`RESERVED`). Mean and standard error
are over the splits: s = sd / sqrt(n), where sd divides by n - 1 (null for one split). The
log-likelihood is the logarithm of the posterior predictive, a mixture over all draws, averaged over
the rows. Each split that is done is a file in ``splits/NAME``; a run that was interrupted goes on
from there, and splits of another recipe, seed or table are computed anew.

``--preset published`` is the plain recipe: one network, prior N(0, 1), one draw of all weights per
step, 40 epochs in batches of 32 (at most 64 per epoch), Adam with 0.01, noise of a learned scale.

``--preset ours`` trains eight networks side by side, each with a factorised posterior and a noise
of its own, and predicts by the mixture of the eight. Their KL is weighted by 0.25, for a factorised
posterior of few rows else switches most units off. Prior N(0, 2 / fan-in); batches of 256 (at most
64 per epoch), at least 1,500 steps and 60 epochs, Adam from 0.025 along a cosine to 0.

One recipe serves all tables, found without test data: by a fifth of each split's train part, as
``--part validation`` scores it (in the search a program that trains all splits at once did). What
was seen there, RMSE / log-likelihood:

- The KL's weight. Boston: 1 3.62 / -2.69 (one network), 0.5 3.44 / -2.62, 0.25 3.32 / -2.67, 0.12
  3.34 / -2.94. Energy: 1 1.27 / -1.76, 0.4 0.51 / -0.90, 0.2 0.45 / -0.72. Wine: 1 0.626 / -0.953,
  0.2 0.622 / -0.944. Naval: 0.4 0.0026 / 4.39, 0.2 0.0021 / 4.56.
- Steps. Yacht in batches of 64 with 0.01 and 2,500 steps 0.84 / -1.14, of 256 with 0.03 and 1,500
  steps 0.79 / -1.03; 0.05 is too much (0.84 / -1.09, energy 0.61 / -0.93 for 0.50 / -0.81).
- Of no use: learned scales of the prior (Boston 3.95 / -2.80 at weight 1, no change at 0.25), a
  prior three times as wide, the local reparameterisation, a wider start, noise by cross-validation.
  Noise that depends on the input helps one score and harms the other (Boston 3.87 / -2.42 at weight
  0.3, where one noise has 3.35 / -2.71), as Student-t noise does (4.08 / -2.60 at weight 1).
"""

import math
import os
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import joblib
import matplotlib.pyplot as plt
import numpy as np
import torch
import tyro
from _helpers.run import Picture, Run, Section, Table
from _helpers.uci import Recipe, Task, digest, finished, run_and_keep
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter
from tqdm import tqdm

import pyro_bbb as bbb
from pyro_bbb import plots
from pyro_bbb._utils.colors import VERMILLION

Figure: TypeAlias = tuple[float, float | None]  # mean and standard error

RESERVED = ("recipe", "files", "part", "seed", "seconds", "commit", "python", "versions", "threads")
METHODS = ("VI", "PBP", "tuned dropout")
OURS = "this run"
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

RECIPES = {
    "published": Recipe(
        prior="normal",
        options={"scale": 1.0},
        members=1,
        init_rho=-5.0,
        temperature=1.0,
        lr=1e-2,
        lr_schedule="constant",
        least_batch=32,
        most_batches=64,
        least_epochs=40,
        least_steps=0,
    ),
    "ours": Recipe(
        prior="fan_in_normal",
        options={},
        members=8,
        init_rho=-5.0,
        temperature=0.25,
        lr=2.5e-2,
        lr_schedule="cosine",
        least_batch=256,
        most_batches=64,
        least_epochs=60,
        least_steps=1500,
    ),
}


@dataclass(frozen=True)
class Config:
    """Settings of one run."""

    preset: Literal["published", "ours"] = "ours"
    """The plain recipe, or the one that was found on validation data."""
    data_root: Path | None = None
    """Folder of the tables' folders, or one with uci/ below it; by default $PYRO_BBB_DATA."""
    datasets: tuple[str, ...] = ()
    """Names of the tables, which are their folders'; by default all that are there."""
    part: Literal["test", "validation"] = "test"
    """What is scored; for validation a fifth of the train part is held out."""
    splits: int | None = None
    """How many of a table's splits, from its first; by default all."""
    workers: int = 1
    """Processes that work on splits; -1 is one for each processor."""
    seed: int = 0
    """Seed of initial values, minibatches and draws; the splits are those of the files."""
    threads: int = 1
    """Processor threads of each process."""
    output: Path = Path("results/uci_regression")
    """Folder for results, and for the splits from which a run goes on."""
    smoke: bool = False
    """Two splits and a few steps, of made-up tables if none is given, to see that it works."""


def find_tables(root: Path | None, names: tuple[str, ...]) -> dict[str, Path]:
    """Files of the tables by name.

    Args:
        root: folder that holds ``NAME/data.npz`` or ``uci/NAME/data.npz``, or None for
            ``$PYRO_BBB_DATA``.
        names: which; none for all.

    Raises:
        FileNotFoundError: there is no such folder or table.
        ValueError: a name is one of `RESERVED` or no name of a folder.
    """
    given = root or os.environ.get("PYRO_BBB_DATA")
    if not given or not Path(given).is_dir():
        raise FileNotFoundError(
            f"data_root must be a folder with NAME/data.npz or uci/NAME/data.npz, got {given}"
        )
    bases = (Path(given) / "uci", Path(given))
    there = {path.parent.name: path for base in bases for path in base.glob("*/data.npz")}
    for name in names or sorted(there):
        if name in RESERVED or Path(name).name != name:
            raise ValueError(f"datasets must be names of folders, and none of {RESERVED}: {name!r}")
        if name not in there:
            found = ", ".join(sorted(there)) or "none"
            raise FileNotFoundError(f"datasets: no {name}/data.npz in {given} (there are {found})")
    if not there:
        raise FileNotFoundError(f"data_root must have NAME/data.npz, got {given} without any")
    return {name: there[name] for name in names or sorted(there)}


def made_up_tables(folder: Path) -> dict[str, Path]:
    """Two small tables for a smoke test; one has a column that does not vary."""
    rng, paths = np.random.default_rng(0), {}
    for name, unit in (("made-up-lines", 1.0), ("made-up-waves", 1e-3)):
        x = rng.normal(size=(40, 3))
        x[:, 1] = 5.0 if name == "made-up-waves" else x[:, 1]
        y = unit * (np.sin(x[:, 0]) + 0.1 * rng.normal(size=40) + 3.0)
        rows = np.stack([rng.permutation(40) for _ in range(3)])
        paths[name] = folder / name / "data.npz"
        paths[name].parent.mkdir(parents=True, exist_ok=True)
        np.savez(paths[name], X=x, y=y, train_index=rows[:, 4:], test_index=rows[:, :4])
    return paths


def tasks_of(config: Config, recipe: Recipe, paths: dict[str, Path]) -> list[Task]:
    """All splits of all tables, those of large tables first; every table is checked."""
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
    jobs = (joblib.delayed(run_and_keep)(t, config.output, config.threads) for t in todo)
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


def over_splits(values: Iterable[float]) -> dict[str, float | None]:
    """Mean and standard error, sd / sqrt(n) with the sd that divides by n - 1."""
    numbers = list(values)
    error = statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else None
    return {"mean": statistics.fmean(numbers), "standard_error": error}


def quantiles_of(scores: list[dict[str, Any]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Predicted probabilities of a target at most the true one, of all splits' rows."""
    return np.concatenate([split["quantiles"] for split in scores])


def coverage(quantiles: np.ndarray[Any, np.dtype[np.float64]], level: float) -> float:
    """Share of the targets in the central interval of this level."""
    return float((np.abs(2 * quantiles - 1) <= level).mean())


def summary_of(scores: list[dict[str, Any]]) -> dict[str, Any]:
    """What ``metrics.json`` has of one table."""
    columns = {key: [split[key] for split in scores] for key in SCORES}
    covered = {f"{level:.0%}": coverage(quantiles_of(scores), level) for level in LEVELS}
    return {
        **{key: over_splits(values) for key, values in columns.items()},
        "coverage": covered,
        "splits": len(scores),
        "per_split": columns,
        "seconds_per_split": statistics.fmean(split["seconds"] for split in scores),
    }


def rows_of(name: str, summary: dict[str, Any], score: str) -> dict[str, Figure]:
    """A table's figures by method, the published ones where there are any."""
    ours = summary[score]["mean"], summary[score]["standard_error"]
    published = PUBLISHED.get(name, {}).get(score, ())
    return dict(zip(METHODS, published, strict=False)) | {OURS: ours}


def shown(figure: Figure) -> str:
    """Mean and standard error to the latter's first digit, with two decimals at least."""
    mean, error = figure
    if not error:
        return f"{mean:.2f}" if abs(mean) >= 0.1 or not mean else f"{mean:.2g}"
    digits = max(2, -math.floor(math.log10(error)))
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def score_table(summaries: dict[str, Any], score: str) -> Table:
    """One row per table, one column per method."""
    columns = (f"{SCORES[score]}, mean ± standard error", *METHODS, OURS)
    rows = []
    for name, summary in summaries.items():
        figures = rows_of(name, summary, score)
        cells = (shown(figures[method]) if method in figures else "–" for method in columns[1:])
        rows.append((name, *cells))
    return Table(columns, rows)


def coverage_table(summaries: dict[str, Any]) -> Table:
    """How often targets lie in central intervals, in per cent."""
    levels = [f"{level:.0%}" for level in LEVELS]
    rows = [(n, *(f"{100 * s['coverage'][k]:.1f}" for k in levels)) for n, s in summaries.items()]
    return Table(("targets within (%)", *levels), rows)


def comparison(summaries: dict[str, Any]) -> str:
    """In how many of the published figures this run does better, or nearly as well."""
    won, near, total = 0, 0, 0
    for name in summaries.keys() & PUBLISHED.keys():
        for score, sign in (("rmse", -1), ("log_likelihood", 1)):
            vi, pbp, dropout = (f for f in PUBLISHED[name][score])
            ours = summaries[name][score]["mean"]
            won += all(sign * (ours - theirs[0]) > 0 for theirs in (vi, pbp))
            # two decimals are published; half of the last one is for rounding in binary
            near += sign * (round(ours, 2) - dropout[0]) > -(dropout[1] or 0.0) - 0.005
            total += 1
    if not total:
        return "No figures are published for these tables here."
    return (
        f"Better than VI and than PBP in {won} of {total} figures; better than tuned dropout, or "
        f"within its standard error, in {near} of {total}."
    )


def draw_scores(run: Run, summaries: dict[str, Any]) -> list[Picture]:
    """A row of two panels per table that has published figures: every method with its error."""
    names = [name for name in summaries if name in PUBLISHED]
    if not names:
        return []
    with plots.style():
        figure, axes = plt.subplots(
            len(names), 2, figsize=(8.4, 1.35 * len(names) + 0.4), squeeze=False
        )
        for name, pair in zip(names, axes, strict=True):
            for ax, score in zip(pair, SCORES, strict=True):
                draw_row(ax, rows_of(name, summaries[name], score))
            pair[0].set_title(name)
            pair[1].tick_params(labelleft=False)
        axes[-1, 0].set_xlabel("RMSE (the target's unit; less is better)")
        axes[-1, 1].set_xlabel("log-likelihood (nats; more is better)")
    caption = "Mean over the splits with one standard error. The same splits for all methods."
    return [run.picture(figure, "scores", caption)]


def draw_row(ax: Axes, figures: dict[str, Figure]) -> None:
    """One line per method, ours below in another colour."""
    for place, (method, (mean, error)) in enumerate(reversed(figures.items())):
        colour = VERMILLION if method == OURS else "0.35"
        ax.errorbar(mean, place, xerr=error or 0.0, fmt="o", color=colour, ms=5, lw=2)
    ax.set_yticks(range(len(figures)), list(reversed(figures)))
    ax.set_ylim(-0.6, len(figures) - 0.4)
    ax.margins(x=0.08)
    ax.locator_params(axis="x", nbins=6)
    ax.grid(axis="x", color="0.9")


def draw_coverage(run: Run, scores: dict[str, list[dict[str, Any]]]) -> Picture:
    """Share of targets inside the central interval of every level."""
    levels = np.linspace(0.01, 0.99, 99)
    with plots.style():
        figure, ax = plt.subplots(figsize=(4.8, 3.8))
        ax.plot([0, 1], [0, 1], ":", color="black", lw=1)
        for number, (name, splits) in enumerate(scores.items()):
            quantiles = quantiles_of(splits)
            covered = [coverage(quantiles, level) for level in levels]
            ax.plot(levels, covered, ("-", "--", "-.")[number // 6 % 3], label=name)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        ax.set(xlabel="level of the interval", ylabel="targets inside", xlim=(0, 1), ylim=(0, 1))
        ax.set_title("Are intervals honest?")
        ax.legend()
    caption = "All splits together. On the dotted line they are; above it, wider than need be."
    return run.picture(figure, "coverage", caption)


def main(config: Config) -> dict[str, Any]:
    """Run the splits that are not done, print the tables, write the results."""
    torch.set_num_threads(config.threads)
    recipe = RECIPES[config.preset]
    made_up = config.smoke and not (config.data_root or config.datasets)
    paths = {} if made_up else find_tables(config.data_root, config.datasets)
    run = Run(config, config.output)
    if config.smoke:
        recipe = replace(recipe, members=2, least_epochs=1, least_steps=5, draws=5)
        config = replace(config, splits=min(2, config.splits or 2))
    paths = paths or made_up_tables(config.output / "made_up")
    tasks = tasks_of(config, recipe, paths)
    scores = run_all(config, run, tasks)
    summaries = {name: summary_of(splits) for name, splits in scores.items()}
    files = {task.name: task.digest for task in tasks}
    about = {"recipe": asdict(recipe), "files": files, "part": config.part}
    record = run.finish(summaries | about)
    tables = [score_table(summaries, score) for score in SCORES]
    finding = comparison(summaries)
    sections = [
        Section("Scores", finding, tables, draw_scores(run, summaries)),
        Section(
            "Intervals",
            "Central intervals of the predictive distribution, and how many targets they hold.",
            [coverage_table(summaries)],
            [draw_coverage(run, scores)],
        ),
    ]
    for table in (*tables, coverage_table(summaries)):
        print(f"\n{table}")
    print(f"\n{finding}")
    kind = "test parts" if config.part == "test" else "validation parts, not test parts"
    run.report(
        "Regression tables", f"Preset {config.preset}, scores on the {kind}.", sections, record
    )
    return record


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
