# SPDX-License-Identifier: Apache-2.0
r"""Normal distributions of many weights: the prior, and the posterior with softplus scales.

$$\ln N(w \mid \mu, \sigma^2) = -\tfrac12\Big(\frac{w - \mu}{\sigma}\Big)^2 - \ln\sigma
  - \tfrac12\ln 2\pi, \qquad \sigma = \mathrm{softplus}(\rho) = \ln(1 + e^\rho)$$

The posterior is that of Blundell et al. (2015), section 3.2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro import distributions as dist
from torch import Size, Tensor
from torch.distributions import Distribution, constraints
from torch.nn import functional

from pyro_bbb.distributions.summed_event import (
    HALF_LOG_2PI,
    Event,
    innermost,
    to_event,
    total,
    unexpanded,
)

_BLOCK = 2**16  # squares of one dot product, whose rounding grows with their number


class SummedNormal(dist.Normal):
    """Pyro's Normal, which sums its log-density over many weights in few passes."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density in nats, elementwise."""
        if self._validate_args:
            self._validate_sample(value)
        z = (value - self.loc) / self.scale
        return torch.addcmul(-HALF_LOG_2PI - unexpanded(self.scale).log(), z, z, value=-0.5)

    def sum_log_prob(self, value: Tensor, dims: int) -> Tensor:
        """Return the log-density in nats, summed over the last ``dims`` dimensions."""
        loc, scale = unexpanded(self.loc), unexpanded(self.scale)
        first = len(self.batch_shape) - dims
        count = math.prod(self.batch_shape[first:])
        # sum of ln sigma_j; a scale that repeats has one logarithm
        log_scale = total(scale.log(), dims) * (count // math.prod(scale.shape[first:]))
        z = ((value - loc) / scale).flatten(-dims)
        blocks = [torch.linalg.vecdot(block, block) for block in z.split(_BLOCK, -1)]
        return -0.5 * torch.stack(blocks).sum(0) - log_scale - count * HALF_LOG_2PI

    def to_event(self, reinterpreted_batch_ndims: int | None = None) -> Event | SummedNormal:
        return to_event(self, reinterpreted_batch_ndims)


def fixed_normal(fn: Any) -> tuple[Tensor, Tensor] | None:
    """Return mean and scale of a site's Normals, of its shape; ``None`` if others or trained."""
    normal = innermost(fn)
    if type(normal) not in (dist.Normal, SummedNormal):
        return None
    if normal.loc.requires_grad or normal.scale.requires_grad:
        return None
    return normal.loc.expand(fn.shape()), normal.scale.expand(fn.shape())


class SoftplusNormal(SummedNormal):
    r"""$N(\mu, \mathrm{softplus}(\rho)^2)$, the posterior of one weight (Blundell et al., 3.2).

    Args:
        loc: mean, any shape.
        rho: unconstrained scale, same shape; the standard deviation is ``softplus(rho)``.
    """

    arg_constraints: Any = {"loc": constraints.real, "scale": constraints.positive}

    def __init__(self, loc: Tensor, rho: Tensor) -> None:
        loc, scale = torch.broadcast_tensors(loc, softplus(rho))
        super().__init__(loc, scale, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> SoftplusNormal:
        new = self._get_checked_instance(type(self), _instance)
        new.loc, new.scale = self.loc.expand(batch_shape), self.scale.expand(batch_shape)
        Distribution.__init__(new, Size(batch_shape), validate_args=False)
        return new

    def rsample(self, sample_shape: Any = Size()) -> Tensor:
        shape = self._extended_shape(Size(sample_shape))
        noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        return torch.addcmul(self.loc, self.scale, noise)

    def sample(self, sample_shape: Any = Size()) -> Tensor:
        with torch.no_grad():
            return self.rsample(sample_shape)


class PrunedNormal(SoftplusNormal):
    r"""`SoftplusNormal` in which entries with $\rho = -\infty$ are removed.

    A removed entry is exactly 0 and stays so in training: it has scale 0, no gradient, and
    contributes nothing to the log-density, which is that of the remaining entries.
    """

    def __init__(self, loc: Tensor, rho: Tensor) -> None:
        self.unpruned: Tensor = rho > -math.inf
        super().__init__(loc.where(self.unpruned, 0.0), rho.where(self.unpruned, 0.0))
        self.remaining: Tensor = self.scale
        self.scale: Tensor = self.remaining.where(self.unpruned, 0.0)

    def expand(self, batch_shape: Any, _instance: Any = None) -> PrunedNormal:
        new = super().expand(batch_shape, self._get_checked_instance(PrunedNormal, _instance))
        new.unpruned = self.unpruned.expand(batch_shape)
        new.remaining = self.remaining.expand(batch_shape)
        return new

    def with_positive_scale(self) -> SummedNormal:
        """Return the Normals with a scale of softplus(0) at removed entries."""
        return SummedNormal(self.loc, self.remaining, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density of the unpruned entries in nats, 0 for the removed ones."""
        return self.with_positive_scale().log_prob(value).where(self.unpruned, 0.0)

    def sum_log_prob(self, value: Tensor, dims: int) -> Tensor:
        """Return the log-density in nats, summed over the last ``dims`` dimensions."""
        return total(self.log_prob(value), dims)


LINEAR = 40.0  # above it softplus is linear: e^-40 is below the rounding of float64


def softplus(rho: Tensor) -> Tensor:
    r"""$\ln(1 + e^\rho)$, exact to rounding in float32 and float64 for every $\rho$."""
    return functional.softplus(rho, threshold=LINEAR)
