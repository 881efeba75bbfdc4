# SPDX-License-Identifier: Apache-2.0
"""The estimator of classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
from pyro_bbb.sklearn._estimator import (
    BayesianEstimator,
    Uncertainty,
    as_random_seed,
    can_learn_on,
    rows_of_weight,
)


@dataclass(eq=False, repr=False, kw_only=True)
class BayesianClassifier(ClassifierMixin, BayesianEstimator[ClassificationPrediction]):
    """A Bayesian neural network for two or more classes.

    Args:
        class_weight: factors of the rows' weights by class: a dict (1 where it lacks a class), or
            ``"balanced"``, which gives every class the same total. Probabilities are then those of
            weighted classes, not of the classes' frequencies in the data.

    Attributes:
        classes_: the labels.
    """

    class_weight: Any = None

    default_prior: ClassVar[str] = "normal"
    _form: ClassVar[dict[str, Any]] = {"classes": list[str] | list[int] | list[float] | list[bool]}

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: Any = None) -> BayesianClassifier:
        """Train a new network; an earlier fit is replaced.

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
        return self._fit(X, y, None, sample_weight)

    @available_if(can_learn_on)
    @locked
    def partial_fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        classes: ArrayLike | None = None,
        sample_weight: Any = None,
    ) -> BayesianClassifier:
        """Learn from further rows without the earlier ones: the posterior is their prior.

        Chains do not have this method. The first call is a `fit` by a guide, and sets the scales
        of the inputs. Rows given twice count as two observations.

        Args:
            X: inputs, ``[n, features]``.
            y: labels, ``[n]``.
            classes: all labels of this and later calls, for the first call; by default those in it.
            sample_weight: as for `fit`.

        Returns:
            The estimator.

        Raises:
            ValueError: as for `fit`, an unknown label, other classes than before, or
                ``class_weight`` is ``"balanced"``.
            TypeError: as for `fit`, or the guide has no Normal marginals to be a prior.
        """
        if isinstance(self.class_weight, str):
            raise ValueError(
                "class_weight must be None or a dict for partial_fit, which does not see all rows, "
                f"got {self.class_weight!r}; or give weights of the rows as sample_weight"
            )
        if not hasattr(self, "posterior_"):
            return self._fit(X, y, classes, sample_weight, by_guide=True)
        if classes is not None and not np.array_equal(unique_labels(classes), self.classes_):
            raise ValueError(f"classes must be {self.classes_} as before, got {classes}")
        X = as_dense("X", X)
        rows, labels = validate_data(self, X, y, dtype=np.float64, order="C", reset=False)
        rows, labels, weight = rows_of_weight(rows, labels, sample_weight)
        codes = self._codes(labels)
        self._learn_on(rows, codes, self._weighted_by_class(codes, weight))
        return self

    def _fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        classes: ArrayLike | None,
        sample_weight: Any,
        *,
        by_guide: bool = False,
    ) -> BayesianClassifier:
        self._check_parameters()
        rows, labels = validate_data(self, as_dense("X", X), y, dtype=np.float64, order="C")
        check_classification_targets(labels)
        self.classes_ = unique_labels(labels if classes is None else classes)
        if len(self.classes_) < 2:
            raise ValueError(f"y must hold at least two classes, got 1 class, {self.classes_[0]!r}")
        rows, labels, weight = rows_of_weight(rows, labels, sample_weight)
        codes = self._codes(labels)
        weight = self._weighted_by_class(codes, weight)
        self._learn(rows, codes, Categorical(), len(self.classes_), weight, by_guide=by_guide)
        return self

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Return the most probable labels ``[n]`` of inputs ``[n, features]``."""
        probs = self.predict_proba(X)  # first, as it raises NotFittedError
        return self.classes_[probs.argmax(1)]

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return class probabilities ``[n, classes]``, averaged over the drawn networks."""
        return self._summaries(X, "probs")[0]

    def predict_log_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """Return log-probabilities ``[n, classes]``, finite also where a probability underflows."""
        return self._summaries(X, "log_probs")[0]

    def predict_uncertainty(self, X: ArrayLike) -> Uncertainty:
        """Return entropies by source, in nats; their sum is the entropy of `predict_proba`.

        Args:
            X: inputs, ``[n, features]``.

        Returns:
            Aleatoric part (expected entropy) and epistemic part (mutual information), ``[n]``.
        """
        return Uncertainty(*self._summaries(X, "aleatoric", "epistemic"))

    def sample_y(self, X: ArrayLike, n_samples: int = 1, random_state: Any = 0) -> NDArray[Any]:
        """Draw labels from the posterior predictive, each column from one network.

        Args:
            X: inputs, ``[n, features]``.
            n_samples: number of draws.
            random_state: their seed.

        Returns:
            Labels, ``[n, n_samples]``.
        """
        draws, seed = count("n_samples", n_samples), as_random_seed(random_state)
        log_probs = self._predictive(self._rows(X), draws, seed).sample_log_probs
        with seeded(seed):
            indices = torch.distributions.Categorical(logits=log_probs).sample()
        return self.classes_[indices.T.cpu().numpy()]

    def _weighted_by_class(
        self, codes: torch.Tensor, weight: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return the rows' weights times those of their classes."""
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

    def _codes(self, labels: NDArray[Any]) -> torch.Tensor:
        """Return the indices of labels in ``classes_``."""
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
