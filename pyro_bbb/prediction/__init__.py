# SPDX-License-Identifier: Apache-2.0
"""The posterior predictive: draws of the outputs, and their summaries.

Imports the rooms up to `models`. `predict` stands in ``_predict.py``, the posterior draws in
``_draws.py``, the samplers in ``_weight_samples.py`` and ``_output_samples.py``, the network's
tangent in ``_linearized.py``; a new summary of a prediction goes into ``_classification.py`` or
``_regression.py``. What is calibrated on held-out data, of any function from inputs to a
prediction, stands in ``_conformal.py`` and ``_temperature.py``, and which labels to buy in
``_acquisition.py``.
"""

from pyro_bbb.prediction._acquisition import batch_bald, diverse_bald
from pyro_bbb.prediction._calibration import call_predict as call_predict
from pyro_bbb.prediction._calibration import predict_calibration as predict_calibration
from pyro_bbb.prediction._classification import ClassificationPrediction, class_log_probs
from pyro_bbb.prediction._conformal import ConformalPredictor, conformal
from pyro_bbb.prediction._draws import posterior_draws
from pyro_bbb.prediction._linearized import GaussianPrediction
from pyro_bbb.prediction._predict import (
    ESTIMATORS as ESTIMATORS,
)
from pyro_bbb.prediction._predict import (
    predict,
    predict_mean,
)
from pyro_bbb.prediction._regression import Prediction, RegressionPrediction
from pyro_bbb.prediction._temperature import TemperatureScaled, temperature_scaling
from pyro_bbb.prediction._weight_samples import default_rows as default_rows
from pyro_bbb.prediction._weight_samples import per_draw as per_draw

__all__ = [
    "ClassificationPrediction",
    "ConformalPredictor",
    "GaussianPrediction",
    "Prediction",
    "RegressionPrediction",
    "TemperatureScaled",
    "batch_bald",
    "class_log_probs",
    "conformal",
    "diverse_bald",
    "posterior_draws",
    "predict",
    "predict_mean",
    "temperature_scaling",
]
