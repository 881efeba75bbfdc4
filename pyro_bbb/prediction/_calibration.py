# SPDX-License-Identifier: Apache-2.0
"""Predictions of calibration data: examples with targets that were held out from training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

from torch import Tensor

from pyro_bbb._utils.validation import function
from pyro_bbb.data import as_tensors
from pyro_bbb.prediction._classification import ClassificationPrediction
from pyro_bbb.prediction._regression import Prediction, RegressionPrediction

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
