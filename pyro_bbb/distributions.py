"""Distributions of weights: the scale mixture prior and the Normals of the guides."""

from pyro_bbb._copies import map_tensors, without_validation
from pyro_bbb._mixture import ScaleMixtureNormal
from pyro_bbb._normals import PrunedNormal, SoftplusNormal, softplus

__all__ = [
    "PrunedNormal",
    "ScaleMixtureNormal",
    "SoftplusNormal",
    "map_tensors",
    "softplus",
    "without_validation",
]
