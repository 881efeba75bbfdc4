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


class Detached(TorchDistribution):
    """A distribution by its log-density alone: a KL in closed form would have no gradient."""

    has_rsample = True

    def __init__(self, detached: Any) -> None:
        self.detached = detached
        super().__init__(detached.batch_shape, detached.event_shape, validate_args=False)

    support = property(lambda self: self.detached.support)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density in nats; its gradient reaches ``value`` alone."""
        log_prob: Tensor = self.detached.log_prob(value)
        return log_prob
