# SPDX-License-Identifier: Apache-2.0
"""Estimators for scikit-learn: Bayesian neural networks for tables.

    from pyro_bbb.sklearn import BayesianRegressor

    regressor = BayesianRegressor().fit(X, y)
    mean, std = regressor.predict(X_new, return_std=True)
    aleatoric, epistemic = regressor.predict_uncertainty(X_new)

Inputs, and the targets of a regression, are scaled inside. Arrays, and data frames of numbers of
pandas or polars, are taken.

Imports any room but `cli` and `play`. A new estimator is one module here beside ``_regressor.py``.
"""

from pyro_bbb.sklearn._base import Uncertainty
from pyro_bbb.sklearn._classifier import BayesianClassifier
from pyro_bbb.sklearn._regressor import BayesianRegressor

__all__ = ["BayesianClassifier", "BayesianRegressor", "Uncertainty"]
