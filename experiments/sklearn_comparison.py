# SPDX-License-Identifier: Apache-2.0
"""`BayesianRegressor` with its default settings against scikit-learn's estimators and NGBoost.

    python experiments/sklearn_comparison.py --data-root FOLDER

FOLDER has ``uci/NAME/data.npz`` (or is named by ``PYRO_BBB_DATA``): UCI regression sets with the
splits of Hernández-Lobato and Adams (2015), https://arxiv.org/abs/1502.05336; ``diabetes`` comes
with scikit-learn, in random splits. On the first splits of each set every method is fitted and
predicts the test rows:

``docs/development/experiments.md`` has the other settings, and those tried.
"""

import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from _helpers.regressors import LEVEL, METHODS, OURS, Answer, Split, fit_ours
from _helpers.repeats import over_splits
from _helpers.run import DataSettings, Run, Table, write_json
from sklearn.datasets import load_diabetes
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import ShuffleSplit
from threadpoolctl import threadpool_limits
from tqdm import tqdm

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
    lowest = [min(found, key=lambda label: found[label]["rmse"]["mean"]) for found in sets.values()]
    text = (
        f"On {lowest.count(OURS)} of {len(sets)} sets the estimator with its default settings has "
        f"the lowest RMSE of all {len(METHODS)} methods. Means and standard errors over {number} "
        "splits; coverage is of 90 % intervals."
    )
    run.report("BayesianRegressor and scikit-learn's methods", text, record, tables)
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


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
