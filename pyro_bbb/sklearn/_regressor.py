# SPDX-License-Identifier: Apache-2.0
"""The estimator of real targets and counts."""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.stats import binom
from sklearn.base import RegressorMixin
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import validate_data

from pyro_bbb._utils.context import seeded
from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.validation import as_dense, count
from pyro_bbb.data import Standardization, standardize
from pyro_bbb.likelihoods import HeteroscedasticGaussian
from pyro_bbb.mcmc import Chains
from pyro_bbb.prediction import RegressionPrediction
from pyro_bbb.sklearn._base import (
    SCALING,
    BayesianEstimator,
    Uncertainty,
    as_json,
    as_random_seed,
    from_json,
    rows_of_weight,
    takes_further_rows,
)
from pyro_bbb.sklearn._params import Recipe, make_noise

_LARGEST = 1e150  # of targets, as variances have to be finite

_LEVEL = 0.9  # of the intervals that are compared with the training targets
_CHECKED, _DRAWS = 512, 32  # rows compared at most, evenly spread, and networks drawn for them
_FALSE_ALARM = 1e-4
_STEPS = 25  # a training of fewer is a try, and not checked, as by `fit`


class BayesianRegressor(RegressorMixin, BayesianEstimator):
    """A Bayesian neural network for one or several real targets, or counts.

    Args:
        hidden_sizes: numbers of units of the hidden layers, or one number; ``()`` is linear
            regression.
        activation: name, or what makes the module between two layers, such as ``torch.nn.ReLU``.
        prior: prior of the weights, in any form that `pyro_bbb.priors` takes; ``None`` is
            ``"fan_in_normal"`` for a guide, and ``FanInNormal(2.5)`` for chains.
        inference: ``"chains"`` samples the posterior by `pyro_bbb.sample`: its band opens where
            there are no data. ``"variational"`` trains a guide by `pyro_bbb.fit`: fast for any
            size, and too sure between and beyond the data. ``"auto"`` takes chains on a CPU for
            up to 5,000 weights and rows, if the options of training (``guide`` to
            ``temperature``, all but ``noise``) are left at their defaults.
        seconds: the most seconds that chains may take; fewer where they agree before. A result cut
            short by time is not a function of ``random_state``; one cut short by ``max_epochs`` is.
        guide: name of the posterior's family, of `pyro_bbb.guides.GUIDES`, or what makes a guide
            of a model.
        estimator: how gradients are estimated, as in `pyro_bbb.fit`; ``"auto"`` suits the guide.
        noise: ``"learned"`` (one standard deviation for all inputs; chains sample it), ``"latent"``
            (the same with a posterior also by a guide), ``"heteroscedastic"`` (it depends on the
            input), ``"student_t"`` (heavy tails), ``"poisson"`` (counts), ``"negative_binomial"``
            (counts that vary more, by a learned dispersion), or a number, the known standard
            deviation in the targets' unit. Or a distribution, its prior, or a likelihood of
            `pyro_bbb.likelihoods`, which are in units of the targets' own standard deviation.
            Outputs of counts are around the log of the mean count.
        epochs: passes over the rows, at a rate that falls along a cosine. By default training ends
            by itself, as the next three say.
        max_epochs: the most passes over the rows; by default as many as make some 4,000 steps, and
            1,500 gradients of each chain.
        n_iter_no_change: passes over which the negative ELBO is averaged; by default as many as
            make some 200 steps. Once an average is hardly lower than the lowest before, the
            learning rate falls to 0 along a cosine, in as many passes as there were.
        tol: what is hardly lower, as a fraction of all that the average has fallen since the first,
            or since that of constant outputs where the first is worse.
        batch_size: rows per step; by default from 64 for small tables to 1,024.
        lr: learning rate at the start; it falls to 0 in the end.
        temperature: factor of the prior's weight against the data; 1 is Bayes' rule, below 1 the
            posterior is narrower, and small networks fit better.
        num_samples: networks drawn for each prediction.
        device: where to train and predict; by default on the CPU.
        random_state: seed, as everywhere in scikit-learn. Predictions are always by the same
            networks.
        progress: whether to show a progress bar.

    Attributes:
        posterior_: the model, its guide or chains, the record of the training.
        x_scaling_: means and standard deviations of the inputs.
        y_scaling_: those of the targets; 0 and 1 for counts.
        n_features_in_: number of inputs.
        feature_names_in_: their names, where a data frame was given.
    """

    noise: Any
    default_prior = "fan_in_normal"
    _form: ClassVar[dict[str, Any]] = {"y": SCALING, "y_shape": list[int]}

    def __init__(
        self,
        hidden_sizes: Any = (50,),
        *,
        activation: Any = "relu",
        prior: Any = None,
        inference: str = "auto",
        seconds: float = 30.0,
        guide: Any = "softplus_normal",
        estimator: str = "auto",
        noise: Any = "learned",
        epochs: int | None = None,
        max_epochs: int | None = None,
        n_iter_no_change: int | None = None,
        tol: float = 0.02,
        batch_size: int | None = None,
        lr: float = 1e-2,
        temperature: float = 0.5,
        num_samples: int = 100,
        device: Any = None,
        random_state: Any = None,
        progress: bool = False,
    ) -> None:
        super().__init__(
            hidden_sizes=hidden_sizes,
            activation=activation,
            prior=prior,
            inference=inference,
            seconds=seconds,
            guide=guide,
            estimator=estimator,
            noise=noise,
            epochs=epochs,
            max_epochs=max_epochs,
            n_iter_no_change=n_iter_no_change,
            tol=tol,
            batch_size=batch_size,
            lr=lr,
            temperature=temperature,
            num_samples=num_samples,
            device=device,
            random_state=random_state,
            progress=progress,
        )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.single_output = True
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: Any = None) -> BayesianRegressor:
        """Trains a new network; what was learned before is forgotten.

        Args:
            X: inputs, ``[n, features]``, at least two rows.
            y: targets, ``[n]`` or ``[n, targets]``.
            sample_weight: weights ``[n]`` of the rows: one of weight 2 counts as two, one of
                weight 0 is left out.

        Returns:
            The estimator.

        Warns:
            UserWarning: 90 % intervals hold so few of the training targets as a right posterior
                has with probability 1e-4: training ended too early, or the noise does not fit.

        Raises:
            ValueError: data that are not finite or do not fit, or a parameter out of range.
            TypeError: a parameter of another kind.
        """
        self._warn_if_too_narrow(*self._fit(X, y, sample_weight, self._recipe()))
        return self

    def _fit(
        self, X: ArrayLike, y: ArrayLike, sample_weight: Any, recipe: Recipe
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Learn, and return the rows and targets of positive weight."""
        rows, targets, weight = rows_of_weight(*self._checked(X, y, reset=True), sample_weight)
        columns = torch.tensor(targets.reshape(len(targets), -1))  # [n, targets]
        scaled, self.y_scaling_ = standardize(columns, sample_weight=weight)
        likelihood = make_noise(self.noise, self.y_scaling_.scale)
        if not likelihood.has_unit:  # counts stay
            scaled, self.y_scaling_ = columns, _no_scaling(columns.shape[1])
        self._y_shape = targets.shape[1:]
        outputs = columns.shape[1] * (1 + isinstance(likelihood, HeteroscedasticGaussian))
        self._learn(rows, scaled, likelihood, outputs, weight, recipe)
        return rows, targets

    @available_if(takes_further_rows)
    @locked
    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, sample_weight: Any = None
    ) -> BayesianRegressor:
        """Learns from further rows without the earlier ones: the posterior is their prior.

        Chains have no such method. The first call is one of `fit` by a guide, and decides on
        the scales of inputs and targets. Rows given twice count as two observations. A learned
        noise becomes its running estimate.

        Args:
            X: inputs, ``[n, features]``.
            y: targets, ``[n]`` or ``[n, targets]``.
            sample_weight: as for `fit`.

        Returns:
            The estimator.

        Raises:
            ValueError: as for `fit`, or the guide has no Normal marginals to be a prior.
            TypeError: as for `fit`, or likewise.
        """
        if not hasattr(self, "posterior_"):
            recipe = replace(self._recipe(), inference="variational")
            self._warn_if_too_narrow(*self._fit(X, y, sample_weight, recipe))
            return self
        rows, targets, weight = rows_of_weight(*self._checked(X, y, reset=False), sample_weight)
        if targets.shape[1:] != self._y_shape:
            expected = ", ".join(["n", *map(str, self._y_shape)])
            raise ValueError(f"y must have shape [{expected}] as before, got {targets.shape}")
        columns = targets.reshape(len(targets), -1)
        self._learn_on(rows, self.y_scaling_(torch.tensor(columns)), weight)
        self._warn_if_too_narrow(rows, targets)
        return self

    def predict(self, X: ArrayLike, return_std: bool = False) -> Any:
        """Means of the posterior predictive.

        Args:
            X: inputs, ``[n, features]``.
            return_std: whether to return its standard deviations, too.

        Returns:
            Means, in the shape of the targets; or means and standard deviations.
        """
        found = self._in_passes(X, "mean", *(["std"] if return_std else []))
        shaped = tuple(map(self._shaped, found))
        return shaped if return_std else shaped[0]

    def predict_uncertainty(self, X: ArrayLike) -> Uncertainty:
        """Standard deviations by their source; their squares add up to that of `predict`.

        Args:
            X: inputs, ``[n, features]``.

        Returns:
            Aleatoric and epistemic part, each in the shape and unit of the targets.
        """
        parts = self._in_passes(X, "aleatoric_std", "epistemic_std")
        return Uncertainty(*map(self._shaped, parts))

    def predict_interval(
        self, X: ArrayLike, level: float = 0.9
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The central interval that holds a share ``level`` of the posterior predictive.

        Args:
            X: inputs, ``[n, features]``.
            level: probability inside, in (0, 1).

        Returns:
            Lower and upper ends, each in the shape of the targets.

        Raises:
            ValueError: the level is outside (0, 1).
        """
        ends = self.posterior_predictive(X).interval(level)
        low, high = (self._shaped(end.cpu().numpy()) for end in ends)
        return low, high

    def sample_y(
        self, X: ArrayLike, n_samples: int = 1, random_state: Any = 0
    ) -> NDArray[np.float64]:
        """Draws targets from the posterior predictive, each column from one network.

        Args:
            X: inputs, ``[n, features]``.
            n_samples: number of draws.
            random_state: their seed.

        Returns:
            Draws, ``[n, n_samples]``, or ``[n, targets, n_samples]``.
        """
        draws, seed = count("n_samples", n_samples), as_random_seed(random_state)
        mixture = self._ask(self._rows(X), draws, seed).components
        with seeded(seed):
            samples = np.moveaxis(mixture.sample().cpu().numpy(), 0, -1)  # [n, targets, n_samples]
        return samples if self._y_shape else samples[:, 0]

    def posterior_predictive(self, X: ArrayLike) -> RegressionPrediction:
        """The whole posterior predictive, in the targets' units.

        Args:
            X: inputs, ``[n, features]``.

        Returns:
            A mixture over the drawn networks, with intervals, quantiles and log-densities.
        """
        found: RegressionPrediction = self._ask(self._rows(X))
        return found

    def _checked(
        self, X: ArrayLike, y: ArrayLike, *, reset: bool
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        rows, targets = validate_data(
            self,
            as_dense("X", X),
            y,
            reset=reset,
            dtype=np.float64,
            order="C",
            multi_output=True,
            y_numeric=True,
            ensure_min_samples=2 if reset else 1,
        )
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

    def _warn_if_too_narrow(self, rows: NDArray[np.float64], targets: NDArray[np.float64]) -> None:
        """Warn where intervals miss more of the training targets than chance may."""
        step = -(-len(rows) // _CHECKED)
        y = torch.tensor(targets.reshape(len(targets), -1)[::step])  # [n, targets]
        prediction = self._ask(rows[::step], _DRAWS)
        if not isinstance(prediction, RegressionPrediction):
            return
        tail = (1 - _LEVEL) / 2
        with suppress(NotImplementedError):  # a family without mean or distribution function
            y, counts = y.to(prediction.mean.device), prediction.components.support.is_discrete
            at, below = (prediction.cdf(y - one).cpu() for one in (0, int(counts)))
            inside = ((at >= tail) & (below <= 1 - tail)).sum(0).numpy()
            chance = binom.cdf(inside, len(y), _LEVEL).min() * y.shape[1]
            chains = isinstance(self.posterior_.guide, Chains)
            long = chains or len(getattr(self.history_, "steps", ())) >= _STEPS
            if chance < _FALSE_ALARM and long:
                more = "seconds=" if chains else "tol=0 or epochs="
                warnings.warn(
                    f"intervals of level {_LEVEL} hold {inside.min() / len(y):.3g} of the training "
                    "targets: training ended too early, or the noise does not fit. Train longer "
                    f"({more}), or another noise, as 'negative_binomial' for counts; see bbb.check",
                    stacklevel=4,  # past the lock
                )

    def _with_units(self, prediction: Any) -> RegressionPrediction:
        if not self.posterior_.model.likelihood.has_unit:
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


def _no_scaling(columns: int) -> Standardization:
    zeros = torch.zeros(columns, dtype=torch.double)
    return Standardization(zeros, torch.ones_like(zeros))
