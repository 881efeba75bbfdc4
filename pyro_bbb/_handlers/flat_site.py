r"""Weights side by side: all of one draw in one vector, drawn at once and scored as one site.

A small operation costs as much as one on thousands of weights: on a CPU by what surrounds it, on a
GPU by its launch. Where the posterior of every weight is a Normal of its own, and the prior of all
weights the same, one operation on the vector stands for one on each weight tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from pyro import poutine
from torch import Size, Tensor
from torch.distributions import Distribution

from pyro_bbb._handlers.pruned_sites import UnprunedEntries
from pyro_bbb._ops.buffers import empty_from_pool
from pyro_bbb._ops.flat import FlatTensors, gathered, spread
from pyro_bbb._ops.reparameterize import draw_many
from pyro_bbb.distributions import SoftplusNormal
from pyro_bbb.distributions.detached import Held, HeldDraw
from pyro_bbb.distributions.pruned import FlatPrunedNormal, PrunedEvent
from pyro_bbb.distributions.summed_event import Event

_JOINED: ContextVar[dict[Any, Any] | None] = ContextVar("joined", default=None)


@contextmanager
def side_by_side(unpruned: UnprunedEntries | None = None) -> Iterator[None]:
    """Guides may draw their weights into one vector; parameters stay as they are inside.

    Args:
        unpruned: what pruning has left of the guide's weights, if that is known.
    """
    token = _JOINED.set({"unpruned": unpruned})
    try:
        yield
    finally:
        _JOINED.reset(token)


def allowed(pruned: bool) -> bool:
    """Whether weights are to be drawn into one vector, those of a pruned guide by what is left."""
    memo = _JOINED.get()
    return memo is not None and (not pruned or bool(memo["unpruned"]))


class FlatNormal(SoftplusNormal):
    """The distribution of vectors of weights that lie side by side, its draws remembered."""

    def __init__(
        self, locs: Iterable[Tensor], value: Tensor, noise: Tensor, scale: Tensor, log_q: Tensor
    ) -> None:
        self._locs = list(locs)
        self._scale, self._log_q, self._draw = scale, log_q, (value, noise)
        self._next = self._origin = None
        Distribution.__init__(self, value.shape, validate_args=False)

    @functools.cached_property
    def loc(self) -> Tensor:  # type: ignore[override]
        """Means, which only a closed form asks for."""
        return torch.cat([loc.flatten() for loc in self._locs]).expand(self.batch_shape)


class FlatSample:
    r"""Draws of many weights, $w = \mu + \mathrm{softplus}(\rho)\,\epsilon$.

    Args:
        locs: means of the weight tensors, by name.
        rhos: unconstrained scales, likewise.
        shape: the plates around, empty for a single draw.

    Attributes:
        value: the draws, ``[*shape, number of weights]``.
        whole: the distribution of the vectors.
        held: makes what scores the draws where the parameters are held fixed.
        parts: the distributions of the weight tensors by name; the first draw of each is its part
            of the vectors.
        masks: which entries of the weight tensors are in the vector, where not all are.
    """

    masks: Mapping[str, Tensor] = {}
    parts: dict[str, SoftplusNormal]

    def __init__(
        self, locs: Mapping[str, Tensor], rhos: Mapping[str, Tensor], shape: Size = Size()
    ) -> None:
        values, noise, scale = self._draw(list(locs.values()), list(rhos.values()), shape)
        drawn = zip(values, noise.parts, strict=True)
        self.parts = {
            name: SoftplusNormal.drawn(
                loc.expand(shape + loc.shape), rhos[name], *each, partial(scale.part, number)
            )
            for number, ((name, loc), each) in enumerate(zip(locs.items(), drawn, strict=True))
        }

    def _draw(
        self, locs: list[Tensor], rhos: list[Tensor], shape: Size
    ) -> tuple[list[Tensor], FlatTensors, FlatTensors]:
        """The tensors' draws, their noise and scale."""
        count = sum(loc.numel() for loc in locs)
        noise = FlatTensors(empty_from_pool(locs[0], shape + (count,)), locs)
        draw_noise(noise)
        self.value, scale, log_q, values = draw_many(locs, rhos, noise)
        self.whole = FlatNormal(locs, self.value, noise.vector, scale.vector, log_q)
        self.held = partial(HeldDraw, noise.vector, scale.vector, log_q)
        return values, noise, scale


class FlatPrunedSample(FlatSample):
    """A `FlatSample` of the entries that pruning has left; in the weight tensors all others are 0.

    Args:
        locs: means of the weight tensors, by name.
        rhos: unconstrained scales, likewise.
        shape: the plates around, empty for a single draw.
        kept: the entries of these tensors.
    """

    def __init__(
        self,
        locs: Mapping[str, Tensor],
        rhos: Mapping[str, Tensor],
        shape: Size,
        unpruned: UnprunedEntries,
    ) -> None:
        places, self.masks = [unpruned.places[name] for name in locs], unpruned.masks
        loc, rho = (gathered(list(tensors.values()), places) for tensors in (locs, rhos))
        (drawn,), noise, _ = self._draw([loc], [rho], shape)
        values = spread(drawn, places, list(locs.values()))
        noises = FlatTensors(noise.vector, places).parts
        self.parts = {
            name: FlatPrunedNormal(loc, rhos[name], value, partial(spread, some, [place], [loc]))
            for (name, loc), value, some, place in zip(
                locs.items(), values, noises, places, strict=True
            )
        }


def draw_noise(noise: FlatTensors) -> None:
    """Standard Normal numbers; for a single draw what each tensor would draw by itself."""
    for some in noise.parts if noise.vector.dim() == 1 else [noise.vector]:
        some.normal_()


def sample_flat(
    locs: Mapping[str, Tensor], rhos: Mapping[str, Tensor], shape: Size
) -> dict[str, Any]:
    """The distributions of the parts of a new `FlatSample`, which `get_traces` will ask for."""
    memo: dict[Any, Any] = _JOINED.get() or {}
    unpruned = memo.get("unpruned")
    if unpruned and not locs.keys() <= unpruned.places.keys():
        return {}
    vector = (
        FlatPrunedSample(locs, rhos, shape, unpruned) if unpruned else FlatSample(locs, rhos, shape)
    )
    memo["vector"] = vector
    return vector.parts


def get_traces(model: Any, guide: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Traces of the model and the guide, not yet scored; a vector of weights is one site."""
    guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
    vector = (_JOINED.get() or {}).pop("vector", None)
    model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*args, **kwargs)
    if vector is not None:
        fuse_sites(vector, model_trace, guide_trace)
    return model_trace, guide_trace


def fuse_sites(vector: FlatSample, model_trace: Any, guide_trace: Any) -> None:
    """Makes one site of a vector's weights in both traces, where they can be scored as one.

    Its node has the weights' own under ``members``.
    """
    traces = guide_trace, model_trace
    guide, model = ([trace.nodes.get(name) for name in vector.parts] for trace in traces)
    if None in guide or None in model or not (_alike(guide) and _alike(model)):
        return
    held = {type(site["fn"]) is Held for site in guide}
    posteriors, shape = [_drawn_from(site["fn"]) for site in guide], vector.value.shape
    priors = [_of_vector(site["fn"], vector.masks.get(site["name"])) for site in model]
    if len(held) > 1 or not _are_events([*posteriors, *priors], shape[:-1]):
        return
    prior = _prior_of_all(priors, shape)
    if prior is not None and _are_parts(guide, posteriors, vector):
        whole = vector.held() if True in held else vector.whole.to_event(1)
        _replace(guide_trace, vector, whole)
        _replace(model_trace, vector, prior)


def _alike(sites: list[Any]) -> bool:
    """Whether log-densities of the sites count alike: of one scale and mask."""
    scale, mask = sites[0]["scale"], sites[0]["mask"]
    return all(
        (site["scale"] is scale or not isinstance(scale, Tensor) and site["scale"] == scale)
        and site["mask"] is mask
        for site in sites
    )


def _drawn_from(fn: Any) -> Any:
    return fn.drawn_from if type(fn) is Held else fn


def _of_vector(fn: Any, mask: Tensor | None) -> Any:
    """The prior of a tensor, of which a vector may hold the entries that count and no others."""
    if mask is None:
        return fn
    return fn.event if type(fn) is PrunedEvent and fn.unpruned is mask else None


def _are_events(fns: Iterable[Any], shape: Size) -> bool:
    """Whether each has one log-density for each draw, a sum."""
    return all(type(fn) is Event and fn.batch_shape == shape for fn in fns)


def _are_parts(sites: list[Any], posteriors: list[Any], vector: FlatSample) -> bool:
    """Whether the sites hold the vector's draw, each scored under the posterior it is from."""
    parts = zip(sites, posteriors, vector.parts.values(), strict=True)
    return all(fn.base_dist is q and q.remembers(site["value"]) for site, fn, q in parts)


def _prior_of_all(priors: list[Event], shape: Size) -> Event | None:
    """The prior of vectors ``[..., number of weights]``, where each weight has the same."""
    first, keys = priors[0], {prior.same_for_each for prior in priors}
    if len(keys) > 1 or None in keys:
        return None
    if first.of_vector is None or first.of_vector.shape() != shape:
        first.of_vector = first.base_dist.single().expand(shape).to_event(1)
    return first.of_vector


def _replace(trace: Any, vector: FlatSample, fn: Event | HeldDraw) -> None:
    members = {name: trace.nodes.pop(name) for name in vector.parts}
    name, node = next(iter(members.items()))
    trace.nodes[name] = {**node, "fn": fn, "value": vector.value, "members": members}
