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
from sklearn.utils.validation import check_is_fitted

from pyro_bbb._utils.context import seeded
from pyro_bbb._utils.files import LoadError
from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.validation import count
from pyro_bbb.likelihoods import Categorical
from pyro_bbb.prediction import ClassificationPrediction
from pyro_bbb.sklearn._estimator import (
    BayesianEstimator,
    Uncertainty,
    as_random_seed,
    can_learn_on,
    rows_of_weight,
)
from pyro_bbb.sklearn._posterior import Rows


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

    _form: ClassVar[dict[str, Any]] = {"classes": list[str] | list[int] | list[float] | list[bool]}

    @available_if(can_learn_on)
    @locked
    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, classes: Any = None, sample_weight: Any = None
    ) -> BayesianClassifier:
        """Learn from further rows without the earlier ones: the posterior is their prior.

        Chains do not have this method. The first call is a `fit` by a guide, and sets the scales
        of the inputs. Rows given twice count as two observations.

        Args:
            X: inputs, ``[n, features]``.
            y: labels, ``[n]``.
            classes: all labels of this and later calls, for the first call; by default those in it.
            sample_weight: as for `fit`.

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
        self._fit(X, y, sample_weight, classes=classes, partial=True)
        return self

    def _fit(
        self, X: ArrayLike, y: ArrayLike, weight: Any, *, classes: Any = None, partial: bool = False
    ) -> None:
        self._check_parameters()
        first = not (partial and hasattr(self, "posterior_"))
        used, weight = rows_of_weight(X, weight)
        rows, labels = self._checked(X, y, used, reset=first)
        check_classification_targets(labels)
        if first:
            self.classes_: NDArray[Any] = unique_labels(labels if classes is None else classes)
            if len(self.classes_) < 2:
                only = f"1 class, {self.classes_[0]!r}"
                raise ValueError(f"y must hold at least two classes, got {only}")
        elif classes is not None and not np.array_equal(unique_labels(classes), self.classes_):
            raise ValueError(f"classes must be {self.classes_} as before, got {classes}")
        codes = self._codes(labels[used])
        learned = Rows(torch.tensor(rows[used]), codes, self._weighted_by_class(codes, weight))
        self._learn(learned, Categorical() if first else None, len(self.classes_), partial)

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
        """Return expected entropy and mutual information ``[n]``, in nats.

        Their sum is the entropy of `predict_proba`.
        """
        return Uncertainty(*self._summaries(X, "aleatoric", "epistemic"))

    def score_samples(self, X: ArrayLike, y: Any = None) -> NDArray[np.float64]:
        """Return the log-probability ``[n]`` of each row's label, by default that of `predict`."""
        y = self.predict(X) if y is None else y
        check_is_fitted(self)
        rows, labels = self._checked(X, y, reset=False)
        return self._log_probs(rows, self._codes(labels))

    def sample_y(self, X: ArrayLike, n_samples: int = 1, random_state: Any = 0) -> NDArray[Any]:
        """Draw labels ``[n, n_samples]`` from the posterior predictive, a network per column."""
        draws, seed = count("n_samples", n_samples), as_random_seed(random_state)
        log_probs = self._predictive(self.encode(X), draws, seed).sample_log_probs
        with seeded(seed):
            indices = torch.distributions.Categorical(logits=log_probs).sample()
        return self.classes_[indices.T.cpu().numpy()]

    def _codes(self, labels: NDArray[Any]) -> torch.Tensor:
        """Return the index of each label in ``classes_``."""
        if len(unknown := np.setdiff1d(labels, self.classes_)):
            raise ValueError(f"y must hold labels of classes_ {self.classes_}, got {unknown}")
        return torch.tensor(np.searchsorted(self.classes_, labels))

    def _weighted_by_class(
        self, codes: torch.Tensor, weight: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return the rows' weights times those of their classes."""
        if self.class_weight is None:
            return weight
        weight = torch.ones(len(codes), dtype=torch.float64) if weight is None else weight
        labels = self.classes_.tolist()
        if isinstance(self.class_weight, Mapping):
            factors = torch.tensor([self.class_weight.get(x, 1.0) for x in labels]).double()
            valid = set(self.class_weight) <= set(labels)
            valid = valid and bool((factors.isfinite() & (factors >= 0)).all())
        else:
            totals = torch.bincount(codes, weight, len(labels))
            factors = weight.sum() / (totals * totals.count_nonzero())
            valid = isinstance(self.class_weight, str) and self.class_weight == "balanced"
        if not valid:
            raise ValueError(
                "class_weight must be None, 'balanced' or a dict from labels to finite weights of "
                f"at least 0, for labels {labels}, got {self.class_weight!r}"
            )
        return weight * factors[codes]

    def _record(self) -> dict[str, Any]:
        return super()._record() | {"classes": self.classes_.tolist()}

    def _restore(self, record: dict[str, Any]) -> None:
        super()._restore(record)
        if len(record["classes"]) < 2:
            raise LoadError(f"classes must be two at least, got {record['classes']}")
        self.classes_ = np.array(record["classes"])
