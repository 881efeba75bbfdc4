"""``pyro-bbb train``: a network from a table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import tyro
from numpy.typing import NDArray

from pyro_bbb.cli.base import WritingCommand, fraction
from pyro_bbb.cli.console import Console
from pyro_bbb.cli.encoding import Column, Missing, encode, learn
from pyro_bbb.cli.errors import BadInput
from pyro_bbb.cli.metrics import by_row, quantile, score
from pyro_bbb.cli.model import About, Estimator, Model
from pyro_bbb.cli.table_io import column, listed, read
from pyro_bbb.cli.tasks import Task, recognise, require_classes, targets
from pyro_bbb.sklearn import BayesianClassifier, BayesianRegressor

_FEWEST = 4  # rows to learn from
_FEWEST_HOLDOUT = 10  # with fewer, the scores would say nothing


@dataclass(frozen=True, kw_only=True)
class Train(WritingCommand):
    """Trains a network on a table and saves it as a folder.

    Text columns are encoded. A part of the rows is held out: by them the model is scored, and finds
    how uncertain an answer may be before it is refused.
    """

    data: tyro.conf.Positional[Path]
    """CSV (with a header) or Parquet file."""
    target: str
    """Name of the column to predict."""
    out: Path
    """Folder for the model."""
    task: Task | None = None
    """What the target is; by default recognised, and said."""
    drop: tuple[str, ...] = ()
    """Columns to leave out."""
    missing: Missing = "refuse"
    """Whether missing values are an error, or filled (numbers by the median) and marked."""
    separator: str = ","
    """Character between the values of a CSV file."""
    hidden: tuple[int, ...] = (50,)
    """Units of each hidden layer."""
    prior: str | None = None
    """Name of the weights' prior; by default that of the estimators."""
    noise: str | None = None
    """Noise of a regression: learned, latent, heteroscedastic, student_t or poisson."""
    epochs: int | None = None
    """Passes over the rows; by default as many as suit the table."""
    held_out: float = 0.1
    """Share of the rows that are held out."""
    answered: float = 0.95
    """Share of the rows held out that the model is to answer; the less certain ones are refused."""
    level: float = 0.9
    """Probability inside the intervals (or sets of classes) that it predicts."""
    seed: int = 0
    """Seed of the split, the training and the predictions."""

    def run(self, console: Console) -> dict[str, Any]:
        """Reads, trains, scores, saves."""
        self.check_out(self.data)
        for option in ("held_out", "answered", "level"):
            fraction(f"--{option.replace('_', '-')}", getattr(self, option))
        table = read(self.data, self.separator)
        y, task = self._target(table, console)
        columns, inputs = self._inputs(table, console)
        train, held_out = self._split(y, task)
        estimator = self._fit(task, inputs[train], y[train], console)
        about = About(
            target=self.target,
            task=task,
            columns=columns,
            missing=self.missing,
            level=self.level,
            rows=len(train),
            held_out=len(held_out),
        )
        judged = held_out if len(held_out) else train
        model = self._judged(Model(estimator, about), inputs[judged], y[judged])
        model.save(self.out)
        return self._report(model, console)

    def _target(self, table: pl.DataFrame, console: Console) -> tuple[NDArray[Any], Task]:
        target = column(table, self.target, "--target")
        task, why = recognise(target)
        if self.task is None:
            console.print(f"{self.target!r} makes this a {task}: {why} (--task says otherwise)")
        task = self.task or task
        y = targets(target, task)
        if task == "classification":
            require_classes(y, self.target)
        return y, task

    def _inputs(self, table: pl.DataFrame, console: Console) -> tuple[list[Column], NDArray[Any]]:
        for name in self.drop:
            column(table, name, "--drop")
        table = table.drop(self.target, *self.drop)
        columns, constant = learn(table, self.missing)
        if constant:
            console.print(f"left out, as they have one value only: {listed(constant)}")
        inputs = encode(columns, table, self.missing)
        console.print(
            f"{len(inputs)} rows; {len(columns)} columns become {inputs.shape[1]} numbers"
        )
        return columns, inputs

    def _split(self, y: NDArray[Any], task: Task) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Rows for training, and rows held out, none of them the only one of its class."""
        order = np.random.default_rng(self.seed).permutation(len(y))
        wanted = round(self.held_out * len(y))
        if task == "classification":  # the first of each class comes first
            first = np.unique(y[order], return_index=True)[1]
            order = np.concatenate([order[first], np.delete(order, first)])
            wanted = min(wanted, len(order) - len(first))
        if len(y) < _FEWEST:
            raise BadInput(f"{self.data} has {len(y)} rows, fewer than the {_FEWEST} to learn from")
        count = len(y) - wanted if wanted >= _FEWEST_HOLDOUT else len(y)
        return order[:count], order[count:]

    def _fit(
        self, task: Task, inputs: NDArray[Any], y: NDArray[Any], console: Console
    ) -> Estimator:
        options: dict[str, Any] = {
            "hidden_sizes": list(self.hidden),
            "epochs": self.epochs,
            "random_state": self.seed,
            "progress": console.shows_progress,
        }
        if self.prior is not None:
            options["prior"] = self.prior
        if self.noise is not None:
            if task == "classification":
                raise BadInput("--noise is an option of regressions, this is a classification")
            options["noise"] = self.noise
        make: Any = BayesianRegressor if task == "regression" else BayesianClassifier
        try:
            estimator: Estimator = make(**options).fit(inputs, y)
        except (ValueError, TypeError) as error:  # an option, or targets that do not fit the noise
            raise BadInput(str(error)) from error
        return estimator

    def _judged(self, model: Model, inputs: NDArray[Any], y: NDArray[Any]) -> Model:
        """The model with its scores, and the threshold above which it refuses."""
        rows = by_row(model.ask(inputs), model.indices(y))
        threshold = quantile(rows["doubt"].numpy(), self.answered)
        scores = score(rows, self.level, threshold)
        return model.knowing(threshold=threshold, scores=scores)

    def _report(self, model: Model, console: Console) -> dict[str, Any]:
        about = model.about
        interrupted = model.estimator.history_.interrupted
        if interrupted:
            console.print("interrupted: what was learned until then is saved")
        judged = f"{about.held_out} rows held out" if about.held_out else "the rows of training"
        console.print(f"scores on {judged}:")
        console.scores(about.scores)
        console.print(f"saved as {self.out}")
        return {
            "model": str(self.out),
            "task": about.task,
            "target": about.target,
            "rows": about.rows,
            "held_out": about.held_out,
            "scores": about.scores,
            "threshold": about.threshold,
            "interrupted": interrupted,
        }
