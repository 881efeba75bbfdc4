# SPDX-License-Identifier: Apache-2.0
"""`BayesianRegressor` with its default settings against scikit-learn's estimators and NGBoost.

    python experiments/sklearn_comparison.py --data-root FOLDER

FOLDER has ``uci/NAME/data.npz`` (or is named by ``PYRO_BBB_DATA``): UCI regression sets with the
splits of Hernández-Lobato and Adams (2015), https://arxiv.org/abs/1502.05336; ``diabetes`` comes
with scikit-learn, in random splits. On the first splits of each set every method is fitted and
predicts the test rows:

- ``BayesianRegressor(inference="variational")``, its default settings whatever the set;
- ``BayesianRidge``, ``GaussianProcessRegressor`` (a length per input, learned noise; on a random
  part of large sets, as its time grows with the cube of the rows), ``MLPRegressor`` (the same 50
  units) and ``RandomForestRegressor``, inputs scaled where the method needs it;
- ``HistGradientBoostingRegressor`` for the mean, and two more for the 5 % and 95 % quantiles;
- ``NGBRegressor`` of NGBoost, boosting of a Normal, where ``pip install "pyro-bbb[comparison]"``
  has brought it.

Reported: RMSE in the targets' unit, mean log-density of the test targets (nats per row) where the
method has a density, coverage of the 90 % intervals where it has intervals,
and the processor seconds of fitting and predicting, on one thread. Means over splits and their
standard errors (standard deviation / sqrt(splits)).

Scores are cached in the output's folder ``scores``; a run that was interrupted goes on from there,
and after a change of a method that folder has to go. The defaults were chosen on the sets' training
parts, a fifth of each held out.
"""

import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import tyro
from _helpers.regressors import LEVEL, METHODS, OURS, Answer, Split, fit_ours
from _helpers.repeats import over_splits
from _helpers.run import DataSettings, Picture, Run, Section, Table, write_json
from sklearn.datasets import load_diabetes
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import ShuffleSplit
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from pyro_bbb import plots
from pyro_bbb.data import load_uci

BUNDLED = "diabetes"
SETS = ("bostonHousing", BUNDLED, "energy", "naval-propulsion-plant", "wine-quality-red", "yacht")


@dataclass(frozen=True)
class Config(DataSettings):
    """Settings of one run."""

    datasets: tuple[str, ...] = SETS
    """Names of the sets."""
    splits: int = 5
    """Of each set the first so many splits."""
    output: Path = Path("results/sklearn_comparison")
    """Folder for results."""


def read_splits(name: str, config: Config) -> list[Split]:
    """The first splits of a set."""
    if config.smoke:
        return [made_up(name, seed) for seed in range(2)]
    if name == BUNDLED:
        return bundled(config.splits)
    data = load_uci(name, root=config.data_root)
    x, y = data.x.double().numpy(), data.y.double().numpy().reshape(-1)
    pairs = list(zip(data.train_index, data.test_index, strict=True))[: config.splits]
    return [Split(x[train], y[train], x[test], y[test]) for train, test in pairs]


def bundled(number: int) -> list[Split]:
    """Random splits of scikit-learn's diabetes table, a tenth to test."""
    x, y = load_diabetes(return_X_y=True)
    splits = ShuffleSplit(number, test_size=0.1, random_state=0).split(x)
    return [Split(x[train], y[train], x[test], y[test]) for train, test in splits]


def made_up(name: str, seed: int) -> Split:
    """A small set for the smoke run."""
    rng = np.random.default_rng([seed, len(name)])
    x = rng.normal(size=(70, 3))
    y = x[:, 0] ** 2 + x[:, 1] + 0.1 * rng.normal(size=70)
    return Split(x[:50], y[:50], x[50:], y[50:])


def evaluate(
    method: Callable[[Split, int], Answer], split: Split, seed: int, threads: int
) -> dict[str, float]:
    """Fit one method and score its predictions."""
    started = time.process_time()
    with warnings.catch_warnings(), threadpool_limits(threads):
        warnings.simplefilter("ignore", ConvergenceWarning)  # of an optimum at a bound
        answer = method(split, seed)
    y = split.y_test
    scores = {"rmse": float(np.sqrt(np.mean((answer.mean - y) ** 2)))}
    if answer.log_density is not None:
        scores["log_likelihood"] = float(answer.log_density.mean())
    if answer.lower is not None and answer.upper is not None:
        scores["coverage"] = float(np.mean((answer.lower <= y) & (y <= answer.upper)))
    return scores | {"seconds": time.process_time() - started}


def summary(records: list[dict[str, float]]) -> dict[str, dict[str, float | None]]:
    """Mean and standard error over splits of each score."""
    return {name: over_splits([record[name] for record in records]) for name in records[0]}


def main(config: Config) -> dict[str, Any]:
    """Runs every method on every split, draws, reports; returns the metrics."""
    run = Run(config)
    names = ("made up", "made up as well") if config.smoke else config.datasets
    splits = {name: read_splits(name, config) for name in names}
    number = min(map(len, splits.values()))
    todo = [(i, name, label) for i in range(number) for name in names for label in METHODS]
    records: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tqdm(todo, dynamic_ncols=True) as bar:
        for i, name, label in bar:
            bar.set_description(f"{name}, {label}")
            found = evaluate_once(label, name, splits[name][i], i, config)
            records.setdefault((name, label), []).append(found)
    sets = {name: {label: summary(records[name, label]) for label in METHODS} for name in splits}
    tables = [table(name, sets[name]) for name in sets]
    record = run.finish({"sets": sets, "splits": number, "level": LEVEL})
    report(run, sets, tables, record)
    return record


def evaluate_once(
    label: str, name: str, split: Split, number: int, config: Config
) -> dict[str, float]:
    """The scores of one method on one split; a run that was interrupted goes on from them."""
    path = config.output / "scores" / f"{name}-{number}-{label}-{config.seed}.json"
    if not path.exists():
        method = fit_briefly if config.smoke and label == OURS else METHODS[label]
        found = evaluate(method, split, config.seed + number, config.threads)
        write_json(path, found)
    scores: dict[str, float] = json.loads(path.read_text())
    return scores


def fit_briefly(split: Split, seed: int) -> Answer:
    """The estimator, hardly trained."""
    return fit_ours(split, seed, epochs=2, num_samples=20)


def table(name: str, methods: dict[str, Any]) -> Table:
    """One set: a row for each method, a dash where it does not say."""

    def cell(scores: dict[str, Any], key: str, digits: int, factor: float = 1.0) -> str:
        if key not in scores:
            return "–"
        mean, error = (scores[key][each] for each in ("mean", "standard_error"))
        known = "" if error is None else f" ± {factor * error:.{digits}f}"
        return f"{factor * mean:.{digits}f}{known}"

    digits = max(2, 2 - math.floor(math.log10(methods[OURS]["rmse"]["mean"])))
    rows = [
        (
            label,
            cell(scores, "rmse", digits),
            cell(scores, "log_likelihood", 2),
            cell(scores, "coverage", 1, 100),
            f"{scores['seconds']['mean']:.1f}",
        )
        for label, scores in methods.items()
    ]
    return Table((name, "RMSE", "log-likelihood (nats)", "coverage (%)", "CPU seconds"), rows)


def report(run: Run, sets: dict[str, Any], tables: list[Table], record: dict[str, Any]) -> None:
    """Two pictures and the tables."""
    ahead = sum(
        min(methods, key=lambda label: methods[label]["rmse"]["mean"]) == OURS
        for methods in sets.values()
    )
    summary_text = (
        f"On {ahead} of {len(sets)} sets the estimator with its default settings has the lowest "
        f"RMSE of all {len(METHODS)} methods."
    )
    section = Section(
        "Default settings on UCI regression sets",
        f"Means and standard errors over {record['splits']} splits. Coverage is of 90 % "
        "intervals; the nearer to 90 % the better.",
        tables=tables,
        pictures=[draw_errors(run, sets), draw_coverage(run, sets)],
    )
    run.report("BayesianRegressor and scikit-learn's methods", summary_text, [section], record)


def draw_errors(run: Run, sets: dict[str, Any]) -> Picture:
    """RMSE of all methods over the lowest of each set."""

    def ratios(methods: dict[str, Any], label: str) -> float:
        return float(methods[label]["rmse"]["mean"] / _least(methods))

    with plots.style():
        figure, ax = plt.subplots(figsize=(6.4, 3.6))
        dots(ax, sets, ratios)
        ax.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        ax.set(xscale="log", xlabel="RMSE over the lowest of the set")
        ax.set_xticks(ticks := [1, 2, 5, 10, 20, 50, 100, 200], list(map(str, ticks)))
        ax.minorticks_off()
        ax.set_title("Errors relative to the best method of each set")
    return run.picture(figure, "errors", "RMSE of each method, divided by the lowest of the set.")


def draw_coverage(run: Run, sets: dict[str, Any]) -> Picture:
    """Plot the coverage of 90 % intervals."""

    def refused_fractions(methods: dict[str, Any], label: str) -> float:
        return float(methods[label].get("coverage", {"mean": math.nan})["mean"])

    with plots.style():
        figure, ax = plt.subplots(figsize=(6.4, 3.6))
        dots(ax, sets, refused_fractions)
        ax.axvline(LEVEL, color="black", linewidth=0.8, linestyle=":")
        ax.xaxis.set_major_formatter("{x:.0%}")
        ax.set(xlabel="coverage of 90 % intervals")
        ax.set_title("Calibration of 90 % intervals")
    caption = "Coverage of 90 % intervals, of the methods that have intervals. The line is 90 %."
    return run.picture(figure, "coverage", caption)


def dots(ax: Any, sets: dict[str, Any], value: Callable[[dict[str, Any], str], float]) -> None:
    """A row for each set, a mark for each method that has the value."""
    colours = [*plt.rcParams["axes.prop_cycle"].by_key()["color"], "0.35"]  # of a method the same
    for number, (label, marker) in enumerate(zip(METHODS, "oD^sPvX", strict=False)):
        values = [value(methods, label) for methods in sets.values()]
        if not np.isnan(values).all():
            size = 8 if label == OURS else 5
            colour = colours[number % len(colours)]
            look: dict[str, Any] = {"color": colour, "markersize": size, "alpha": 0.85}
            ax.plot(values, list(sets), marker, label=label, **look)
    ax.invert_yaxis()
    ax.grid(axis="y", linewidth=0.4)
    ax.figure.legend(loc="outside lower center", ncols=3)


def _least(methods: dict[str, Any]) -> float:
    return min(float(scores["rmse"]["mean"]) for scores in methods.values())


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
