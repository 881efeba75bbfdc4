# SPDX-License-Identifier: Apache-2.0
"""Many independent weights as one event, whose log-density is summed in few passes over memory.

Pyro's `Independent` sums what its base distribution returns for each weight. With hundreds of
thousands of weights, the passes over memory for these numbers are much of a training step.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro import distributions as dist
from torch import Tensor
from torch.distributions import Independent

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Event(dist.Independent):
    """`Independent` over a distribution with a method ``sum_log_prob(value, dims)``."""

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density of the event in nats, of the batch shape."""
        if self._validate_args:
            self._validate_sample(value)
        value = value.expand(torch.broadcast_shapes(value.shape, self.base_dist.batch_shape))
        log_prob: Tensor = self.base_dist.sum_log_prob(value, self.reinterpreted_batch_ndims)
        return log_prob


def to_event(distribution: Any, dims: int | None) -> Any:
    """Return ``distribution.to_event(dims)``, an `Event` if it sums its own log-density."""
    dims = len(distribution.batch_shape) if dims is None else dims
    family: Any = type(distribution)
    # a subclass may override `log_prob`, of which `sum_log_prob` then is not the sum
    summed, single = (
        next(i for i, base in enumerate(family.__mro__) if name in vars(base))
        for name in ("sum_log_prob", "log_prob")
    )
    if dims > 0 and summed <= single:
        return Event(distribution, dims)
    return dist.TorchDistribution.to_event(distribution, dims)


def innermost(distribution: Any) -> Any:
    """Return the distribution of single numbers within any number of `Independent`."""
    while isinstance(distribution, Independent):
        distribution = distribution.base_dist
    return distribution


def total(x: Tensor, dims: int) -> Tensor:
    """Sum over the last ``dims`` dimensions."""
    return x.sum(tuple(range(-dims, 0))) if dims else x


def unexpanded(x: Tensor) -> Tensor:
    """Reduce the dimensions that only repeat a tensor to length 1: less work per weight."""
    return x[tuple(slice(0, 1) if step == 0 else slice(None) for step in x.stride())]


def batches(
    size: int, in_dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]
) -> list[Tensor]:
    """Return the arguments of a `torch.vmap` rule with the batch dimension first in each."""
    return [
        x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(tensors, in_dims, strict=False)
    ]
