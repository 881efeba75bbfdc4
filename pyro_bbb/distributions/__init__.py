# SPDX-License-Identifier: Apache-2.0
"""Distributions of weights and observations, and their closed-form KLs.

Imports `_utils`. A new distribution is one module here; a closed-form KL against it is
registered in ``_kl.py``.
"""

from pyro_bbb.distributions import _kl as _kl  # registers the KLs
from pyro_bbb.distributions._copy import map_tensors, without_validation
from pyro_bbb.distributions.improper import LogUniform
from pyro_bbb.distributions.normal import PrunedNormal, SoftplusNormal, SummedNormal, softplus
from pyro_bbb.distributions.scale_mixture import ScaleMixtureNormal

__all__ = [
    "LogUniform",
    "PrunedNormal",
    "ScaleMixtureNormal",
    "SoftplusNormal",
    "SummedNormal",
    "map_tensors",
    "softplus",
    "without_validation",
]
