# SPDX-License-Identifier: Apache-2.0
"""The posterior predictive: draws of the outputs, and their summaries.

Read ``_predict.py`` first; it takes the posterior draws and their outputs from ``_draws.py``. The
results are in ``_classification.py`` and ``_regression.py``; a new summary of a prediction goes
there. ``_conformal.py`` and ``_temperature.py`` calibrate any function from inputs to a prediction
on held-out data (``_calibration.py``), and ``_acquisition.py`` chooses inputs to label.

Imports the packages up to `models`.
"""

from pyro_bbb.prediction._acquisition import batch_bald, diverse_bald
from pyro_bbb.prediction._batchnorm import batchnorm_draws
from pyro_bbb.prediction._calibration import call_predict as call_predict
from pyro_bbb.prediction._calibration import predict_calibration as predict_calibration
from pyro_bbb.prediction._classification import ClassificationPrediction, class_log_probs
from pyro_bbb.prediction._conformal import ConformalPredictor, conformal
from pyro_bbb.prediction._draws import default_rows as default_rows
from pyro_bbb.prediction._draws import posterior_draws
from pyro_bbb.prediction._draws import single_draws as single_draws
from pyro_bbb.prediction._generate import generate
from pyro_bbb.prediction._leave_one_out import leave_one_out_weights as leave_one_out_weights
from pyro_bbb.prediction._leave_one_out import log_prob_left_out as log_prob_left_out
from pyro_bbb.prediction._predict import checked_inputs as checked_inputs
from pyro_bbb.prediction._predict import drawn_arguments as drawn_arguments
from pyro_bbb.prediction._predict import predict, predict_mean
from pyro_bbb.prediction._regression import GaussianPrediction, Prediction, RegressionPrediction
from pyro_bbb.prediction._temperature import TemperatureScaled, temperature_scaling

__all__ = [
    "ClassificationPrediction",
    "ConformalPredictor",
    "GaussianPrediction",
    "Prediction",
    "RegressionPrediction",
    "TemperatureScaled",
    "batch_bald",
    "batchnorm_draws",
    "class_log_probs",
    "conformal",
    "diverse_bald",
    "generate",
    "posterior_draws",
    "predict",
    "predict_mean",
    "temperature_scaling",
]
