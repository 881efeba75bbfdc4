# SPDX-License-Identifier: Apache-2.0
"""The estimator of classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets, unique_labels
from sklearn.utils.validation import validate_data

from pyro_bbb._utils.context import seeded
from pyro_bbb._utils.files import LoadError
from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.validation import as_dense, count
from pyro_bbb.likelihoods import Categorical
from pyro_bbb.prediction import ClassificationPrediction
from pyro_bbb.sklearn._base import (
    BayesianEstimator,
    Uncertainty,
    as_random_seed,
    rows_of_weight,
    takes_further_rows,
)
from pyro_bbb.sklearn._params import Recipe


class BayesianClassifier(ClassifierMixin, BayesianEstimator):
    """A Bayesian neural network for classes, two or more.

    Args:
        hidden_sizes: numbers of units of the hidden layers, or one number; ``()`` is logistic
            regression.
        activation: name, or what makes the module between two layers, such as ``torch.nn.ReLU``.
        prior: prior of the weights, in any form that `pyro_bbb.priors` takes; ``None`` is
            ``"normal"`` for a guide, and ``FanInNormal(2.5)`` for chains.
        inference: how the posterior is found, as in `BayesianRegressor`; by default by a guide.
        seconds: the most seconds that chains may take.
        guide: name of the posterior's family, of `pyro_bbb.guides.GUIDES`, or what makes a guide
            of a model.
        estimator: how gradients are estimated, as in `pyro_bbb.fit`; ``"auto"`` suits the guide.
        epochs: passes over the rows, at a rate that falls along a cosine. By default training ends
            by itself, as the next three say.
        max_epochs: the most passes over the rows; by default as many as make some 4,000 steps.
        n_iter_no_change: passes over which the negative ELBO is averaged; by default as many as
            make some 200 steps. Once an average is hardly lower than the lowest before, the
            learning rate falls to 0 along a cosine, in as many passes as there were.
        tol: what is hardly lower, as a fraction of all that the average has fallen since the first,
            or since that of constant outputs where the first is worse.
        batch_size: rows per step; by default from 64 for small tables to 1,024.
        lr: learning rate at the start; it falls to 0 in the end.
        temperature: factor of the prior's weight against the data; 1 is Bayes' rule, below 1 the
            posterior is narrower, and small networks fit better.
        class_weight: factors of the rows' weights by class: a dict (1 where it lacks a class), or
            ``"balanced"``, which gives every class the same total. Probabilities are then those
            of such classes, not of the classes' frequencies in the data.
        num_samples: networks drawn for each prediction.
        device: where to train and predict; by default on the CPU.
        random_state: seed, as everywhere in scikit-learn. Predictions are always by the same
            networks.
        progress: whether to show a progress bar.

    Attributes:
        classes_: the labels.
        posterior_: the model, its guide or chains, the record of the training.
        x_scaling_: means and standard deviations of the inputs.
        n_features_in_: number of inputs.
        feature_names_in_: their names, where a data frame was given.
    """

    default_prior = "normal"
    _form: ClassVar[dict[str, Any]] = {
        "classes": list[str] | list[int] | list[float] | list[bool],
    }

    def __init__(
        self,
        hidden_sizes: Any = (50,),
        *,
        activation: Any = "relu",
        prior: Any = None,
        inference: str = "variational",
        seconds: float = 30.0,
        guide: Any = "softplus_normal",
        estimator: str = "auto",
        epochs: int | None = None,
        max_epochs: int | None = None,
        n_iter_no_change: int | None = None,
        tol: float = 0.02,
        batch_size: int | None = None,
        lr: float = 1e-2,
        temperature: float = 1.0,
        class_weight: Any = None,
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
            epochs=epochs,
            max_epochs=max_epochs,
            n_iter_no_change=n_iter_no_change,
            tol=tol,
            batch_size=batch_size,
            lr=lr,
            temperature=temperature,
            class_weight=class_weight,
            num_samples=num_samples,
            device=device,
            random_state=random_state,
            progress=progress,
        )

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: Any = None) -> BayesianClassifier:
        """Trains a new network; what was learned before is forgotten.

        Args:
            X: inputs, ``[n, features]``.
            y: labels of any kind, ``[n]``.
            sample_weight: weights ``[n]`` of the rows: one of weight 2 counts as two, one of
                weight 0 is left out.

        Returns:
            The estimator.

        Raises:
            ValueError: data that are not finite or do not fit, a single class, or a parameter out
                of range.
            TypeError: a parameter of another kind.
        """
        return self._fit(X, y, None, sample_weight, self._recipe())

    @available_if(takes_further_rows)
    @locked
    def partial_fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        classes: ArrayLike | None = None,
        sample_weight: Any = None,
    ) -> BayesianClassifier:
        """Learns from further rows without the earlier ones: the posterior is their prior.

        Chains have no such method. The first call is one of `fit` by a guide, and decides on
        the scales of the inputs. Rows given twice count as two observations.

        Args:
            X: inputs, ``[n, features]``.
            y: labels, ``[n]``.
            classes: all labels that may ever come, for the first call; by default those in it.
            sample_weight: as for `fit`.

        Returns:
            The estimator.

        Raises:
            ValueError: as for `fit`, an unknown label, other classes than before, the guide has
                no Normal marginals to be a prior, or ``class_weight`` is ``"balanced"``.
            TypeError: as for `fit`, or likewise.
        """
        if isinstance(self.class_weight, str):
            raise ValueError(
                "class_weight must be None or a dict for partial_fit, which does not see all rows, "
                f"got {self.class_weight!r}; or give weights of the rows as sample_weight"
            )
        if not hasattr(self, "posterior_"):
            recipe = replace(self._recipe(), inference="variational")
            return self._fit(X, y, classes, sample_weight, recipe)
        if classes is not None and not np.array_equal(unique_labels(classes), self.classes_):
            raise ValueError(f"classes must be {self.classes_} as before, got {classes}")
        X = as_dense("X", X)
        rows, labels = validate_data(self, X, y, dtype=np.float64, order="C", reset=False)
        rows, labels, weight = rows_of_weight(rows, labels, sample_weight)
        self._learn_on(rows, (codes := self._encoded(labels)), self._by_class(codes, weight))
        return self

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The most probable labels, ``[n]``.

        Args:
            X: inputs, ``[n, features]``.
        """
        probs = self.predict_proba(X)
        return self.classes_[probs.argmax(1)]

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Class probabilities, averaged over the drawn networks, ``[n, classes]``.

        Args:
            X: inputs, ``[n, features]``.
        """
        return self._in_passes(X, "probs")[0]

    def predict_log_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Their logarithms, ``[n, classes]``, finite also where a probability is too small.

        Args:
            X: inputs, ``[n, features]``.
        """
        return self._in_passes(X, "log_probs")[0]

    def predict_uncertainty(self, X: ArrayLike) -> Uncertainty:
        """Entropies by their source, in nats; their sum is the entropy of `predict_proba`.

        Args:
            X: inputs, ``[n, features]``.

        Returns:
            Aleatoric part (expected entropy) and epistemic part (mutual information), ``[n]``.
        """
        return Uncertainty(*self._in_passes(X, "aleatoric", "epistemic"))

    def sample_y(self, X: ArrayLike, n_samples: int = 1, random_state: Any = 0) -> NDArray[Any]:
        """Draws labels from the posterior predictive, each column from one network.

        Args:
            X: inputs, ``[n, features]``.
            n_samples: number of draws.
            random_state: their seed.

        Returns:
            Labels, ``[n, n_samples]``.
        """
        draws, seed = count("n_samples", n_samples), as_random_seed(random_state)
        log_probs = self._ask(self._rows(X), draws, seed).sample_log_probs
        with seeded(seed):
            indices = torch.distributions.Categorical(logits=log_probs).sample()
        return self.classes_[indices.T.cpu().numpy()]

    def posterior_predictive(self, X: ArrayLike) -> ClassificationPrediction:
        """The whole posterior predictive, of classes in the order of ``classes_``.

        Args:
            X: inputs, ``[n, features]``.

        Returns:
            The probabilities by every drawn network, and what follows from them.
        """
        found: ClassificationPrediction = self._ask(self._rows(X))
        return found

    def _fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        classes: ArrayLike | None,
        sample_weight: Any,
        recipe: Recipe,
    ) -> BayesianClassifier:
        rows, labels = validate_data(self, as_dense("X", X), y, dtype=np.float64, order="C")
        check_classification_targets(labels)
        self.classes_ = unique_labels(labels if classes is None else classes)
        if len(self.classes_) < 2:
            raise ValueError(f"y must hold at least two classes, got 1 class, {self.classes_[0]!r}")
        rows, labels, weight = rows_of_weight(rows, labels, sample_weight)
        codes = self._encoded(labels)
        weight = self._by_class(codes, weight)
        self._learn(rows, codes, Categorical(), len(self.classes_), weight, recipe)
        return self

    def _by_class(self, codes: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor | None:
        """The rows' weights times those of their classes."""
        if self.class_weight is None:
            return weight
        weight = torch.ones(len(codes), dtype=torch.float64) if weight is None else weight
        if isinstance(self.class_weight, Mapping):
            labels = self.classes_.tolist()
            unknown = [label for label in self.class_weight if label not in labels]
            factors = torch.tensor([self.class_weight.get(x, 1.0) for x in labels]).double()
            if unknown or not (factors.isfinite() & (factors >= 0)).all():
                raise ValueError(
                    f"class_weight must have finite weights of at least 0 for labels {labels}, got "
                    f"{self.class_weight}"
                )
        elif isinstance(self.class_weight, str) and self.class_weight == "balanced":
            totals = torch.bincount(codes, weight, len(self.classes_))
            factors = weight.sum() / (totals * totals.count_nonzero())
        else:
            raise ValueError(
                "class_weight must be None, 'balanced' or a dict from labels to weights, got "
                f"{self.class_weight!r}"
            )
        return weight * factors[codes]

    def _encoded(self, labels: NDArray[Any]) -> torch.Tensor:
        unknown = np.setdiff1d(labels, self.classes_)
        if len(unknown):
            raise ValueError(f"y must hold labels of classes_ {self.classes_}, got {unknown}")
        return torch.tensor(np.searchsorted(self.classes_, labels))

    def _record(self) -> dict[str, Any]:
        return super()._record() | {"classes": self.classes_.tolist()}

    def _restore(self, record: dict[str, Any]) -> None:
        super()._restore(record)
        if len(record["classes"]) < 2:
            raise LoadError(f"classes must be two at least, got {record['classes']}")
        self.classes_ = np.array(record["classes"])
