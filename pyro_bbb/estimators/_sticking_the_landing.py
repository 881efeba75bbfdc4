# SPDX-License-Identifier: Apache-2.0
r"""Sticking the landing (Roeder et al. 2017): $\ln q$ is scored at detached parameters.

Of $\ln q_\theta(w)$, $w = \mu + \sigma\epsilon$, the gradient in $\theta$ at fixed w is zero in the
mean, and left out. The gradient in w remains, $-\epsilon / \sigma$ for independent Normals.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyro.distributions import TorchDistribution
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_bbb._utils.locking import GLOBAL_LOCK
from pyro_bbb.distributions import map_tensors
from pyro_bbb.estimators._per_example import Drawn


@contextmanager
def sticking_the_landing() -> Iterator[None]:
    r"""Leave out the score $\nabla_\theta \ln q_\theta(w)$ at fixed w, whose mean is 0."""
    with GLOBAL_LOCK, DetachScores():
        yield


class DetachScores(Drawn):
    """Scores draws under their distribution with its parameters detached."""

    def _drawn(self, msg: Any) -> None:
        if any(isinstance(t, nn.Module) for t in getattr(msg["fn"], "transforms", ())):
            raise ValueError(
                f"guide site {msg['name']!r} is a flow, whose density at its draws cannot be "
                "constant; use the estimator 'reparam'"
            )
        if isinstance(msg["fn"], Distribution) and msg["fn"].has_rsample:
            msg["fn"] = Detached(map_tensors(msg["fn"], Tensor.detach))


class Detached(TorchDistribution):
    """A distribution by its log-density alone: a KL in closed form would have no gradient."""

    has_rsample = True
    support = property(lambda self: self.detached.support)

    def __init__(self, detached: Any) -> None:
        self.detached = detached
        super().__init__(detached.batch_shape, detached.event_shape, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density in nats; its gradient reaches ``value`` alone."""
        log_prob: Tensor = self.detached.log_prob(value)
        return log_prob
