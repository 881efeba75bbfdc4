# SPDX-License-Identifier: Apache-2.0
"""Priors without trained parameters."""

from __future__ import annotations

import math
from typing import Any

import pyro.distributions as dist
from torch import Size, nn
from torch.distributions import Distribution

from pyro_bbb._utils.saving import Arguments, Modules, attributes, children, saveable
from pyro_bbb._utils.validation import finite, positive
from pyro_bbb.distributions import ScaleMixtureNormal
from pyro_bbb.priors._base import Independent, Prior, named


def _fan_in_normal(cls: Any, arguments: Arguments, modules: Modules) -> nn.Module:
    prior: FanInNormal = cls(**arguments)
    prior.by_fan_in.update(modules)
    return prior


@named("fan_in_normal")
@saveable(attributes("gain"), modules=lambda prior: children(prior.by_fan_in), build=_fan_in_normal)
class FanInNormal(Prior):
    r"""$N(0, g^2 / n_\text{in})$ for kernels, $N(0, g^2)$ for biases.

    With the ReLU gain $g = \sqrt 2$ a random network of any width and depth passes on the second
    moment of its input (He et al. 2015, "Delving Deep into Rectifiers").

    Args:
        gain: $g$, positive.
    """

    is_fixed = True

    def __init__(self, gain: float = math.sqrt(2)) -> None:
        super().__init__()
        self.gain: float = positive("gain", gain)
        self.by_fan_in: nn.ModuleDict = nn.ModuleDict()

    def forward(self, module: nn.Module, name: str, shape: Size) -> Distribution:
        """Return the Normal whose scale fits the fan-in of ``shape``."""
        fan_in = math.prod(shape[1:])
        key = str(fan_in)
        if key not in self.by_fan_in:
            new = Independent(dist.Normal(0.0, self.gain / math.sqrt(fan_in)))
            for known in self.by_fan_in.values():  # which may have moved to another device
                new.to(known.distribution.scale)  # type: ignore[union-attr,arg-type]
            self.by_fan_in[key] = new
        distribution: Distribution = self.by_fan_in[key](module, name, shape)
        return distribution


@named("normal")
def normal(scale: float = 1.0, loc: float = 0.0) -> Prior:
    """Return independent Normals."""
    return Independent(dist.Normal(finite("loc", loc), positive("scale", scale)))


@named("laplace")
def laplace(scale: float = 1.0) -> Prior:
    """Return independent Laplace distributions around 0."""
    return Independent(dist.Laplace(0.0, positive("scale", scale)))


@named("student_t")
def student_t(df: float = 3.0, scale: float = 1.0) -> Prior:
    """Return independent Student t distributions around 0."""
    return Independent(dist.StudentT(positive("df", df), 0.0, positive("scale", scale)))


@named("scale_mixture")
def scale_mixture(pi: float = 0.5, sigma1: float = 1.0, sigma2: float = math.exp(-6)) -> Prior:
    """Return independent scale mixtures of two Normals, of Blundell et al. (2015)."""
    return Independent(ScaleMixtureNormal(pi, sigma1, sigma2))
