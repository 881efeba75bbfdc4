# SPDX-License-Identifier: Apache-2.0
"""Regressors that `sklearn_comparison` compares."""

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import BayesianRidge
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

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
    """The estimator as it comes, by variational inference."""
    options = {"inference": "variational"} | options
    regressor = BayesianRegressor(random_state=seed, **options).fit(split.x, split.y)
    found = regressor.posterior_predictive(split.x_test)
    lower, upper = found.interval(LEVEL)
    log_density = found.log_prob(torch.from_numpy(split.y_test))
    parts = (found.mean[:, 0], log_density, lower[:, 0], upper[:, 0])
    return Answer(*(part.numpy() for part in parts))


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
    """A Gaussian process by its evidence, on some rows of a large set."""
    rows = np.random.default_rng(seed).permutation(len(split.y))[:GP_ROWS]
    part = split._replace(x=split.x[rows], y=split.y[rows])
    lengths = RBF(np.ones(split.x.shape[1]), (1e-2, 1e4))
    kernel = ConstantKernel(1.0, (1e-3, 1e4)) * lengths + WhiteKernel(0.1, (1e-6, 10.0))
    process = GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed)
    return fit_normal(make_pipeline(StandardScaler(), process), part)


def fit_mlp(split: Split, seed: int) -> Answer:
    """The plain network of the same size, trained to the end."""
    network = MLPRegressor(hidden_layer_sizes=(50,), max_iter=2000, random_state=seed)
    scaled = TransformedTargetRegressor(
        make_pipeline(StandardScaler(), network), transformer=StandardScaler()
    )
    mean = scaled.fit(split.x, split.y).predict(split.x_test)
    return Answer(mean, None, None, None)


def fit_forest(split: Split, seed: int) -> Answer:
    """A forest as it comes."""
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
        HistGradientBoostingRegressor(random_state=seed, **each)
        .fit(split.x, split.y)
        .predict(split.x_test)
        for each in options
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
