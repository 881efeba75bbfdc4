"""What pruning has left of the weights: drawn and scored alone, as if there were no others.

A removed weight is 0 in every draw. All others lie in one vector, as short as they are few; only
the network sees it spread out over the weights' tensors, with zeros between.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Size, Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributions import Distribution

from pyro_bbb._memory import blank
from pyro_bbb._normals import PrunedNormal
from pyro_bbb._whole import Whole


class Kept:
    """Which entries of the weights are left.

    Args:
        masks: by site name, true where an entry is left.

    Attributes:
        masks: these.
        places: where the entries are in the flattened tensors, by site name.
    """

    def __init__(self, masks: Mapping[str, Tensor]) -> None:
        self.masks = dict(masks)
        self.places = {name: x.flatten().nonzero().squeeze(1) for name, x in masks.items()}


def kept_by(guide: Any) -> Kept | None:
    """What is left of a guide's weights, if any were removed."""
    masks = getattr(guide, "kept", {})
    return Kept(masks) if masks else None


def of_kept(model: Callable[..., Any], kept: Kept | None) -> Callable[..., Any]:
    """The model with the prior of what is left of its weights, if any were removed."""
    return model if kept is None else _Keep(kept.masks)(model)


class _Keep(Messenger):
    """Leaves out the priors of removed weights."""

    def __init__(self, masks: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.masks = masks

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.masks and isinstance(msg["fn"], dist.Independent):
            msg["fn"] = KeptEvent(msg["fn"], self.masks[msg["name"]])


class KeptEvent(dist.Independent):
    """The distribution of a tensor of weights, of which some count.

    Args:
        event: the distribution of all.
        kept: true where an entry counts, of the event's shape.
    """

    def __init__(self, event: Any, kept: Tensor) -> None:
        base = event.base_dist.expand(event.batch_shape + event.event_shape)
        super().__init__(base.mask(kept), len(event.event_shape), validate_args=False)
        self.event, self.kept = event, kept

    def expand(self, batch_shape: Any, _instance: Any = None) -> KeptEvent:
        """The same with a larger batch shape."""
        return KeptEvent(self.event.expand(batch_shape), self.kept)


class KeptNormal(PrunedNormal):
    """A `PrunedNormal` whose next draw is known, and which is made where more is asked of it.

    Args:
        loc: mean.
        rho: unconstrained scale, minus infinity where an entry is removed.
        value: the draw, ``[..., *shape]``.
        noise: spreads its standard Normal noise, into the one tensor of a list.
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
    kept = property(lambda self: self._itself.kept)
    scale = property(lambda self: self._itself.scale)

    def rsample(self, sample_shape: Any = Size()) -> Tensor:
        """The known draw at first, and then new ones."""
        if self._next is not None and not sample_shape:
            value, self._next = self._next, None
            return value
        return self._itself.rsample(sample_shape)

    def remembers(self, value: Tensor) -> bool:
        """Whether a value is the known draw."""
        return value is self._value

    @property
    def _draw(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (noise,) = self._noise()
        return self._value, noise


def gathered(tensors: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
    """The entries of tensors at their places, side by side, ``[k]``."""
    entries: Tensor = Gather.apply(tuple(places), *tensors)
    return entries


def spread(vector: Tensor, places: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors ``[..., *shape]`` that hold ``[..., k]`` numbers at their places, and 0 elsewhere."""
    return list(Spread.apply(vector, tuple(places), tuple(x.shape for x in like)))


class Gather(Function):
    """`gathered`."""

    @staticmethod
    def forward(places: tuple[Tensor, ...], *tensors: Tensor) -> Tensor:
        return _entries(tensors, places, Size())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.places, *tensors = inputs
        ctx.shapes = tuple(x.shape for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_tensors(grad, ctx.places, ctx.shapes)


class Spread(Function):
    """`spread`."""

    @staticmethod
    def forward(
        vector: Tensor, places: tuple[Tensor, ...], shapes: tuple[Size, ...]
    ) -> tuple[Tensor, ...]:
        return tuple(_tensors(vector, places, shapes))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        vector, ctx.places, _ = inputs
        ctx.lead = vector.shape[:-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _entries(grads, ctx.places, ctx.lead), None, None


def _entries(tensors: Sequence[Tensor], places: Sequence[Tensor], lead: Size) -> Tensor:
    """Entries of tensors ``[*lead, *shape]``, each vector of ``lead`` by itself: that is faster."""
    count = sum(len(place) for place in places)
    out = Whole(blank(tensors[0], lead + (count,)), places)
    for x, place, part in zip(tensors, places, out.parts, strict=True):
        for vector, room in zip(_vectors(x, lead), _vectors(part, lead), strict=True):
            torch.index_select(vector, 0, place, out=room)
    return out.vector


def _tensors(vector: Tensor, places: Sequence[Tensor], shapes: Sequence[Size]) -> list[Tensor]:
    lead, parts = vector.shape[:-1], Whole(vector, places).parts
    tensors = [blank(vector, lead + shape).zero_() for shape in shapes]
    for x, place, part in zip(tensors, places, parts, strict=True):
        for room, entries in zip(_vectors(x, lead), _vectors(part, lead), strict=True):
            room.scatter_(0, place, entries)
    return tensors


def _vectors(x: Tensor, lead: Size) -> Sequence[Tensor]:
    return x.reshape(lead.numel(), -1).unbind()


# `apply` asks for it at every call; to work it out takes as long as a small layer
Gather.forward.__signature__ = inspect.signature(Gather.forward)  # type: ignore[attr-defined]
Spread.forward.__signature__ = inspect.signature(Spread.forward)  # type: ignore[attr-defined]
