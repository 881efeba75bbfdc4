# SPDX-License-Identifier: Apache-2.0
"""Calibration on held-out data: its predictions, and the files of what was calibrated."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Self, TypeAlias

from torch import Tensor

from pyro_bbb._utils.files import (
    as_path,
    loading,
    read_file,
    require_form,
    seal,
    unseal,
    write_file,
)
from pyro_bbb._utils.validation import function
from pyro_bbb.data import as_tensors
from pyro_bbb.prediction._classification import ClassificationPrediction
from pyro_bbb.prediction._regression import Prediction, RegressionPrediction

_VERSION = 2  # of the files
PredictFn: TypeAlias = Callable[[Any], Prediction]


def call_predict(predict_fn: PredictFn, x: Any) -> Prediction:
    """Return the function's prediction at inputs, checked."""
    prediction = function("predict_fn", predict_fn, "from inputs to a Prediction")(x)
    if not isinstance(prediction, ClassificationPrediction | RegressionPrediction):
        raise TypeError(f"predict_fn must return a Prediction, got {type(prediction).__name__}")
    if isinstance(prediction, ClassificationPrediction) and prediction.probs.isnan().any():
        row = prediction.probs.isnan().flatten(1).any(1).nonzero()[0].item()
        raise ValueError(f"predict_fn must give predictions without NaN, got one at row {row}")
    return prediction


def predict_calibration(predict_fn: PredictFn, data: Any) -> tuple[Prediction, Tensor]:
    """Return the prediction of calibration inputs and their targets on its device, checked."""
    x, y = as_tensors(data)
    # inputs as they were given: `predict` moves arrays to its own device
    prediction = call_predict(predict_fn, data[0] if isinstance(data, tuple | list) else x)
    if isinstance(prediction, ClassificationPrediction):
        y = prediction.labels(y.to(prediction.probs.device))
    else:
        with suppress(NotImplementedError):  # a distribution without mean
            y = y.to(prediction.mean.device)
    if prediction.log_prob(y).isnan().any():  # raises for targets that do not fit
        raise ValueError("predict_fn must give predictions without NaN")
    return prediction, y


class Calibrated:
    """Function from inputs, calibrated on held-out data: a dataclass that a JSON file holds."""

    _FORMAT: ClassVar[str]
    _FORM: ClassVar[dict[str, Any]]  # fields but for ``predict_fn``, with their types in JSON

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all but ``predict_fn`` to a JSON file, which appears complete or not at all.

        Raises:
            ValueError: the path names no file.
            OSError: the file cannot be written.
        """
        values = {name: getattr(self, name) for name in self._FORM}
        content = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in values.items()}
        write_file(as_path(path), seal(content, self._FORMAT, _VERSION))

    @classmethod
    def load(cls, path: str | os.PathLike[str], predict_fn: PredictFn) -> Self:
        """Read what `save` wrote, for the function of the calibration.

        Raises:
            FileNotFoundError: there is no such file.
            LoadError: the file is damaged or altered, or of another kind.
        """
        function("predict_fn", predict_fn, "from inputs to a Prediction")
        file = as_path(path)
        content = unseal(read_file(file), file, cls._FORMAT, _VERSION)
        with loading(file):
            require_form(content, cls._FORM)
            return cls(predict_fn=predict_fn, **content)  # type: ignore[call-arg]
