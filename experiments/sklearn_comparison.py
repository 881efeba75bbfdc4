# SPDX-License-Identifier: Apache-2.0
"""`BayesianRegressor` with its default settings against scikit-learn's estimators and NGBoost.

    python experiments/sklearn_comparison.py --data-root FOLDER

FOLDER has ``uci/NAME/data.npz`` (or is named by ``PYRO_BBB_DATA``): UCI regression sets with the
splits of Hernández-Lobato and Adams (2015), https://arxiv.org/abs/1502.05336; ``diabetes`` comes
with scikit-learn, in random splits. On the first splits of each set every method is fitted and
predicts the test rows.
"""

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import tyro
from _helpers import tables as tabulate
from _helpers.run import DataSettings, Run
from _helpers.tables import Table, over_splits
from numpy.typing import NDArray
from sklearn.compose import TransformedTargetRegressor
from sklearn.datasets import load_diabetes
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import BayesianRidge
from sklearn.model_selection import ShuffleSplit
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

from pyro_bbb.data import load_uci
from pyro_bbb.sklearn import BayesianRegressor

Array = NDArray[np.float64]
LEVEL = 0.9
Z = 1.6448536269514722  # of a Normal's 90 % interval
GP_ROWS = 700  # of which a Gaussian process learns
OURS = "BayesianRegressor"


class Answer(NamedTuple):
    """Predictions for the test rows; None where a method has none."""

    mean: Array
    log_density: Array | None
    lower: Array | None
    upper: Array | None


class Split(NamedTuple):
    """One split of a set; targets ``[n]``."""

    x: Array
    y: Array
    x_test: Array
    y_test: Array


def fit_ours(split: Split, seed: int, **options: Any) -> Answer:
    """Return the estimator as it comes, by variational inference."""
    options = {"inference": "variational"} | options
    regressor = BayesianRegressor(random_state=seed, **options).fit(split.x, split.y)
    prediction = regressor.posterior_predictive(split.x_test)
    lower, upper = prediction.interval(LEVEL)
    log_density = prediction.log_prob(torch.from_numpy(split.y_test))
    columns = (prediction.mean[:, 0], log_density, lower[:, 0], upper[:, 0])
    return Answer(*(column.numpy() for column in columns))


def fit_normal(model: Any, split: Split) -> Answer:
    """Fit a method that predicts a mean and a standard deviation."""
    mean, std = model.fit(split.x, split.y).predict(split.x_test, return_std=True)
    z = (split.y_test - mean) / std
    log_density = -0.5 * z**2 - np.log(std) - 0.5 * math.log(2 * math.pi)
    return Answer(mean, log_density, mean - Z * std, mean + Z * std)


def fit_ridge(split: Split, seed: int) -> Answer:
    """Linear, with learned noise and shrinkage."""
    return fit_normal(make_pipeline(StandardScaler(), BayesianRidge()), split)


def fit_process(split: Split, seed: int) -> Answer:
    """Return a Gaussian process by its evidence, on some rows of a large set."""
    rows = np.random.default_rng(seed).permutation(len(split.y))[:GP_ROWS]
    subset = split._replace(x=split.x[rows], y=split.y[rows])
    lengths = RBF(np.ones(split.x.shape[1]), (1e-2, 1e4))
    kernel = ConstantKernel(1.0, (1e-3, 1e4)) * lengths + WhiteKernel(0.1, (1e-6, 10.0))
    process = GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed)
    return fit_normal(make_pipeline(StandardScaler(), process), subset)


def fit_mlp(split: Split, seed: int) -> Answer:
    """Return the plain network of the same size, trained to the end."""
    network = MLPRegressor(hidden_layer_sizes=(50,), max_iter=2000, random_state=seed)
    scaled = TransformedTargetRegressor(
        make_pipeline(StandardScaler(), network), transformer=StandardScaler()
    )
    mean = scaled.fit(split.x, split.y).predict(split.x_test)
    return Answer(mean, None, None, None)


def fit_forest(split: Split, seed: int) -> Answer:
    """Return a forest as it comes."""
    forest = RandomForestRegressor(random_state=seed).fit(split.x, split.y)
    return Answer(forest.predict(split.x_test), None, None, None)


def fit_boosting(split: Split, seed: int) -> Answer:
    """Boosted trees for the mean, and for both ends of the interval."""
    options: list[dict[str, Any]] = [
        {},
        {"loss": "quantile", "quantile": 0.5 * (1 - LEVEL)},
        {"loss": "quantile", "quantile": 0.5 * (1 + LEVEL)},
    ]
    mean, lower, upper = (
        HistGradientBoostingRegressor(random_state=seed, **option)
        .fit(split.x, split.y)
        .predict(split.x_test)
        for option in options
    )
    return Answer(mean, None, lower, upper)


def fit_ngboost(split: Split, seed: int) -> Answer:
    """Natural gradient boosting of a Normal, as it comes (Duan et al. 2020)."""
    from ngboost import NGBRegressor

    model = NGBRegressor(random_state=seed, verbose=False).fit(split.x, split.y)
    normal = model.pred_dist(split.x_test)
    mean, std = normal.loc, normal.scale
    return Answer(mean, normal.logpdf(split.y_test), mean - Z * std, mean + Z * std)


_ALL: dict[str, Callable[[Split, int], Answer]] = {
    OURS: fit_ours,
    "BayesianRidge": fit_ridge,
    "Gaussian process": fit_process,
    "MLPRegressor": fit_mlp,
    "random forest": fit_forest,
    "quantile boosting": fit_boosting,
    "NGBoost": fit_ngboost,
}
_ABSENT = {"NGBoost"} if find_spec("ngboost") is None else set()
METHODS = {label: method for label, method in _ALL.items() if label not in _ABSENT}


BUNDLED = "diabetes"
SETS = ("bostonHousing", BUNDLED, "energy", "naval-propulsion-plant", "wine-quality-red", "yacht")


@dataclass(frozen=True)
class Config(DataSettings):
    """Settings of one run."""

    datasets: tuple[str, ...] = SETS
    """Names of the sets."""
    splits: int = 5
    """Return the first splits of each set."""
    output: Path = Path("results/sklearn_comparison")
    """Folder for results."""


def read_splits(name: str, config: Config) -> list[Split]:
    """Return the first splits of a set."""
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
    """Return a small set for the smoke run."""
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
    """Run every method on every split, draws, reports; returns the metrics."""
    run = Run(config, free=("datasets", "splits"))
    names = ("made up", "made up as well") if config.smoke else config.datasets
    splits = {name: read_splits(name, config) for name in names}
    number = min(map(len, splits.values()))
    jobs = {
        f"{name}-{i}-{label}-{config.seed}": partial(
            evaluate, method, splits[name][i], config.seed + i, config.threads
        )
        for i in range(number)
        for name in names
        for label, method in methods(config).items()
    }
    summaries = dict(zip(jobs, run.spread(jobs), strict=True))
    records = {
        (name, label): [summaries[f"{name}-{i}-{label}-{config.seed}"] for i in range(number)]
        for name in names
        for label in METHODS
    }
    sets = {name: {label: summary(records[name, label]) for label in METHODS} for name in splits}
    lowest = [min(s, key=lambda label: s[label]["rmse"]["mean"]) for s in sets.values()]
    text = (
        f"On {lowest.count(OURS)} of {len(sets)} sets the estimator with its default settings has "
        f"the lowest RMSE of all {len(METHODS)} methods. Means and standard errors over {number} "
        "splits; coverage is of 90 % intervals."
    )
    tables = [table(name, summaries) for name, summaries in sets.items()]
    metrics = {"sets": sets, "splits": number, "level": LEVEL}
    return run.report(__doc__, metrics, tables, remark=text)


def methods(config: Config) -> dict[str, Callable[[Split, int], Answer]]:
    """All methods; in a smoke test ours is hardly trained."""
    brief = {OURS: partial(fit_ours, epochs=2, num_samples=20)} if config.smoke else {}
    return METHODS | brief


def table(name: str, found: dict[str, Any]) -> Table:
    """One set: a row for each method, a dash where it does not say."""

    def cell(key: str, digits: int, factor: float, scores: dict[str, Any]) -> str:
        mean, error = scores.get(key, {}).values() or (None, None)
        numbers = (number for number in (mean, error) if number is not None)
        return " ± ".join(f"{factor * number:.{digits}f}" for number in numbers) or "–"

    digits = max(2, 2 - math.floor(math.log10(found[OURS]["rmse"]["mean"])))
    columns = [
        ("RMSE", partial(cell, "rmse", digits, 1)),
        ("log-likelihood (nats)", partial(cell, "log_likelihood", 2, 1)),
        ("coverage (%)", partial(cell, "coverage", 1, 100)),
        ("CPU seconds", lambda scores: f"{scores['seconds']['mean']:.1f}"),
    ]
    return tabulate.table(name, found, columns)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
