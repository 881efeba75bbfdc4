# SPDX-License-Identifier: Apache-2.0
"""Estimators for scikit-learn: Bayesian neural networks for tables.

    from pyro_bbb.sklearn import BayesianRegressor

    regressor = BayesianRegressor().fit(X, y)
    mean, std = regressor.predict(X_new, return_std=True)
    aleatoric, epistemic = regressor.predict_uncertainty(X_new)

X is an array or a data frame of pandas or polars, whose categories and missing values are encoded
inside. Inputs, and the targets of a regression, are scaled inside. Imports every package but the
applications. A new estimator is one module like ``_regressor.py``.
"""

from pyro_bbb.sklearn._classifier import BayesianClassifier
from pyro_bbb.sklearn._estimator import BayesianEstimator, Uncertainty
from pyro_bbb.sklearn._estimator import read_estimator as read_estimator
from pyro_bbb.sklearn._regressor import BayesianRegressor

__all__ = ["BayesianClassifier", "BayesianEstimator", "BayesianRegressor", "Uncertainty"]
