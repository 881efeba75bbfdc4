# SPDX-License-Identifier: Apache-2.0
"""Moved to `pyro_bbb.prediction`; this name stays until the first release."""

from pyro_bbb.prediction import ClassificationPrediction, Prediction, RegressionPrediction

__all__ = ["ClassificationPrediction", "Prediction", "RegressionPrediction"]
