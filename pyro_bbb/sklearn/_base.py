# SPDX-License-Identifier: Apache-2.0
"""Base of the regressor and the classifier for scikit-learn."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from os import PathLike
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from pyro_bbb._utils.files import LoadError, loading, require_form
from pyro_bbb._utils.locking import lock_methods
from pyro_bbb._utils.validation import as_dense, as_number, count
from pyro_bbb.data import Standardization, standardize
from pyro_bbb.likelihoods import Likelihood
from pyro_bbb.mcmc import Chains
from pyro_bbb.persistence import Loaded, load, save
from pyro_bbb.persistence.archive import Json
from pyro_bbb.sklearn._fitting import FittedPosterior, learn, learn_on
from pyro_bbb.sklearn._params import Recipe
from pyro_bbb.training.history import History

Self = TypeVar("Self", bound="BayesianEstimator")
_ROWS = 2**14  # rows of one pass where only summaries of the draws stay in memory
_RECIPE = tuple(Recipe.__dataclass_fields__)
_OF_GUIDES = ("guide", "estimator", "epochs", "lr", "temperature")  # options
_OF_TRAINING = (*_OF_GUIDES, "max_epochs", "n_iter_no_change", "tol", "batch_size")
_KEY = "estimator"  # in the metadata of a save
SCALING = {"mean": list[float], "scale": list[float]}
_FORM = {  # of what an estimator saves there
    "class": str,
    "parameters": dict[str, Any],
    "seed": int,
    "seen": int,
    "features": int,
    "names": list[str] | None,
    "x": SCALING,
}


class Uncertainty(NamedTuple):
    """Uncertainty of each prediction, by its source.

    Attributes:
        aleatoric: what noise, or classes that overlap, leave open even for known weights.
        epistemic: what the weights leave open, which more data would remove.
    """

    aleatoric: NDArray[np.float64]
    epistemic: NDArray[np.float64]


def as_random_seed(random_state: Any) -> int:
    """A seed from whatever scikit-learn takes as ``random_state``."""
    return int(check_random_state(random_state).randint(2**31 - 1))


class BayesianEstimator(BaseEstimator):
    """Base of the estimators: their parameters, training, and keeping what was learned."""

    posterior_: FittedPosterior
    x_scaling_: Standardization

    default_prior: ClassVar[str]  # of variational inference
    inference: str
    num_samples: int
    random_state: Any
    _form: ClassVar[dict[str, Any]] = {}  # of further fields that `_record` adds

    def __init__(self, **parameters: Any) -> None:
        for name, value in parameters.items():
            setattr(self, name, value)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Lock the methods, as scikit-learn's checks change the process's filters of warnings."""
        super().__init_subclass__(**kwargs)
        lock_methods(cls)

    @property
    def history_(self) -> History:
        """The record of the latest training; empty for chains, see ``posterior_.guide``."""
        return self.posterior_.history

    @property
    def n_iter_(self) -> int:
        """Passes over the rows in the latest training; of chains, by those that gave draws."""
        guide = self.posterior_.guide
        if isinstance(guide, Chains):
            return int(guide.num_gradients.sum(1).max())
        return len(self.history_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    # --- training ---

    def _recipe(self) -> Recipe:
        """The parameters, with ``inference="auto"`` resolved where it does not depend on data."""
        count("num_samples", self.num_samples)
        values = {name: getattr(self, name) for name in _RECIPE}
        usual = inspect.signature(type(self).__init__).parameters
        changed = [n for n in _OF_TRAINING if getattr(self, n) != usual[n].default]
        if self.inference == "auto" and changed:
            values["inference"] = "variational"
        if self.inference == "chains" and (unused := [n for n in changed if n in _OF_GUIDES]):
            raise ValueError(
                f"{unused[0]} must stay at its default for inference='chains', which does not use "
                f"it, got {getattr(self, unused[0])!r}; inference='variational' does"
            )
        return Recipe(**values)

    def _learn(
        self,
        X: NDArray[np.float64],
        y: Tensor,
        likelihood: Likelihood,
        outputs: int,
        weight: Tensor | None,
        recipe: Recipe,
    ) -> None:
        """Trains a new network on checked rows, and on targets as the likelihood takes them."""
        self._seed = as_random_seed(self.random_state)
        x, self.x_scaling_ = standardize(torch.tensor(X), sample_weight=weight)
        self.posterior_ = learn(recipe, likelihood, x, y, outputs, self._seed, weight)

    def _learn_on(self, X: NDArray[np.float64], y: Tensor, weight: Tensor | None) -> None:
        """Learns from further checked rows."""
        x = self.x_scaling_(torch.tensor(X))
        self.posterior_ = learn_on(self._recipe(), self.posterior_, x, y, self._seed, weight)

    # --- prediction ---

    def _rows(self, X: ArrayLike) -> NDArray[np.float64]:
        check_is_fitted(self)
        X = as_dense("X", X)
        rows: NDArray[np.float64] = validate_data(self, X, dtype=np.float64, order="C", reset=False)
        return rows

    def _ask(
        self, rows: NDArray[np.float64], num_samples: int | None = None, seed: int | None = None
    ) -> Any:
        """The predictive at checked rows, in the targets' units; by default of the usual draws."""
        x = self.x_scaling_(torch.tensor(rows))
        draws = self.num_samples if num_samples is None else num_samples
        found = self.posterior_.predict(x, draws, self._seed if seed is None else seed)
        return self._with_units(found)

    def _in_passes(self, X: ArrayLike, *wanted: str) -> list[NDArray[np.float64]]:
        """Properties of the predictive at all rows; the draws are kept for some rows at a time."""
        rows = self._rows(X)
        passes = []
        for start in range(0, len(rows), _ROWS):
            try:
                found = self._ask(rows[start : start + _ROWS])
            except ValueError as error:  # it counts rows from the start of the pass
                raise (ValueError(f"from row {start} on, {error}") if start else error) from error
            passes.append([getattr(found, name).cpu().numpy() for name in wanted])
        return [np.concatenate(parts) for parts in zip(*passes, strict=True)]

    def _with_units(self, prediction: Any) -> Any:
        """The prediction in the targets' units."""
        return prediction

    # --- keeping ---

    def save(
        self, path: str | PathLike[str], *, metadata: Mapping[str, Json] | None = None
    ) -> None:
        """Saves the fitted estimator as a folder that `load` reads without running anything.

        Args:
            path: the folder, made if need be. It is one of `pyro_bbb.save`.
            metadata: saved with it, of JSON's types, without the key ``estimator``.

        Raises:
            NotFittedError: it is not fitted.
            TypeError: a parameter is an object, which JSON cannot hold; pickles (joblib) can.
        """
        check_is_fitted(self)
        record: dict[str, Json] = {
            "class": type(self).__name__,
            "parameters": self._json_parameters(),
        }
        record.update(seed=self._seed, seen=self.posterior_.num_seen, **self._record())
        merged = dict(metadata or {}) | {_KEY: record}
        save(path, self.posterior_.model, self.posterior_.guide, metadata=merged)

    @classmethod
    def load(cls: type[Self], path: str | PathLike[str]) -> Self:
        """The estimator that `save` saved; nothing from the files is executed.

        Raises:
            FileNotFoundError: there is nothing saved at that path.
            LoadError: a file is damaged, or of something else.
        """
        loaded = load(path)
        with loading(path):
            return cls.from_loaded(loaded)

    @classmethod
    def from_loaded(cls: type[Self], loaded: Loaded) -> Self:
        """The estimator from what `pyro_bbb.load` returned for its folder."""
        record: Any = loaded.metadata.get(_KEY)
        name = record.get("class") if isinstance(record, dict) else record
        if name != cls.__name__:
            raise LoadError(f"expected a saved {cls.__name__}, got {name!r}")
        with loading(f"metadata[{_KEY!r}]"):
            require_form(record, _FORM | cls._form)
            new = cls(**record["parameters"])
            require_form(new.num_samples, int, "num_samples")
            new._seed = record["seed"]
            new._restore(record)
        new.posterior_ = FittedPosterior(loaded.model, loaded.guide, History(), record["seen"])
        return new

    def _record(self) -> dict[str, Json]:
        """Fitted attributes other than the posterior, for JSON."""
        names = getattr(self, "feature_names_in_", None)
        return {
            "features": self.n_features_in_,
            "names": None if names is None else names.tolist(),
            "x": as_json(self.x_scaling_),
        }

    def _restore(self, record: dict[str, Json]) -> None:
        self.n_features_in_ = record["features"]
        if record["names"] is not None:
            self.feature_names_in_ = np.array(record["names"], dtype=object)
        self.x_scaling_ = from_json(record["x"], [self.n_features_in_])

    def _json_parameters(self) -> dict[str, Json]:
        parameters = self.get_params(deep=False)
        for name, value in parameters.items():
            if isinstance(value, tuple | list | np.ndarray | np.generic):
                value = value.tolist() if hasattr(value, "tolist") else [*map(as_number, value)]
                parameters[name] = value
            plain = (type(None), bool, int, float, str)
            if not all(isinstance(x, plain) for x in (value if type(value) is list else [value])):
                raise TypeError(
                    f"{name} must be a name, a number or None to be saved, got {value!r}; "
                    "joblib.dump keeps objects"
                )
        return parameters


def takes_further_rows(estimator: Any) -> bool:
    """Return whether there is `partial_fit`, for `available_if`; the reason why not is raised."""
    guide = getattr(getattr(estimator, "posterior_", None), "guide", None)
    if estimator.inference == "chains" or isinstance(guide, Chains):
        raise AttributeError(
            "chains have no Normal marginals that could be the prior of further rows: fit all rows "
            "at once, or take inference='variational'"
        )
    return True


def rows_of_weight(
    X: NDArray[np.float64], y: NDArray[Any], sample_weight: Any
) -> tuple[NDArray[np.float64], NDArray[Any], Tensor | None]:
    """Rows of positive weight, with their targets and weights."""
    if sample_weight is None:
        return X, y, None
    weight = _check_sample_weight(sample_weight, X, dtype=np.float64)
    if (weight < 0).any() or not (weight > 0).any():
        wrong = f"{weight.min()} in row {weight.argmin()}" if weight.min() < 0 else "0 in all rows"
        raise ValueError(f"sample_weight must be at least 0, not all 0, got {wrong}")
    rows = weight > 0
    return X[rows], y[rows], torch.tensor(weight[rows])


def as_json(scaling: Standardization) -> dict[str, Json]:
    """Mean and scale for JSON, to the last digit."""
    return {"mean": scaling.mean.tolist(), "scale": scaling.scale.tolist()}


def from_json(record: dict[str, Any], shape: list[int]) -> Standardization:
    """The standardisation, of rows of a shape, of what `as_json` gave."""
    mean, scale = (torch.tensor(record[key], dtype=torch.double) for key in ("mean", "scale"))
    if not list(mean.shape) == list(scale.shape) == shape:
        raise LoadError(f"mean and scale must be of {shape} columns, got {record}")
    return Standardization(mean, scale)
