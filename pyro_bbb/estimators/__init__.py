# SPDX-License-Identifier: Apache-2.0
"""Gradient estimators: local reparameterisation, flipout, sticking the landing.

Imports the packages up to `_handlers`. A new estimator is a context manager in ``_estimators.py``
and one entry of `ESTIMATORS`, its name in `fit`.
"""

from pyro_bbb.estimators._estimators import ESTIMATORS as ESTIMATORS
from pyro_bbb.estimators._estimators import Operation as Operation
from pyro_bbb.estimators._estimators import Perturbation as Perturbation
from pyro_bbb.estimators._estimators import (
    flipout,
    local_reparameterization,
    sticking_the_landing,
)
from pyro_bbb.estimators._sampled_weights import DetachScores as DetachScores
from pyro_bbb.estimators._sampled_weights import Draws as Draws

__all__ = ["flipout", "local_reparameterization", "sticking_the_landing"]
