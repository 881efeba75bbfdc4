# SPDX-License-Identifier: Apache-2.0
"""A trained estimator with the description of its table, saved as one folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from pyro_bbb import persistence
from pyro_bbb._utils.files import loading, require_form
from pyro_bbb._utils.progress import progress_bar
from pyro_bbb.apps.column_encoding import select, with_dates
from pyro_bbb.apps.command_line import BadInput, BadRow, Missing, Reading, Task
from pyro_bbb.apps.csv_format import listed, read_table
from pyro_bbb.evaluation import check
from pyro_bbb.mcmc import Chains
from pyro_bbb.prediction import ClassificationPrediction, RegressionPrediction
from pyro_bbb.sklearn import BayesianClassifier, BayesianRegressor, read_estimator

Estimator: TypeAlias = BayesianRegressor | BayesianClassifier
Prediction: TypeAlias = RegressionPrediction | ClassificationPrediction
ESTIMATORS = {"regression": BayesianRegressor, "classification": BayesianClassifier}
ROWS = 4096  # rows predicted at once
_KEY = "table"  # in the metadata of the save


@dataclass(frozen=True)
class About:
    """Description of a model's table, saved as JSON with the model."""

    target: str  # name of the column that it predicts
    task: Task
    missing: Missing
    level: float  # probability inside of the intervals, or of the sets of classes
    rows: int  # number of rows of training
    held_out: int  # number of rows held out
    answered: float = 0.95  # fraction of those rows that is not refused
    uncertainty: str = "total"  # or "epistemic": the one compared with the threshold
    threshold: float = math.inf  # rows of a larger uncertainty are refused
    scores: dict[str, Any] = field(default_factory=dict)  # of rows held out, or of training rows
    pruned: float = 0.0  # fraction of the weights that were removed
    decimal: str | None = None  # sign of the training file
    missing_values: Sequence[str] = ()  # texts that mean a missing value
    dates: dict[str, str] = field(default_factory=dict)  # columns of dates, and their form
    verdict: str = ""  # on the posterior, by its training rows


@dataclass(frozen=True)
class Model:
    """An estimator and the description of its table."""

    estimator: Estimator
    about: About

    def save(self, folder: Path) -> None:
        """Write the folder atomically."""
        self.estimator.save(folder, metadata={_KEY: asdict(self.about)})

    @classmethod
    def load(cls, folder: Path) -> Model:
        """Load a folder; no code of it is executed."""
        try:
            loaded = read_estimator(folder)
            if _KEY not in loaded.metadata:
                raise BadInput(f"{folder} holds a model that `train` has not made")
            with loading(folder):
                about: Any = loaded.metadata[_KEY]
                require_form(about, About, f"metadata[{_KEY!r}]")
                estimator_type: Any = ESTIMATORS[about["task"]]
                return cls(estimator_type.from_loaded(loaded), About(**about))
        except OSError as error:
            raise BadInput(f"{folder} holds no model: {error}") from error
        except persistence.LoadError as error:
            raise BadInput(str(error)) from error

    @property
    def columns(self) -> dict[str, list[str] | None]:
        """Names of the columns that the estimator takes, with the values of those of text."""
        estimator = self.estimator
        names = estimator.feature_names_in_
        return dict(zip(names, estimator.columns_.categories, strict=True))

    def described(self, **changes: Any) -> Model:
        """Return the same estimator with a changed description."""
        return replace(self, about=replace(self.about, **changes))

    def read(self, options: Reading, *, truth: bool) -> pl.DataFrame:
        """Read a table with the columns of training in the types that they had there."""
        about = self.about
        types = {name: "text" if values else "number" for name, values in self.columns.items()}
        types |= dict.fromkeys(about.dates, "text")
        if truth:
            labels = getattr(self.estimator, "classes_", np.empty(0))
            types[about.target] = "text" if labels.dtype.kind in "UO" else "number"
        usual, missing = about.decimal, about.missing_values
        return read_table(options, types, usual=usual, missing=missing)[0]

    def inputs(self, table: pl.DataFrame, say: Callable[[str], None]) -> pl.DataFrame:
        """Return the columns that the estimator takes; report texts not seen in training."""
        table = with_dates(table, self.about.dates)
        return select(table, self.columns, self.about.missing, say)

    def left_out(self, table: pl.DataFrame) -> list[str]:
        """Return the columns that the estimator does not take, such as identifiers."""
        taken = self.columns.keys() | self.about.dates.keys()
        return [name for name in table.columns if name not in taken]

    def predict(self, inputs: pl.DataFrame, progress: bool = False) -> Iterator[Prediction]:
        """Yield the predictions of all rows, `ROWS` at a time."""
        with progress_bar(len(inputs), unit="row", shown=progress) as bar:
            for start in range(0, len(inputs), ROWS):
                rows = inputs[start : start + ROWS]
                yield self.estimator.posterior_predictive(rows)
                bar.update(len(rows))

    def indices(self, true: NDArray[Any]) -> NDArray[Any]:
        """Return numbers as they are, or the class index of each label."""
        if isinstance(self.estimator, BayesianRegressor):
            return true
        known = {str(label): index for index, label in enumerate(self.estimator.classes_)}
        indices = np.array([known.get(str(label), -1) for label in true])
        if (indices < 0).any():
            row = int(indices.argmin())
            classes = f"none of the classes of training: {listed(list(known))}"
            value = f"column {self.about.target!r} has {str(true[row])!r}"
            raise BadRow(value, row, f", which is {classes}")
        return indices

    def answers(self, prediction: Prediction) -> pl.DataFrame:
        """Return columns: prediction, interval or set, aleatoric, epistemic, refused."""
        about = self.about
        if isinstance(prediction, RegressionPrediction):
            lower, upper = prediction.interval(about.level)
            columns: dict[str, Any] = {
                "prediction": prediction.mean,
                "lower": lower,
                "upper": upper,
                "aleatoric": prediction.aleatoric_std,
                "epistemic": prediction.epistemic_std,
            }
        else:
            classes, probs = self.estimator.classes_, prediction.probs.cpu()
            ordered, indices = probs.sort(-1, descending=True)
            sets = zip(classes[indices.numpy()], set_sizes(ordered, about.level), strict=True)
            columns = {
                "prediction": classes[prediction.label.cpu().numpy()],
                "probability": prediction.confidence,
                "set": ["|".join(map(str, row[:size])) for row, size in sets],
                "aleatoric": prediction.aleatoric,
                "epistemic": prediction.epistemic,
                **{f"p({label})": probs[:, i] for i, label in enumerate(classes)},
            }
        columns["refused"] = uncertainties(prediction)[about.uncertainty] > about.threshold
        tensors = {k: v.reshape(-1).cpu().numpy() for k, v in columns.items() if torch.is_tensor(v)}
        return pl.DataFrame(columns | tensors)

    def verdict(self, inputs: pl.DataFrame, true: NDArray[Any], seed: int) -> str:
        """Return where to trust the band, by `check` on the training rows, without more chains."""
        estimator, y = self.estimator, torch.tensor(self.indices(true))
        posterior = estimator.posterior_
        if posterior.corrected_by_rows_left_out:
            return "Intervals are corrected by training rows, each predicted from all others."
        if isinstance(estimator, BayesianRegressor):
            y = estimator.y_scaling_(y.reshape(len(y), -1).double())
        data = estimator.x_scaling_(torch.tensor(estimator.encode(inputs))), y
        sentence = check(posterior.model, posterior.guide, data, seconds=0, seed=seed).sentence
        words, _, _ = sentence.partition(" Next:")
        return words if isinstance(posterior.guide, Chains) else f"{words} Next: --inference chains"


def uncertainties(prediction: Prediction) -> dict[str, torch.Tensor]:
    """Return scores ``[n]`` by which rows may be refused; of classes 1 - confidence, and nats."""
    if isinstance(prediction, RegressionPrediction):
        return {"total": prediction.std[:, 0], "epistemic": prediction.epistemic_std[:, 0]}
    return {"total": 1 - prediction.confidence, "epistemic": prediction.epistemic}


def set_sizes(ordered: torch.Tensor, level: float) -> torch.Tensor:
    """Return the number of falling probabilities ``[n, classes]`` that add up to the level."""
    return 1 + (ordered.cumsum(-1)[:, :-1] < level).sum(-1)
