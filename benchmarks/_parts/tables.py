# SPDX-License-Identifier: Apache-2.0
"""Fits of estimators to tables of several sizes, each a whole fit with default settings."""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, WhiteKernel
from sklearn.neural_network import MLPRegressor

from _parts.budget import Budget
from _parts.isolated_workers import Entry, Make, compare, start_workers
from _parts.timing import Comparison, Take, repeated
from pyro_bbb.sklearn import BayesianRegressor

BOOSTING, OURS = "HistGradientBoostingRegressor", "BayesianRegressor"
MLP, PROCESS = "MLPRegressor", "GaussianProcessRegressor"
MOST_OF_PROCESS, MOST_OF_MLP = 1000, 10_000  # rows; more take minutes


@dataclass(frozen=True)
class Table:
    """A table of ten columns with a nonlinear target and noise."""

    rows: int
    epochs: int | None = None  # of ours
    device: str = "cpu"

    def data(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Inputs and targets."""
        rng = np.random.default_rng(0)
        x = rng.normal(size=(self.rows, 10))
        signal = np.sin(x[:, 0]) * x[:, 1] + 0.3 * x[:, 2] ** 2
        return x, signal + 0.3 * rng.normal(size=self.rows)


def _fits(estimator: Any, table: Table) -> Take:
    x, y = table.data()

    def run() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            estimator.fit(x, y)

    return repeated(run)


def _ours(table: Table) -> Take:
    return _fits(BayesianRegressor(epochs=table.epochs, random_state=0), table)


def _boosting(table: Table) -> Take:
    return _fits(HistGradientBoostingRegressor(random_state=0), table)


def _mlp(table: Table) -> Take:
    return _fits(MLPRegressor(hidden_layer_sizes=(50,), random_state=0), table)


def _process(table: Table) -> Take:
    kernel = RBF(np.ones(10)) + WhiteKernel()
    return _fits(GaussianProcessRegressor(kernel, normalize_y=True, random_state=0), table)


METHODS: dict[str, Make] = {BOOSTING: _boosting, OURS: _ours, MLP: _mlp, PROCESS: _process}
LIMITS = {MLP: MOST_OF_MLP, PROCESS: MOST_OF_PROCESS}


def tables(budget: Budget, device: str) -> list[Comparison]:
    """Time fits, each method in a process of its own."""
    found = []
    with start_workers(METHODS, one_process=budget.one_process) as workers:
        for table in (Table(rows, budget.table_epochs) for rows in budget.table_rows):
            names = [name for name in METHODS if table.rows <= LIMITS.get(name, table.rows)]
            entries = {name: Entry(name, table) for name in names}
            limits = {"seconds": 0.0, "min_rounds": budget.small_rounds, "warmup": 1}
            rounds, absent = compare(entries, workers, **limits)
            title = f"a fit of {table.rows} rows, 10 columns"
            found.append(Comparison("tables", title, BOOSTING, rounds, absent))
    return found
