# SPDX-License-Identifier: Apache-2.0
"""Distributions of the weights that pruning has left.

A removed weight is 0 in every draw. All others lie in one vector, as short as they are few; only
the network sees it spread out over the weights' tensors, with zeros between.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
from torch import Size, Tensor
from torch.distributions import Distribution

from pyro_bbb.distributions.normal import PrunedNormal


class PrunedEvent(dist.Independent):
    """The distribution of a tensor of weights, of which the unpruned ones count."""

    def __init__(self, event: Any, unpruned: Tensor) -> None:
        base = event.base_dist.expand(event.batch_shape + event.event_shape)
        super().__init__(base.mask(unpruned), len(event.event_shape), validate_args=False)
        self.event, self.unpruned = event, unpruned

    def expand(self, batch_shape: Any, _instance: Any = None) -> PrunedEvent:
        """The same with a larger batch shape."""
        return PrunedEvent(self.event.expand(batch_shape), self.unpruned)


class FlatPrunedNormal(PrunedNormal):
    """A `PrunedNormal` whose next draw is known, and which is made where more is needed of it.

    The function ``noise`` spreads the draw's noise into the one tensor of a list.
    """

    _known_scale = None

    def __init__(
        self, loc: Tensor, rho: Tensor, value: Tensor, noise: Callable[[], list[Tensor]]
    ) -> None:
        self._given, self._value, self._next, self._noise = (loc, rho), value, value, noise
        Distribution.__init__(self, value.shape, validate_args=False)

    @functools.cached_property
    def _itself(self) -> PrunedNormal:
        return PrunedNormal(*self._given).expand(self.batch_shape)

    loc = property(lambda self: self._itself.loc)
    rho = property(lambda self: self._itself.rho)
    unpruned = property(lambda self: self._itself.unpruned)
    scale = property(lambda self: self._itself.scale)

    def rsample(self, sample_shape: Any = Size()) -> Tensor:
        """The known draw at first, and then new ones."""
        if self._next is not None and not sample_shape:
            value, self._next = self._next, None
            return value
        return self._itself.rsample(sample_shape)

    def remembers(self, value: Tensor) -> bool:
        """Return whether a value is the known draw."""
        return value is self._value

    @property
    def _draw(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (noise,) = self._noise()
        return self._value, noise
