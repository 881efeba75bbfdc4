# SPDX-License-Identifier: Apache-2.0
"""A trained model with what it knows of its table: kept as a folder, asked about tables."""

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
from pyro_bbb.cli.encoding import Column, encode, unseen, with_dates
from pyro_bbb.cli.errors import BadInput
from pyro_bbb.cli.options import Missing, ReadingCommand, Task
from pyro_bbb.cli.table_io import column, listed, read
from pyro_bbb.cli.tasks import targets
from pyro_bbb.mcmc import Chains
from pyro_bbb.prediction import ClassificationPrediction, RegressionPrediction
from pyro_bbb.sklearn import BayesianClassifier, BayesianRegressor

Estimator: TypeAlias = BayesianRegressor | BayesianClassifier
ROWS = 4096  # asked about at once
_KEY = "table"  # in the metadata of the save


@dataclass(frozen=True)
class About:
    """Description of a model's table, saved as JSON with the model.

    Scores and threshold are found by the rows held out, or without any by the rows of training.
    """

    target: str  # name of the column that it predicts
    task: Task
    columns: list[Column]  # encodings of the other columns
    missing: Missing
    level: float  # probability inside of the intervals, or of the sets of classes
    rows: int  # number of rows of training
    held_out: int  # number of rows held out
    answered: float = 0.95  # fraction of those rows that is not refused
    uncertainty: str = "total"  # or "epistemic": the one compared with the threshold
    threshold: float = math.inf  # rows of a larger uncertainty are refused
    scores: dict[str, Any] = field(default_factory=dict)
    pruned: float = 0.0  # fraction of the weights that were removed
    decimal: str | None = None  # sign of the training file
    missing_values: Sequence[str] = ()  # texts that mean a missing value
    dates: dict[str, str] = field(default_factory=dict)  # columns of dates, and their form


@dataclass(frozen=True)
class Model:
    """An estimator and what it knows of its table."""

    estimator: Estimator
    about: About

    def save(self, folder: Path) -> None:
        """Writes the folder, whole or not at all."""
        self.estimator.save(folder, metadata={_KEY: asdict(self.about)})

    @classmethod
    def load(cls, folder: Path) -> Model:
        """The model in a folder; nothing of it is executed."""
        try:
            loaded = persistence.load(folder)
            if _KEY not in loaded.metadata:
                raise BadInput(f"{folder} holds a model that `train` has not made")
            with loading(folder):
                return cls._of(loaded, loaded.metadata[_KEY])
        except OSError as error:
            raise BadInput(f"{folder} holds no model: {error}") from error
        except persistence.LoadError as error:
            raise BadInput(str(error)) from error

    @classmethod
    def _of(cls, loaded: persistence.Loaded, about: dict[str, Any]) -> Model:
        require_form(about, About, f"metadata[{_KEY!r}]")
        columns = [Column(**each) for each in about.pop("columns")]
        regresses = about["task"] == "regression"
        if regresses:  # saves without the entry refuse by the epistemic std
            about.setdefault("uncertainty", "epistemic")
        kind: Any = BayesianRegressor if regresses else BayesianClassifier
        estimator = kind.from_loaded(loaded)
        if (width := sum(column.width for column in columns)) != estimator.n_features_in_:
            raise persistence.LoadError(
                f"columns must become {estimator.n_features_in_} numbers, got {width}"
            )
        return cls(estimator, About(columns=columns, **about))

    def read(
        self, options: ReadingCommand, path: Path, say: Callable[[str], None], *, truth: bool
    ) -> pl.DataFrame:
        """Read a table with the columns of training in the types that they had there."""
        about = self.about
        kinds = {each.name: "number" if each.values is None else "text" for each in about.columns}
        kinds |= dict.fromkeys(about.dates, "text")
        if truth:
            labels = getattr(self.estimator, "classes_", np.empty(0))
            kinds[about.target] = "text" if labels.dtype.kind in "UO" else "number"
        return read(path, options, say, kinds, "any", about.decimal, about.missing_values)[0]

    def inputs(self, table: pl.DataFrame, say: Callable[[str], None]) -> NDArray[np.float64]:
        """A table's rows as the network takes them; texts not seen in training are said."""
        table = with_dates(table, self.about.dates)
        inputs = encode(self.about.columns, table, self.about.missing)
        for line in unseen(self.about.columns, table):
            say(line)
        return inputs

    def ask(self, inputs: NDArray[np.float64], progress: bool = False) -> Iterator[Answers]:
        """Predictions of all rows, some thousand at a time."""
        with progress_bar(len(inputs), unit="row", shown=progress) as bar:
            for start in range(0, len(inputs), ROWS):
                rows = inputs[start : start + ROWS]
                yield Answers(self, self.estimator.posterior_predictive(rows))
                bar.update(len(rows))

    def truth(self, table: pl.DataFrame) -> NDArray[Any]:
        """The targets of a table, as `indices` has them."""
        target = column(table, self.about.target, "the target")
        return self.indices(targets(target, self.about.task))

    def indices(self, true: NDArray[Any]) -> NDArray[Any]:
        """Targets: numbers as they are, or for labels the indices of their classes."""
        if isinstance(self.estimator, BayesianRegressor):
            return true
        known = {str(label): index for index, label in enumerate(self.estimator.classes_)}
        found = np.array([known.get(str(label), -1) for label in true])
        if (found < 0).any():
            row = int(found.argmin())
            raise BadInput(
                f"column {self.about.target!r} has {str(true[row])!r} in row {row + 1}, which is "
                f"none of the classes of training: {listed(list(known))}"
            )
        return found

    def knowing(self, **changes: Any) -> Model:
        """The same estimator, that knows something else."""
        return replace(self, about=replace(self.about, **changes))


@dataclass(frozen=True)
class Answers:
    """Predictions of a model for some rows."""

    model: Model
    prediction: Any

    def __len__(self) -> int:
        return len(
            self.prediction.mean if is_regression(self.prediction) else self.prediction.probs
        )

    def refused(self) -> NDArray[np.bool_]:
        """Rows less certain than almost all by which the threshold was chosen."""
        about = self.model.about
        refused: NDArray[np.bool_] = uncertainties(self.prediction)[about.uncertainty] > (
            about.threshold
        )
        return refused

    def table(self) -> pl.DataFrame:
        """As columns: prediction, interval or set, aleatoric, epistemic, refused."""
        parts = _numeric(self) if is_regression(self.prediction) else _labels(self)
        return pl.DataFrame(parts | {"refused": self.refused()})


def posterior_in_words(model: Model) -> str:
    """Describe the inference; of chains their number, and whether they agree."""
    guide = model.estimator.posterior_.guide
    if not isinstance(guide, Chains):
        return f"posterior by variational inference ({type(guide).__name__})"
    chains, draws = guide.diverging.shape
    r_hat, ess = guide.r_hat_of_functions or math.nan, guide.ess_of_functions or math.nan
    words = f"posterior by {chains} chains of {draws} draws"
    return f"{words} (R-hat {r_hat:.3f}, ESS {ess:.0f} of its function)"


def is_regression(prediction: Any) -> bool:
    """Return whether a prediction is of numbers."""
    return isinstance(prediction, RegressionPrediction)


def uncertainties(prediction: Any) -> dict[str, NDArray[np.float64]]:
    """Scores by which rows may be refused, ``[n]`` each.

    Total and epistemic standard deviation, or 1 - confidence and the mutual information (nats).
    """
    if is_regression(prediction):
        pair = prediction.std, prediction.epistemic_std
    else:
        pair = 1 - prediction.confidence, prediction.epistemic
    return dict(zip(("total", "epistemic"), map(_column, pair), strict=True))


def _numeric(answers: Answers) -> dict[str, Any]:
    found: RegressionPrediction = answers.prediction
    lower, upper = found.interval(answers.model.about.level)
    return {
        "prediction": _column(found.mean),
        "lower": _column(lower),
        "upper": _column(upper),
        "aleatoric": _column(found.aleatoric_std),
        "epistemic": _column(found.epistemic_std),
    }


def _labels(answers: Answers) -> dict[str, Any]:
    found: ClassificationPrediction = answers.prediction
    classes = answers.model.estimator.classes_
    level = answers.model.about.level
    sets = ["|".join(str(classes[i]) for i in each) for each in smallest_sets(found.probs, level)]
    return {
        "prediction": classes[found.label.cpu().numpy()],
        "probability": _column(found.confidence),
        "set": sets,
        "aleatoric": _column(found.aleatoric),
        "epistemic": _column(found.epistemic),
        **{f"p({label})": _column(found.probs[:, i]) for i, label in enumerate(classes)},
    }


def smallest_sets(probs: torch.Tensor, level: float) -> list[list[int]]:
    """For each row the fewest classes that together have a probability of ``level``."""
    ordered, indices = probs.sort(-1, descending=True)
    sizes = set_sizes(ordered, level)
    return [row[:size].tolist() for row, size in zip(indices, sizes, strict=True)]


def set_sizes(ordered: torch.Tensor, level: float) -> torch.Tensor:
    """Number of the largest of falling probabilities ``[n, classes]`` that reach the level."""
    return 1 + (ordered.cumsum(-1)[:, :-1] < level).sum(-1)


def _column(values: torch.Tensor) -> NDArray[np.float64]:
    flat: NDArray[np.float64] = values.reshape(len(values)).cpu().numpy()
    return flat
