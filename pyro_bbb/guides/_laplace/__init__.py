# SPDX-License-Identifier: Apache-2.0
"""Laplace's approximation: the guide, the curvature of one batch, its sums, a check of the draws.

The guide stands in ``guide.py``; a new structure of the curvature is a `CovariancePart` in
``guides/covariance.py`` and its sums in ``sums.py``. Imports the modules beside this folder.
"""

from pyro_bbb.guides._laplace.check import LinearizationWarning
from pyro_bbb.guides._laplace.guide import Laplace
from pyro_bbb.guides._laplace.sums import NoModeError

__all__ = ["Laplace", "LinearizationWarning", "NoModeError"]
