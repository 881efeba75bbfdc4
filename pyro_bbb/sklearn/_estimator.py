# SPDX-License-Identifier: Apache-2.0
"""Base of the regressor and the classifier: parameters, learning, prediction, saving.

The parameters are the fields of a dataclass, whose constructor stores every argument as it is.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    _check_feature_names,
    _check_n_features,
    _check_sample_weight,
    check_array,
    check_is_fitted,
    check_X_y,
)
from torch import Tensor

from pyro_bbb import guides
from pyro_bbb._utils.files import LoadError, loading, require_form
from pyro_bbb._utils.locking import lock_methods
from pyro_bbb._utils.validation import (
    as_dense,
    as_number,
    at_least_zero,
    count,
    one_of,
    positive,
    probability,
)
from pyro_bbb.data import Standardization, standardize
from pyro_bbb.estimators import ESTIMATORS
from pyro_bbb.likelihoods import Likelihood
from pyro_bbb.persistence import Loaded, load
from pyro_bbb.persistence.archive import Json, kind_of, read
from pyro_bbb.sklearn._choices import ACTIVATIONS, hidden_layers, named
from pyro_bbb.sklearn._columns import ColumnEncoding, as_codes, find_categories
from pyro_bbb.sklearn._posterior import FittedPosterior, Rows, learn, learn_on, on_cpu
from pyro_bbb.sklearn._wide_posterior import WidePosterior
from pyro_bbb.training.history import History

Predictive = TypeVar("Predictive")
_ROWS = 2**14  # rows of one pass of predictions; only summaries of their draws are kept
_NUMBERS = {"dtype": np.float64, "order": "C", "ensure_all_finite": False}  # of checked inputs
# options of training a guide, without use for chains
_OF_GUIDES = ("guide", "estimator", "epochs", "lr", "temperature", "early_stopping")
_OF_TRAINING = (*_OF_GUIDES, "max_epochs", "n_iter_no_change", "tol", "batch_size")
_KEY = "estimator"  # of the estimator's record in the metadata of a save
SCALING = {"mean": list[float], "scale": list[float]}
_FORM = {
    "class": str,
    "parameters": dict[str, Any],
    "seed": int,
    "seen": float,  # weights of rows add up to any number
    "sharpness": float,
    "features": int,
    "names": list[str] | None,
    "columns": ColumnEncoding,
    "x": SCALING,
}


class Uncertainty(NamedTuple):
    """Uncertainty of each prediction, by its source.

    Attributes:
        aleatoric: uncertainty from noise, or overlapping classes, even for known weights.
        epistemic: uncertainty about the weights, which more data would remove.
    """

    aleatoric: NDArray[np.float64]
    epistemic: NDArray[np.float64]


@dataclass(eq=False, repr=False)
@lock_methods
class BayesianEstimator(BaseEstimator, Generic[Predictive]):
    """Parameters and attributes that the regressor and the classifier share.

    Args:
        hidden_sizes: units of the hidden layers, or one number; ``()`` is a linear model.
        activation: name, or a function that makes a module, such as ``torch.nn.ReLU``.
        prior: prior of the weights, in any form that `pyro_bbb.priors` takes. ``None`` is
            `pyro_bbb.priors.default_prior` for a guide, and ``FanInNormal(2.5)`` for chains.
        inference: ``"wide"`` integrates an infinitely wide network in closed form, of regressions
            with learned noise: two hidden layers of erf units beside a linear map, the scales of
            prior and noise sampled by their evidence, intervals corrected by training rows left
            out one by one and in blocks. ``"chains"`` samples the posterior by
            `pyro_bbb.sample`: its band opens where there are no data. ``"variational"`` trains a
            guide by `pyro_bbb.fit`: fast for any size, and too certain between and beyond the
            data. ``"auto"`` takes ``"wide"`` where it can, if all options of network, prior, guide
            and training are at their defaults; else chains on a CPU for up to 5,000 weights and
            rows, if the options of training are; else a guide. A classifier's chains are followed
            by a look at rows left out, which choose the sharpness of its probabilities, or a power
            to which the likelihood is raised in further chains.
        seconds: limit of the chains' time; they stop earlier where they agree. Further chains of
            a classifier have 30 % of it. A result that time ends is not a function of
            ``random_state``.
        guide: name of the posterior's family, of `pyro_bbb.guides.GUIDES`, or a function from a
            model to a guide.
        estimator: estimator of the gradients, as in `pyro_bbb.fit`; ``"auto"`` suits the guide.
        epochs: passes over the rows, at a rate that falls along a cosine. By default training ends
            at a plateau, which the next three describe.
        max_epochs: limit of the passes over the rows; by default about 4,000 steps, and 1,500
            gradients of each chain, or 1,000 and 400 of a classifier's.
        n_iter_no_change: passes over which the negative ELBO is averaged; by default about 200
            steps. Once an average is hardly lower than the lowest before, the learning rate falls
            to 0 along a cosine, in as many passes as have gone before.
        tol: largest decrease that counts as hardly lower, as a fraction of the total decrease
            since the first average, or since that of constant outputs where the first is worse.
        early_stopping: whether training of a guide ends once rows held out are not better predicted
            for ``n_iter_no_change`` passes, with the weights of the best pass.
        validation_fraction: fraction of the rows held out for that.
        batch_size: rows per step; by default from 64 for small tables to 1,024.
        lr: learning rate at the start; it falls to 0 in the end.
        temperature: factor of the prior's weight against the data. 1, the default, is Bayes' rule;
            below 1 the posterior is narrower, as if each row had been seen several times.
        categorical_features: columns of categories: ``"from_dtype"`` (those of dtype category in
            pandas, Categorical or Enum in polars), ``None``, names or indices, or a boolean mask.
            Each category becomes a 0/1 column, and a missing value is one; a category not seen in
            training counts as missing. Other columns hold numbers, of which missing ones (NaN,
            None, NA) become the training median, and are marked in a 0/1 column if there were
            some in training.
        num_samples: networks drawn for each prediction.
        device: where to train and predict; by default on the CPU.
        n_jobs: processor threads of training and prediction; -1 takes all. By default one for
            networks of less than 65,536 weights, where it is fastest, else as many as torch's.
        random_state: seed; all predictions are by the same networks.
        progress: whether to show a progress bar.

    Attributes:
        posterior_: the model, its guide or chains, the record of the training; or a wide network.
        columns_: encoding of the inputs' columns as numbers.
        x_scaling_: means and standard deviations of the encoded inputs.
        n_features_in_: number of inputs.
        feature_names_in_: their names, where a data frame was given.
    """

    hidden_sizes: Any = (50,)
    _: KW_ONLY
    activation: Any = "relu"
    prior: Any = None
    inference: str = "auto"
    seconds: float = 30.0
    guide: Any = "softplus_normal"
    estimator: str = "auto"
    epochs: int | None = None
    max_epochs: int | None = None
    n_iter_no_change: int | None = None
    tol: float = 0.02
    early_stopping: bool = False
    validation_fraction: float = 0.1
    batch_size: int | None = None
    lr: float = 1e-2
    temperature: float = 1.0
    categorical_features: Any = "from_dtype"
    num_samples: int = 100
    device: Any = None
    n_jobs: int | None = None
    random_state: Any = None
    progress: bool = False

    _form: ClassVar[dict[str, Any]] = {}  # of further fields that `_record` adds

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Lock the public methods, and add the shared parameters to the docstring's sections."""
        super().__init_subclass__(**kwargs)
        lock_methods(cls)  # scikit-learn's checks change the process's filters of warnings
        text = inspect.cleandoc(cls.__doc__ or "")
        shared = inspect.cleandoc(BayesianEstimator.__doc__ or "").split("\n\n", 1)[1]
        for section in shared.split("\n\n"):  # both have "Args:" and "Attributes:"
            title, entries = section.split("\n", 1)
            text = text.replace(f"\n{title}\n", f"\n{title}\n{entries}\n")
        cls.__doc__ = text

    @property
    def history_(self) -> History:
        """The record of the latest training; empty for chains, see ``posterior_.guide``."""
        return self.posterior_.history

    @property
    def n_iter_(self) -> int:
        """Passes over the rows in the latest training; of chains those of the longest, or 1."""
        return int(self.posterior_.num_passes)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = tags.input_tags.allow_nan = tags.input_tags.categorical = True
        return tags

    # --- learning ---

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: Any = None) -> Self:
        """Train a new network; an earlier fit is replaced.

        Args:
            X: inputs, ``[n, features]``: an array, or a data frame of pandas or polars.
            y: labels of any kind ``[n]``; targets ``[n]`` or ``[n, targets]``.
            sample_weight: weights ``[n]`` of the rows: one of weight 2 counts as two, one of
                weight 0 is left out. A wide network takes them relative to a usual one.

        Returns:
            The estimator.

        Warns:
            UserWarning: of a regression, 90 % intervals hold so few of the training targets as a
                right posterior has with probability 1e-4: training ended too early, or the noise
                does not fit.

        Raises:
            ValueError: data that are infinite or do not fit, a single class, or a parameter out
                of range.
            TypeError: a parameter of another kind.
        """
        self._fit(X, y, sample_weight)
        return self

    def changed_training_options(self) -> list[str]:
        """Return the options of training a guide that differ from their defaults."""
        defaults = {field.name: field.default for field in fields(self)}
        return [name for name in _OF_TRAINING if getattr(self, name) != defaults[name]]

    def changed_for_wide(self) -> list[str]:
        """Return the options that ``inference="wide"`` does not take."""
        network = {"hidden_sizes": (50,), "activation": "relu", "prior": None, "noise": "learned"}
        changed = [k for k, usual in network.items() if not equals(getattr(self, k, None), usual)]
        return changed + self.changed_training_options() + ["device"] * (not on_cpu(self))

    def _check_parameters(self) -> None:
        """Raise an error for a parameter that is out of range or of another kind."""
        count("num_samples", self.num_samples)
        hidden_layers(self.hidden_sizes)
        named("activation", self.activation, ACTIVATIONS)
        named("guide", self.guide, guides.GUIDES)
        one_of("inference", self.inference, ("auto", "wide", "chains", "variational"))
        one_of("estimator", self.estimator, ["auto", *ESTIMATORS])
        for name in ("epochs", "max_epochs", "n_iter_no_change", "batch_size"):
            if (value := getattr(self, name)) is not None:
                count(name, value)
        if self.n_jobs not in (None, -1):
            count("n_jobs", self.n_jobs)
        at_least_zero("tol", self.tol)
        for name in ("seconds", "lr", "temperature"):
            positive(name, getattr(self, name))
        probability("validation_fraction", self.validation_fraction)
        unused = []
        if self.inference == "chains":
            unused = [name for name in self.changed_training_options() if name in _OF_GUIDES]
        elif self.inference == "wide":
            unused = self.changed_for_wide()
        if unused and not hasattr(self, unused[0]):
            raise ValueError("inference must not be 'wide' for classes, take 'chains' or 'auto'")
        if unused:
            got = repr(getattr(self, unused[0]))
            raise ValueError(
                f"{unused[0]} must stay at its default for inference={self.inference!r}, which "
                f"does not use it, got {got}; inference='variational' does"
            )

    def _learn(
        self, rows: Rows, likelihood: Likelihood | None, outputs: int, by_guide: bool
    ) -> None:
        """Learn from checked rows: a new network, or without a likelihood on from further rows."""
        if likelihood is not None:
            self._seed = as_random_seed(self.random_state)
            self.x_scaling_: Standardization
            x, self.x_scaling_ = standardize(rows.x, sample_weight=rows.weight)
            learned = learn(
                self, likelihood, replace(rows, x=x), outputs, self._seed, by_guide=by_guide
            )
        else:
            rows = replace(rows, x=self.x_scaling_(rows.x))
            learned = learn_on(self, self.posterior_, rows, self._seed)
        self.posterior_: Any = learned  # a FittedPosterior or a WidePosterior

    # --- prediction ---

    def posterior_predictive(self, X: ArrayLike) -> Predictive:
        """Return the whole posterior predictive: a mixture over the drawn networks.

        Args:
            X: inputs, ``[n, features]``.

        Returns:
            A prediction in the targets' units, or of the classes as in ``classes_``.
        """
        return self._predictive(self.encode(X))

    def _checked(
        self, X: ArrayLike, y: Any, used: Any = slice(None), *, reset: bool, **options: Any
    ) -> tuple[NDArray[np.float64], NDArray[Any]]:
        """Return checked rows as `encode` returns them, and their targets.

        With ``reset`` the rows ``used``, of positive weight, decide on the encoding.
        """
        X = as_dense("X", X)
        _check_feature_names(self, X, reset=reset)
        choice = self.categorical_features
        categories = find_categories(X, choice, used) if reset else self.columns_.categories
        codes, y = check_X_y(as_codes(X, categories), y, estimator=self, **_NUMBERS, **options)
        self._check_columns(codes, reset=reset)
        if reset:
            self.columns_: ColumnEncoding = ColumnEncoding.learn(codes[used], categories)
        return self.columns_(codes), y

    def _check_columns(self, codes: NDArray[np.float64], *, reset: bool) -> None:
        """Raise an error for a wrong number of columns or an infinite value."""
        _check_n_features(self, codes, reset=reset)
        if (infinite := np.isinf(codes)).any():
            row, column = np.argwhere(infinite)[0]
            name = getattr(self, "feature_names_in_", range(codes.shape[1]))[column]
            raise ValueError(
                f"column {name!r} of X has {codes[row, column]} in row {row}: correct it, or set "
                "it to NaN, which is a missing value"
            )

    def encode(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return inputs as the numbers ``[n, columns]`` of ``columns_``; the network's are scaled.

        Args:
            X: inputs, ``[n, features]``.
        """
        check_is_fitted(self)
        X = as_dense("X", X)
        _check_feature_names(self, X, reset=False)
        codes = as_codes(X, self.columns_.categories)
        codes = check_array(codes, input_name="X", estimator=self, **_NUMBERS)
        self._check_columns(codes, reset=False)
        return self.columns_(codes)

    def _predictive(
        self, rows: NDArray[np.float64], num_samples: int | None = None, seed: int | None = None
    ) -> Any:
        """Return the posterior predictive of checked rows, in the network's units."""
        x = self.x_scaling_(torch.tensor(rows))
        draws = self.num_samples if num_samples is None else num_samples
        seed = self._seed if seed is None else seed
        return self.posterior_.predict(x, draws, seed, self.n_jobs)

    def _summaries(self, X: ArrayLike, *names: str) -> list[NDArray[np.float64]]:
        """Return properties of the predictive."""
        return self._by_pass(self.encode(X), lambda p, _: [getattr(p, name) for name in names])

    def _by_pass(
        self, rows: NDArray[np.float64], summarise: Callable[[Any, slice], Iterable[Tensor]]
    ) -> list[NDArray[np.float64]]:
        """Return summaries of the predictive, computed for some rows at a time."""
        passes = []
        for start in range(0, len(rows), _ROWS):
            part = slice(start, start + _ROWS)
            try:
                prediction = self._predictive(rows[part])
            except ValueError as error:  # it counts rows from the start of the pass
                raise (ValueError(f"from row {start} on, {error}") if start else error) from error
            passes.append([summary.cpu().numpy() for summary in summarise(prediction, part)])
        return list(map(np.concatenate, zip(*passes, strict=True)))

    def _log_probs(self, rows: NDArray[np.float64], y: Tensor) -> NDArray[np.float64]:
        """Return the log-probabilities of targets under the predictive of checked rows."""
        device = self.device or "cpu"
        return self._by_pass(rows, lambda p, part: [p.log_prob(y[part].to(device))])[0]

    # --- saving ---

    def save(
        self, path: str | PathLike[str], *, metadata: Mapping[str, Json] | None = None
    ) -> None:
        """Save the fitted estimator as a folder, created if necessary.

        Args:
            path: the folder; `pyro_bbb.load` reads that of a guide or chains, too.
            metadata: saved with it, of JSON's types, without the key ``estimator``.

        Raises:
            NotFittedError: it is not fitted.
            TypeError: a parameter is an object, which JSON cannot hold; pickles (joblib) can.
            ValueError: a parameter was set to a value that `fit` refuses.
        """
        check_is_fitted(self)
        self._check_parameters()
        self.posterior_.save(path, dict(metadata or {}) | {_KEY: self._record()})

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Return the estimator that `save` wrote; nothing from the files is executed.

        Raises:
            FileNotFoundError: nothing is saved at that path.
            LoadError: a file is damaged, or holds something else.
        """
        loaded = read_estimator(path)
        with loading(path):
            return cls.from_loaded(loaded)

    @classmethod
    def from_loaded(cls, loaded: Loaded | LoadedWide) -> Self:
        """Return the estimator of a folder that `read_estimator` has read."""
        record: Any = loaded.metadata.get(_KEY)
        name = record.get("class") if isinstance(record, dict) else record
        if name != cls.__name__:
            raise LoadError(f"expected a saved {cls.__name__}, got {name!r}")
        with loading(f"metadata[{_KEY!r}]"):
            require_form(record, _FORM | cls._form)
            new = cls(**record["parameters"])
            new._check_parameters()
            new._restore(record)
        if isinstance(loaded, Loaded):
            numbers = record["seen"], record["sharpness"]
            new.posterior_ = FittedPosterior(loaded.model, loaded.guide, History(), *numbers)
        else:
            size, targets = len(new.columns_.is_number), math.prod(record.get("y_shape", [0]))
            wide = WidePosterior.from_tensors(loaded.tensors, size, record["seen"])
            if len(wide.outputs) != targets:
                raise LoadError(f"{len(wide.outputs)} wide networks do not fit {record}")
            new.posterior_ = wide
        return new

    def _record(self) -> dict[str, Json]:
        """Return parameters and fitted attributes other than the posterior, as JSON."""
        plain = (type(None), bool, int, float, str)
        parameters = self.get_params(deep=False)
        for name, value in parameters.items():
            several = isinstance(value, tuple | list | np.ndarray)
            items = [*map(as_number, value if several else [value])]
            if not all(isinstance(item, plain) for item in items):
                raise TypeError(
                    f"{name} must be a name, a number or None to be saved, got {value!r}; "
                    "joblib.dump keeps objects"
                )
            parameters[name] = items if several else items[0]
        names = getattr(self, "feature_names_in_", None)
        return {
            "class": type(self).__name__,
            "parameters": parameters,
            "seed": self._seed,
            "seen": self.posterior_.num_seen,
            "sharpness": self.posterior_.sharpness,
            "features": self.n_features_in_,
            "names": None if names is None else names.tolist(),
            "columns": asdict(self.columns_),
            "x": as_json(self.x_scaling_),
        }

    def _restore(self, record: dict[str, Any]) -> None:
        self._seed = record["seed"]
        self.n_features_in_: int = record["features"]
        if record["names"] is not None:
            self.feature_names_in_: NDArray[Any] = np.array(record["names"], dtype=object)
        size = self.n_features_in_
        self.columns_ = ColumnEncoding(**record["columns"])
        if any(len(values) != size for values in asdict(self.columns_).values()):
            raise LoadError(f"columns must be {size}, got {record['columns']}")
        self.x_scaling_ = from_json(record["x"], [len(self.columns_.is_number)])


@dataclass(frozen=True)
class LoadedWide:
    """Content of the folder of a wide network."""

    metadata: dict[str, Json]
    tensors: dict[str, Tensor]


def read_estimator(path: str | PathLike[str]) -> Loaded | LoadedWide:
    """Return the content of a folder that `BayesianEstimator.save` wrote."""
    if kind_of(Path(path)) != WidePosterior.saved_kind:
        return load(path)
    spec, tensors = read(Path(path), WidePosterior.saved_kind)
    with loading(path):
        require_form(spec, {"metadata": dict[str, Any]})
    return LoadedWide(spec["metadata"], tensors)


def equals(value: Any, default: Any) -> bool:
    """Return whether an option has its default value; a number stands for one hidden layer."""
    if isinstance(default, tuple):
        return bool(np.array_equal(np.atleast_1d(np.asarray(value, dtype=object)), default))
    return type(value) is type(default) and value == default


def can_learn_on(estimator: Any) -> bool:
    """Return True for `available_if`, or raise the reason why `partial_fit` is unavailable."""
    learns_on = getattr(estimator, "posterior_", FittedPosterior).learns_on
    if estimator.inference in ("chains", "wide") or not learns_on:
        raise AttributeError(
            "chains and wide networks have no Normal marginals that could be the prior of further "
            "rows: fit all rows at once, or take inference='variational'"
        )
    return True


def as_random_seed(random_state: Any) -> int:
    """Return a seed from any value that scikit-learn takes as ``random_state``."""
    return int(check_random_state(random_state).randint(2**31 - 1))


def rows_of_weight(X: Any, sample_weight: Any) -> tuple[Any, Tensor | None]:
    """Return a mask or slice of the rows of positive weight, and their weights."""
    if sample_weight is None:
        return slice(None), None
    weight = _check_sample_weight(sample_weight, X, dtype=np.float64)
    if (weight < 0).any() or not (weight > 0).any():
        wrong = f"{weight.min()} in row {weight.argmin()}" if weight.min() < 0 else "0 in all rows"
        raise ValueError(f"sample_weight must be at least 0, not all 0, got {wrong}")
    return weight > 0, torch.tensor(weight[weight > 0])


def as_json(scaling: Standardization) -> dict[str, Json]:
    return {"mean": scaling.mean.tolist(), "scale": scaling.scale.tolist()}


def from_json(record: dict[str, Any], shape: list[int]) -> Standardization:
    """Return the standardisation, of rows of a shape, from the result of `as_json`."""
    mean, scale = (torch.tensor(record[key], dtype=torch.double) for key in ("mean", "scale"))
    if not list(mean.shape) == list(scale.shape) == shape:
        raise LoadError(f"mean and scale must be of {shape} columns, got {record}")
    return Standardization(mean, scale)
