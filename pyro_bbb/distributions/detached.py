# SPDX-License-Identifier: Apache-2.0
r"""Log-densities with detached parameters: their gradient reaches the samples alone.

Roeder et al. (2017), "Sticking the Landing": of $\ln q_\theta(w)$, $w = \mu + \sigma\epsilon$, the
gradient in $\theta$ at fixed w is zero in the mean, and left out. The gradient in w remains,
$-\epsilon / \sigma$ for independent Normals.
"""

from __future__ import annotations

from typing import Any

from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import Distribution

from pyro_bbb._ops.normal import KnownLogProb


class Detached(TorchDistribution):
    """A distribution by its log-density alone: a KL in closed form would have no gradient."""

    has_rsample = True

    def __init__(self, detached: Any, original: Any) -> None:
        self.detached, self.original = detached, original
        super().__init__(detached.batch_shape, detached.event_shape, validate_args=False)

    support = property(lambda self: self.detached.support)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density in nats; its gradient reaches ``value`` alone."""
        log_prob: Tensor = self.detached.log_prob(value)
        return log_prob


class DetachedSample(TorchDistribution):
    r"""Draws ``[..., n]`` of a vector of Normals, whose $\sum\ln q$, in nats, is known."""

    has_rsample = True

    def __init__(self, noise: Tensor, scale: Tensor, log_q: Tensor) -> None:
        self._noise, self._scale, self._log_q = noise, scale.detach(), log_q.detach()
        Distribution.__init__(self, log_q.shape, scale.shape, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """The sums in nats; the value is that of the draws."""
        log_prob: Tensor = KnownLogProb.apply(value, self._noise, self._scale, self._log_q)
        return log_prob
