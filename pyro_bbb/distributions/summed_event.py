# SPDX-License-Identifier: Apache-2.0
"""Many independent weights as one event, whose log-density is summed without one number per weight.

Pyro's `Independent` sums what its base distribution returns for each weight. With hundreds of
thousands of weights the passes over memory for these numbers are much of a training step.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from pyro import distributions as dist
from torch import Tensor
from torch.distributions import Independent


class Summable(Protocol):
    """A univariate distribution that sums its log-density over many weights by itself."""

    def sum_log_prob(self, value: Tensor, dims: int) -> Tensor:
        """Log-density of ``value`` in nats, summed over its last ``dims`` dimensions."""


class Event(dist.Independent):
    """`Independent` over a `Summable` distribution.

    Attributes:
        of_vector: the event of many weights in one vector, where one was asked for.
    """

    of_vector: Event | None = None

    @property
    def same_for_each(self) -> Any:
        """Key of the one distribution of all weights; ``None`` if there is none, or unknown."""
        key = getattr(self.base_dist, "same_for_each", None)
        return None if key is None else (type(self.base_dist), *key)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Event:
        """The same with a larger batch shape; of its own it is itself, which may know its draw."""
        if _instance is None and torch.Size(batch_shape) == self.batch_shape:
            return self
        expanded: Event = super().expand(batch_shape, _instance)
        return expanded

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density of the event in nats, of the batch shape."""
        if self._validate_args:
            self._validate_sample(value)
        shape = self.base_dist.batch_shape
        if value.shape != shape:  # else it stays the object that its distribution may remember
            value = value.expand(torch.broadcast_shapes(value.shape, shape))
        log_prob: Tensor = self.base_dist.sum_log_prob(value, self.reinterpreted_batch_ndims)
        return log_prob


def to_event(distribution: Any, dims: int | None) -> Any:
    """Make an event of a `Summable` distribution, as ``distribution.to_event(dims)`` does."""
    dims = len(distribution.batch_shape) if dims is None else dims
    if dims > 0 and _sums_its_own(type(distribution)):
        return Event(distribution, dims)
    return dist.TorchDistribution.to_event(distribution, dims)


def innermost(distribution: Any) -> Any:
    """The distribution of single numbers, within any number of `Independent`."""
    while isinstance(distribution, Independent):
        distribution = distribution.base_dist
    return distribution


def _sums_its_own(kind: type) -> bool:
    """Return whether the sum is of the log-density: a subclass may have another log-density."""
    defining = [
        next(i for i, base in enumerate(kind.__mro__) if name in vars(base))
        for name in ("sum_log_prob", "log_prob")
    ]
    return defining[0] <= defining[1]
