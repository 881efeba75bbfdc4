# SPDX-License-Identifier: Apache-2.0
r"""Normal distributions of many weights: priors, and posteriors with softplus scales.

The posterior is from Blundell et al. (2015), section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from pyro import distributions as dist
from torch import Size, Tensor
from torch.distributions import Distribution, constraints

from pyro_bbb._ops.normal import SquaredDistance, unexpanded
from pyro_bbb._ops.reductions import HALF_LOG_2PI, total
from pyro_bbb._ops.reparameterize import draw
from pyro_bbb._ops.softplus import softplus
from pyro_bbb.distributions.summed_event import Event, to_event


class SummedNormal(dist.Normal):
    """Pyro's Normal, which sums its log-density over many weights in few passes."""

    def sum_log_prob(self, value: Tensor, dims: int) -> Tensor:
        """Log-density in nats, summed over the last ``dims`` dimensions of ``value``."""
        loc, scale = unexpanded(self.loc), unexpanded(self.scale)
        fixed = not (loc.requires_grad or scale.requires_grad)
        if fixed and value.dtype == loc.dtype == scale.dtype:  # it works in place
            of_value = SquaredDistance.apply(value, loc, scale, dims)
        else:
            of_value = total(((value - loc) / scale).square(), dims)
        first = len(self.batch_shape) - dims
        count = math.prod(self.batch_shape[first:])
        of_scale = total(scale.log(), dims) * (count // math.prod(scale.shape[first:]))
        return -0.5 * of_value - of_scale - count * HALF_LOG_2PI

    @property
    def same_for_each(self) -> tuple[int, ...] | None:
        """Addresses of the one location and scale of all weights; ``None`` if there are several."""
        parameters = unexpanded(self.loc), unexpanded(self.scale)
        one = all(x.numel() == 1 for x in parameters)
        return tuple(x.data_ptr() for x in parameters) if one else None

    def single(self) -> SummedNormal:
        """The distribution of one weight, where it is the same for each."""
        loc, scale = (unexpanded(x).reshape(()) for x in (self.loc, self.scale))
        return SummedNormal(loc, scale, validate_args=False)

    def to_event(self, reinterpreted_batch_ndims: int | None = None) -> Event | SummedNormal:
        """The last dimensions (all by default) as one event."""
        return to_event(self, reinterpreted_batch_ndims)


class SoftplusNormal(dist.Normal):
    r"""$N(\mu, \mathrm{softplus}(\rho)^2)$, the posterior of one weight (Blundell et al., 3.2).

    It remembers the noise of its latest draw: there $\ln q = -\epsilon^2/2 - \ln\sigma - \ln
    \sqrt{2\pi}$ needs neither the value nor a division by the scale.

    Args:
        loc: mean, any shape.
        rho: unconstrained scale, same shape; the standard deviation is ``softplus(rho)``.
    """

    arg_constraints = {"loc": constraints.real, "scale": constraints.positive}

    def __init__(self, loc: Tensor, rho: Tensor) -> None:
        self.loc, self.rho = torch.broadcast_tensors(loc, rho)
        self._scale: Tensor | None = None
        self._known_scale: Callable[[], Tensor] | None = None
        self._log_q: Tensor | None = None  # of that draw, summed
        self._draw: tuple[Tensor, Tensor] | None = None
        self._next: Tensor | None = None  # what the next draw is, where that was made elsewhere
        self._origin: SoftplusNormal | None = None  # what this is an expansion of
        Distribution.__init__(self, self.loc.shape, validate_args=False)

    @classmethod
    def drawn(
        cls, loc: Tensor, rho: Tensor, value: Tensor, noise: Tensor, scale: Callable[[], Tensor]
    ) -> SoftplusNormal:
        """The distribution whose next draw is known, and whose scale can be asked for."""
        new = cls(loc, rho)
        new._next, new._draw, new._known_scale = value, (value, noise), scale
        return new

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        """Standard deviation, of the batch shape."""
        if self._scale is None:
            known, origin = self._known_scale, self._origin
            if known is not None:
                self._scale = known()
            else:
                self._scale = softplus(self.rho) if origin is None else origin.scale
        return self._scale.expand(self._batch_shape)

    def settle(self) -> None:
        """Finds the scale, where something else knows it: copies have one of their own then."""
        if self._known_scale is not None:
            self._scale, self._known_scale = self.scale, None

    @property
    def _compact_scale(self) -> Tensor:
        return (self._origin or self).scale

    def expand(self, batch_shape: Any, _instance: Any = None) -> SoftplusNormal:
        """The same distribution with a larger batch shape, sharing the parameters' memory."""
        new = self._get_checked_instance(SoftplusNormal, _instance)
        new.loc, new.rho = self.loc.expand(batch_shape), self.rho.expand(batch_shape)
        new._scale = new._known_scale = new._log_q = new._draw = new._next = None
        new._origin = self._origin or self  # one softplus and logarithm for all copies
        Distribution.__init__(new, Size(batch_shape), validate_args=False)
        return new

    def rsample(self, sample_shape: Any = Size()) -> Tensor:
        r"""$\mu + \sigma\epsilon$ with standard Normal $\epsilon$, of the extended shape."""
        if self._next is not None and not sample_shape:
            value, self._next = self._next, None
            return value
        shape = self._extended_shape(Size(sample_shape))
        return self.with_noise(torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device))

    def with_noise(self, noise: Tensor) -> Tensor:
        r"""The draw $\mu + \sigma\epsilon$ for given noise $\epsilon$."""
        if self._scale is None and self._origin is None and noise.shape == self.rho.shape:
            value, self._scale, self._log_q = draw(self.loc, self.rho, noise)
        else:
            value, self._log_q = torch.addcmul(self.loc, self.scale, noise), None
        self._draw = (value, noise)
        return value

    def remembers(self, value: Tensor) -> bool:
        """Return whether a value is the latest draw."""
        return self._draw is not None and value is self._draw[0]

    def sample(self, sample_shape: Any = Size()) -> Tensor:
        """As `rsample`, without gradient; not remembered, as the noise would hide the score."""
        scale = self.scale  # cached, and so with its gradient
        with torch.no_grad():
            shape = self._extended_shape(Size(sample_shape))
            noise = torch.randn(shape, dtype=scale.dtype, device=scale.device)
            return torch.addcmul(self.loc, scale, noise)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density in nats, elementwise."""
        z = self._standardised(value)
        return torch.addcmul(-HALF_LOG_2PI - self._compact_scale.log(), z, z, value=-0.5)

    def sum_log_prob(self, value: Tensor, dims: int) -> Tensor:
        """Log-density in nats, summed over the last ``dims`` dimensions."""
        log_q = self._log_q if self.remembers(value) else None
        if log_q is not None and log_q.dim() == len(self.batch_shape) - dims:
            return log_q
        of_noise = -0.5 * total(self._standardised(value).square(), dims)
        of_scale = total(self._compact_scale.log().expand(self.batch_shape), dims)
        count = math.prod(self.batch_shape[len(self.batch_shape) - dims :])
        return of_noise - of_scale - count * HALF_LOG_2PI

    def to_event(self, reinterpreted_batch_ndims: int | None = None) -> Event | SoftplusNormal:
        """The last dimensions (all by default) as one event."""
        return to_event(self, reinterpreted_batch_ndims)

    def _standardised(self, value: Tensor) -> Tensor:
        if self._draw is not None and value is self._draw[0]:
            return self._draw[1]
        return (value - self.loc) / self.scale


class PrunedNormal(SoftplusNormal):
    r"""`SoftplusNormal` in which entries with $\rho = -\infty$ are removed.

    A removed entry is exactly 0 and stays so in training: it has scale 0, no gradient, and
    contributes nothing to the log-density, which is that of the remaining entries.
    """

    def __init__(self, loc: Tensor, rho: Tensor) -> None:
        self.unpruned = rho > -math.inf
        super().__init__(loc.where(self.unpruned, 0.0), rho.where(self.unpruned, 0.0))
        self._scale = softplus(self.rho).where(self.unpruned, 0.0)

    def expand(self, batch_shape: Any, _instance: Any = None) -> PrunedNormal:
        """The same distribution with a larger batch shape, sharing the parameters' memory."""
        new = self._get_checked_instance(PrunedNormal, _instance)
        new.unpruned = self.unpruned.expand(batch_shape)
        super().expand(batch_shape, _instance=new)
        return new

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density of the unpruned entries in nats, 0 for the removed ones."""
        unpruned = SoftplusNormal(self.loc, self.rho)
        unpruned._draw = self._draw
        return unpruned.log_prob(value).where(self.unpruned, 0.0)

    def sum_log_prob(self, value: Tensor, dims: int) -> Tensor:
        """The same, summed over the last ``dims`` dimensions."""
        return total(self.log_prob(value), dims)
