"""Distributions of weights: the scale mixture prior and the Normals of the guides."""

from pyro_bbb import _divergences as _divergences  # registers them
from pyro_bbb._copies import map_tensors, without_validation
from pyro_bbb._mixture import ScaleMixtureNormal
from pyro_bbb._normals import PrunedNormal, SoftplusNormal, SummedNormal
from pyro_bbb._softplus import softplus

__all__ = [
    "PrunedNormal",
    "ScaleMixtureNormal",
    "SoftplusNormal",
    "SummedNormal",
    "map_tensors",
    "softplus",
    "without_validation",
]
