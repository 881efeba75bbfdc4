"""Guides: variational families of posteriors, by name.

| name | posterior |
|---|---|
| ``softplus_normal`` | independent Normals, `AutoSoftplusNormal` |
| ``normal`` | independent Normals, `Normal` |
| ``low_rank`` | a Normal of covariance low-rank plus diagonal, `LowRank` |
| ``full_rank`` | a Normal of any covariance, `FullRank` |
| ``flow`` | an inverse autoregressive flow, `Flow` |
| ``delta`` | a point, the MAP, `Delta` |
| ``laplace`` | a Normal at the MAP by the curvature there, `Laplace` |
| ``ensemble`` | several of these with different initial values, `Ensemble` |

A guide that is Normal has a tangent, in ``tangent.py``: outputs of a network linear in its weights.

Imports the rooms up to `_handlers`, never `priors`. A new guide is one module here and one line in
``_registry.py``: its name in `GUIDES`.
"""

from pyro_bbb.guides._autoguides import Delta, Normal
from pyro_bbb.guides._base import Approximated, Guide
from pyro_bbb.guides._ensemble import Ensemble
from pyro_bbb.guides._joint_autoguides import Flow, FullRank, LowRank
from pyro_bbb.guides._laplace import Laplace
from pyro_bbb.guides._laplace_check import LinearizationWarning
from pyro_bbb.guides._laplace_sums import NoModeError
from pyro_bbb.guides._mean_field import AutoSoftplusNormal
from pyro_bbb.guides._registry import GUIDES, ensemble, make
from pyro_bbb.guides.kl_weight import weighs_kl

__all__ = [
    "Approximated",
    "AutoSoftplusNormal",
    "Delta",
    "Ensemble",
    "Flow",
    "FullRank",
    "GUIDES",
    "Guide",
    "Laplace",
    "LinearizationWarning",
    "LowRank",
    "NoModeError",
    "Normal",
    "ensemble",
    "make",
    "weighs_kl",
]
