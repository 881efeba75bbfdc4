# SPDX-License-Identifier: Apache-2.0
"""Guides: variational families of posteriors, by name.

| name | posterior |
|---|---|
| ``softplus_normal`` | independent Normals, `AutoSoftplusNormal` |
| ``normal`` | independent Normals, `Normal` |
| ``low_rank`` | a Normal of covariance low-rank plus diagonal, `LowRank` |
| ``full_rank`` | a Normal of any covariance, `FullRank` |
| ``flow`` | an inverse autoregressive flow, `Flow` |
| ``delta`` | a point, the MAP, `Delta` |
| ``vbll`` | a Normal of full covariance on the last layer alone, `LastLayer` |
| ``laplace`` | a Normal at the MAP by the curvature there, `Laplace` |
| ``swag`` | a Normal of the iterates of training, `SWAG` |
| ``rank1_ensemble`` | networks that differ by random rank-one factors, `Rank1Ensemble` |
| ``ensemble`` | several of these with different initial values, `Ensemble` |

`Guide` is their interface: draws, moments, outputs and state. A guide that is Normal has a tangent,
in ``tangent.py``: outputs of a network linear in its weights.

Imports the packages up to `_handlers`, never `priors`. A new guide is one module here and one line
in ``_registry.py``: its name in `GUIDES`.
"""

from pyro_bbb.guides._autoguides import Delta, Flow, FullRank, LowRank, Normal
from pyro_bbb.guides._base import Approximated, ClosedForm, Collected, Guide, collected
from pyro_bbb.guides._ensemble import Ensemble
from pyro_bbb.guides._laplace import Laplace, LinearizationWarning, NoModeError
from pyro_bbb.guides._last_layer import LastLayer
from pyro_bbb.guides._mean_field import AutoSoftplusNormal
from pyro_bbb.guides._rank1 import Rank1Ensemble
from pyro_bbb.guides._registry import GUIDES, ensemble, make
from pyro_bbb.guides._swag import SWAG, TooFewIteratesError
from pyro_bbb.guides.kl_weight import weighs_kl

__all__ = [
    "Approximated",
    "AutoSoftplusNormal",
    "ClosedForm",
    "Collected",
    "Delta",
    "Ensemble",
    "Flow",
    "FullRank",
    "GUIDES",
    "Guide",
    "Laplace",
    "LastLayer",
    "LinearizationWarning",
    "LowRank",
    "NoModeError",
    "Normal",
    "Rank1Ensemble",
    "SWAG",
    "TooFewIteratesError",
    "collected",
    "ensemble",
    "make",
    "weighs_kl",
]
