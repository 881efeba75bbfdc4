# SPDX-License-Identifier: Apache-2.0
"""The estimator of real targets and counts."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.stats import binom
from sklearn.base import RegressorMixin
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from pyro_bbb._utils.context import seeded
from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.pages import read_on
from pyro_bbb._utils.validation import count, probabilities
from pyro_bbb.data import Standardization, standardize
from pyro_bbb.likelihoods import HeteroscedasticGaussian
from pyro_bbb.mcmc import Chains
from pyro_bbb.prediction import RegressionPrediction
from pyro_bbb.sklearn._choices import make_noise
from pyro_bbb.sklearn._estimator import (
    SCALING,
    BayesianEstimator,
    Uncertainty,
    as_json,
    as_random_seed,
    can_learn_on,
    from_json,
    rows_of_weight,
)
from pyro_bbb.sklearn._posterior import Rows

_LARGEST = 1e150  # of targets, as variances have to be finite
_LEVEL = 0.9  # of the intervals that are compared with the training targets
_CHECKED, _DRAWS = 512, 32  # rows compared at most, evenly spread, and networks drawn for them
_FALSE_ALARM = 1e-4
_STEPS = 25  # least steps of a training whose intervals are checked, as in `fit`


@dataclass(eq=False, repr=False, kw_only=True)
class BayesianRegressor(RegressorMixin, BayesianEstimator[RegressionPrediction]):
    """A Bayesian neural network for one or several real targets, or counts.

    Args:
        noise: ``"learned"`` (one standard deviation for all inputs; chains sample it), ``"latent"``
            (the same with a posterior also by a guide), ``"heteroscedastic"`` (it depends on the
            input), ``"student_t"`` (heavy tails), ``"poisson"`` (counts), ``"negative_binomial"``
            (counts that vary more, by a learned dispersion), or a number, the known standard
            deviation in the targets' unit. Or a distribution, its prior, or a likelihood of
            `pyro_bbb.likelihoods`, which are in units of the targets' own standard deviation.
            Outputs of counts are around the log of the mean count.

    Attributes:
        y_scaling_: means and standard deviations of the targets; 0 and 1 for counts.
    """

    noise: Any = "learned"

    _form: ClassVar[dict[str, Any]] = {"y": SCALING, "y_shape": list[int]}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.single_output = True
        tags.target_tags.multi_output = True
        return tags

    @available_if(can_learn_on)
    @locked
    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, sample_weight: Any = None
    ) -> BayesianRegressor:
        """Learn from further rows without the earlier ones: the posterior is their prior.

        Chains and wide networks do not have this method. The first call is a `fit` by a guide, and
        sets the scales of inputs and targets. Rows given twice count as two observations. A learned
        noise becomes its running estimate.

        Args:
            X: inputs, ``[n, features]``.
            y: targets, ``[n]`` or ``[n, targets]``.
            sample_weight: as for `fit`.

        Raises:
            ValueError: as for `fit`.
            TypeError: as for `fit`, or the guide has no Normal marginals to be a prior.
        """
        self._fit(X, y, sample_weight, partial=True)
        return self

    def _fit(self, X: ArrayLike, y: ArrayLike, weight: Any, *, partial: bool = False) -> None:
        self._check_parameters()
        first = not (partial and hasattr(self, "posterior_"))
        used, weight = rows_of_weight(X, weight)
        rows, targets = (values[used] for values in self._checked(X, y, used, reset=first))
        columns = torch.tensor(targets.reshape(len(targets), -1))  # [n, targets]
        likelihood, outputs = None, columns.shape[1]
        if first:
            self.y_scaling_: Standardization
            scaled, self.y_scaling_ = standardize(columns, sample_weight=weight)
            likelihood = make_noise(self.noise, self.y_scaling_.scale)
            if not likelihood.has_unit:  # counts keep their scale
                zeros = torch.zeros(columns.shape[1], dtype=torch.double)
                scaled, self.y_scaling_ = columns, Standardization(zeros, torch.ones_like(zeros))
            self._y_shape = targets.shape[1:]
            outputs *= 1 + isinstance(likelihood, HeteroscedasticGaussian)
        else:
            self._require_shape(targets)
            scaled = self.y_scaling_(columns)
        self._learn(Rows(torch.tensor(rows), scaled, weight), likelihood, outputs, partial)
        self._warn_if_too_narrow(rows, columns)

    def predict(self, X: ArrayLike, return_std: bool = False) -> Any:
        """Return means of the posterior predictive, in the shape of the targets.

        Args:
            X: inputs, ``[n, features]``.
            return_std: whether to return its standard deviations, too.
        """
        if not return_std:
            return self._shaped(*self._summaries(X, "mean"))
        return tuple(map(self._shaped, self._summaries(X, "mean", "std")))

    def predict_uncertainty(self, X: ArrayLike) -> Uncertainty:
        """Return standard deviations by source, in the shape and unit of the targets.

        Their squares add up to that of `predict`.
        """
        deviations = self._summaries(X, "aleatoric_std", "epistemic_std")
        return Uncertainty(*map(self._shaped, deviations))

    def predict_interval(
        self, X: ArrayLike, level: float = 0.9
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return lower and upper ends, in the shape of the targets, of central intervals.

        Args:
            X: inputs, ``[n, features]``.
            level: probability of the posterior predictive inside, in (0, 1), else a ValueError.
        """
        ends = self._by_pass(self.encode(X), lambda p, _: p.interval(level))
        low, high = map(self._shaped, ends)
        return low, high

    def predict_quantiles(
        self, X: ArrayLike, quantiles: Iterable[float] = (0.05, 0.5, 0.95)
    ) -> NDArray[np.float64]:
        """Return quantiles, ``[n, quantiles]`` or ``[n, targets, quantiles]``.

        Args:
            X: inputs, ``[n, features]``.
            quantiles: probabilities of targets below, in (0, 1), else a ValueError.
        """
        levels = probabilities("quantiles", quantiles)
        columns = self._by_pass(self.encode(X), lambda p, _: map(p.quantile, levels))
        return np.stack([self._shaped(column) for column in columns], axis=-1)

    def score_samples(self, X: ArrayLike, y: Any = None) -> NDArray[np.float64]:
        """Return the log-density ``[n]`` of each row's targets, in nats, in their units.

        Args:
            X: inputs, ``[n, features]``.
            y: targets, as for `fit`; their log-densities are added up. By default the medians.
        """
        y = self.predict_quantiles(X, [0.5])[..., 0] if y is None else y
        check_is_fitted(self)
        rows, targets = self._checked(X, y, reset=False)
        self._require_shape(targets)
        return self._log_probs(rows, torch.tensor(targets.reshape(len(targets), -1)))

    def sample_y(
        self, X: ArrayLike, n_samples: int = 1, random_state: Any = 0
    ) -> NDArray[np.float64]:
        """Draw targets from the posterior predictive, each column from one network.

        They are ``[n, n_samples]``, or ``[n, targets, n_samples]``. Of a wide network the rows are
        independent, and each column is of one draw of its scales.
        """
        draws, seed = count("n_samples", n_samples), as_random_seed(random_state)
        mixture = self._predictive(self.encode(X), draws, seed).components
        passes = -(-draws // mixture.batch_shape[0])  # a wide network has few draws of scales
        with seeded(seed):
            samples = mixture.sample((passes,)).flatten(0, 1)[:draws]
        samples = np.moveaxis(samples.cpu().numpy(), 0, -1)  # [n, targets, n_samples]
        return samples if self._y_shape else samples[:, 0]

    def _checked(
        self, X: ArrayLike, y: Any, used: Any = slice(None), *, reset: bool, **options: Any
    ) -> tuple[NDArray[np.float64], NDArray[Any]]:
        options |= {"multi_output": True, "y_numeric": True, "ensure_min_samples": 1 + reset}
        rows, targets = super()._checked(X, y, used, reset=reset, **options)
        targets = targets.astype(np.float64, copy=False)
        size = np.abs(targets).reshape(len(targets), -1)
        top = size.max(0)
        if (bad := (size > _LARGEST) | (reset & (top > 0) & (top < 1 / _LARGEST))).any():
            row, column = np.argwhere(bad)[0]
            raise ValueError(
                f"y must be of size {1 / _LARGEST} to {_LARGEST}, whose squares are finite, got "
                f"{size[row, column]} in row {row}: multiply y by a constant"
            )
        return rows, targets

    def _require_shape(self, targets: NDArray[np.float64]) -> None:
        if targets.shape[1:] != self._y_shape:
            expected = ", ".join(["n", *map(str, self._y_shape)])
            raise ValueError(f"y must have shape [{expected}] as before, got {targets.shape}")

    def _warn_if_too_narrow(self, rows: NDArray[np.float64], y: torch.Tensor) -> None:
        """Warn where intervals miss more of the training targets than chance may."""
        chains, step = isinstance(self.posterior_.guide, Chains), -(-len(rows) // _CHECKED)
        if not chains and len(getattr(self.history_, "steps", ())) < _STEPS:
            return  # also of a wide network, whose intervals are corrected by rows left out
        y, prediction = y[::step], self._predictive(rows[::step], _DRAWS)
        if not isinstance(prediction, RegressionPrediction):
            return
        tail = (1 - _LEVEL) / 2
        with suppress(NotImplementedError):  # a family without mean or distribution function
            y, counts = y.to(prediction.mean.device), prediction.components.support.is_discrete
            at, below = (prediction.cdf(y - gap).cpu() for gap in (0, int(counts)))
            inside = ((at >= tail) & (below <= 1 - tail)).sum(0).numpy()
            if binom.cdf(inside, len(y), _LEVEL).min() * y.shape[1] < _FALSE_ALARM:
                how = "seconds=" if chains else "tol=0 or epochs="
                warnings.warn(
                    f"intervals of level {_LEVEL} hold {inside.min() / len(y):.3g} of the training "
                    "targets: training ended too early, or the noise does not fit. Train longer "
                    f"({how}), or another noise, as 'negative_binomial' for counts. Check "
                    f"them by bbb.check. {read_on('questions/intervals')}",
                    stacklevel=5,  # past the lock
                )

    def _predictive(
        self, rows: NDArray[np.float64], num_samples: int | None = None, seed: int | None = None
    ) -> Any:
        prediction = super()._predictive(rows, num_samples, seed)
        if not self.posterior_.has_unit:
            return prediction
        return prediction.rescaled(self.y_scaling_.mean, self.y_scaling_.scale)

    def _shaped(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return values.reshape(len(values), *self._y_shape)

    def _record(self) -> dict[str, Any]:
        return super()._record() | {"y": as_json(self.y_scaling_), "y_shape": list(self._y_shape)}

    def _restore(self, record: dict[str, Any]) -> None:
        super()._restore(record)
        self._y_shape = tuple(record["y_shape"])
        self.y_scaling_ = from_json(record["y"], list(self._y_shape or (1,)))
