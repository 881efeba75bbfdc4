# SPDX-License-Identifier: Apache-2.0
r"""All weights of a guide sampled as one vector, and scored as one flattened site.

A small operation costs as much as one on thousands of weights: on a CPU by what surrounds it, on a
GPU by its launch. Where the posterior of every weight is a Normal of its own, and the prior of all
weights the same (of few weights, any fixed Normals), one operation on the vector stands for one on
each weight tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from pyro import poutine
from torch import Size, Tensor
from torch.distributions import Distribution

from pyro_bbb._handlers.pruned_sites import UnprunedEntries
from pyro_bbb._ops.buffers import empty_from_pool
from pyro_bbb._ops.flat import FlatTensors, gathered, joined, joined_rows, spread
from pyro_bbb._ops.multi_sample import shared_by
from pyro_bbb._ops.reparameterize import draw_many
from pyro_bbb._ops.step_context import current_step
from pyro_bbb._ops.tuning import SMALL
from pyro_bbb.distributions import SoftplusNormal, SummedNormal
from pyro_bbb.distributions.detached import Detached, DetachedSample
from pyro_bbb.distributions.pruned import FlatPrunedNormal, PrunedEvent
from pyro_bbb.distributions.summed_event import Event


def allowed(pruned: bool) -> bool:
    """Return whether weights are sampled into one vector, of a pruned guide the unpruned ones."""
    options = current_step().options
    return options.flat and (not pruned or bool(options.unpruned))


class FlatNormal(SoftplusNormal):
    """The joint distribution of flattened weights, which knows its draw."""

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
        return joined_rows([self._locs])[0].expand(self.batch_shape)


class FlatSample:
    r"""Draws of many weights, $w = \mu + \mathrm{softplus}(\rho)\,\epsilon$, as one vector.

    Its ``value`` is ``[*shape, number of weights]``, with the shape of the plates around, which is
    empty for a single draw. It is scored under ``joint``, or under what ``detached`` makes, with
    detached parameters. Tensors and distributions of each weight tensor are by name.
    """

    masks: Mapping[str, Tensor] = {}  # true where an entry is in the vector, where not all are
    parts: dict[str, SoftplusNormal]  # the first draw of each is its part of the vector
    values: dict[str, Tensor]

    def __init__(
        self, locs: Mapping[str, Tensor], rhos: Mapping[str, Tensor], shape: Size = Size()
    ) -> None:
        values, noise, scale = self._draw(locs, list(locs.values()), list(rhos.values()), shape)
        self.values = dict(zip(locs, values, strict=True))
        drawn = zip(values, noise.parts, strict=True)
        self.parts = {
            name: SoftplusNormal.drawn(
                loc.expand(shape + loc.shape), rhos[name], *each, partial(scale.part, number)
            )
            for number, ((name, loc), each) in enumerate(zip(locs.items(), drawn, strict=True))
        }

    def _draw(
        self, names: Iterable[str], locs: list[Tensor], rhos: list[Tensor], shape: Size
    ) -> tuple[list[Tensor], FlatTensors, FlatTensors]:
        """The tensors' draws, their noise and scale."""
        count = sum(loc.numel() for loc in locs)
        noise = FlatTensors(empty_from_pool(locs[0], shape + (count,)), locs)
        draw_noise(noise)
        self.value, scale, log_q, values = draw_many(locs, rhos, noise, shared_by(names, rhos))
        self.joint = FlatNormal(locs, self.value, noise.vector, scale.vector, log_q)
        self.detached = partial(DetachedSample, noise.vector, scale.vector, log_q)
        return values, noise, scale


class FlatPrunedSample(FlatSample):
    """A `FlatSample` of the unpruned entries; all others are 0 in the weight tensors."""

    def __init__(
        self,
        locs: Mapping[str, Tensor],
        rhos: Mapping[str, Tensor],
        shape: Size,
        unpruned: UnprunedEntries,
    ) -> None:
        indices, self.masks = [unpruned.indices[name] for name in locs], unpruned.masks
        loc, rho = (gathered(list(tensors.values()), indices) for tensors in (locs, rhos))
        (drawn,), noise, _ = self._draw(locs, [loc], [rho], shape)
        values = spread(drawn, indices, list(locs.values()))
        self.values = dict(zip(locs, values, strict=True))
        noises = FlatTensors(noise.vector, indices).parts
        self.parts = {
            name: FlatPrunedNormal(loc, rhos[name], value, partial(spread, some, [index], [loc]))
            for (name, loc), value, some, index in zip(
                locs.items(), values, noises, indices, strict=True
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
    step = current_step()
    unpruned = step.options.unpruned
    if unpruned and not locs.keys() <= unpruned.indices.keys():
        return {}
    vector = (
        FlatPrunedSample(locs, rhos, shape, unpruned) if unpruned else FlatSample(locs, rhos, shape)
    )
    step.sample = vector
    return vector.parts


def get_traces(model: Any, guide: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Traces of the model and the guide, not yet scored; a vector of weights is one site."""
    guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
    step = current_step()
    vector, step.sample = step.sample, None
    if vector is not None:
        undo_copies(vector, guide_trace)
    model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*args, **kwargs)
    if vector is not None:
        fuse_sites(vector, model_trace, guide_trace)
    return model_trace, guide_trace


def undo_copies(sample: FlatSample, guide_trace: Any) -> None:
    """Restore the sample's tensor at each site where a handler has put an equal copy of it."""
    for name, value in sample.values.items():
        other = guide_trace.nodes[name]["value"] if name in guide_trace else value
        alike = other.shape == value.shape and other.requires_grad == value.requires_grad
        if other is not value and alike and torch.equal(other, value):
            guide_trace.nodes[name]["value"] = value


def fuse_sites(vector: FlatSample, model_trace: Any, guide_trace: Any) -> None:
    """Fuse the weights of a sample into one site in both traces, where they can be scored as one.

    Its node has the weights' own under ``members``.
    """
    traces = guide_trace, model_trace
    guide, model = ([trace.nodes.get(name) for name in vector.parts] for trace in traces)
    if None in guide or None in model or not (_alike(guide) and _alike(model)):
        return
    detached = {type(site["fn"]) is Detached for site in guide}
    posteriors, shape = [_original(site["fn"]) for site in guide], vector.value.shape
    priors = [_of_vector(site["fn"], vector.masks.get(site["name"])) for site in model]
    if len(detached) > 1 or not _are_events([*posteriors, *priors], shape[:-1]):
        return
    prior = _prior_of_all(priors, shape)
    if prior is not None and _are_parts(guide, posteriors, vector):
        joint = vector.detached() if True in detached else vector.joint.to_event(1)
        _replace(guide_trace, vector, joint)
        _replace(model_trace, vector, prior)


def _alike(sites: list[Any]) -> bool:
    """Return whether the sites have one scale and one mask."""
    scale, mask = sites[0]["scale"], sites[0]["mask"]
    return all(
        (site["scale"] is scale or not isinstance(scale, Tensor) and site["scale"] == scale)
        and site["mask"] is mask
        for site in sites
    )


def _original(fn: Any) -> Any:
    return fn.original if type(fn) is Detached else fn


def _of_vector(fn: Any, mask: Tensor | None) -> Any:
    """The prior of a tensor, of which a vector may hold the entries that count and no others."""
    if mask is None:
        return fn
    return fn.event if type(fn) is PrunedEvent and fn.unpruned is mask else None


def _are_events(fns: Iterable[Any], shape: Size) -> bool:
    """Return whether each is an event with one log-density for each draw."""
    return all(type(fn) is Event and fn.batch_shape == shape for fn in fns)


def _are_parts(sites: list[Any], posteriors: list[Any], sample: FlatSample) -> bool:
    """Return whether each site has the sample's value under the posterior that drew it."""
    return all(
        site["value"] is sample.values[site["name"]]
        and _same_posterior(fn.base_dist, sample.parts[site["name"]])
        for site, fn in zip(sites, posteriors, strict=True)
    )


def _same_posterior(one: Any, other: SoftplusNormal) -> bool:
    """Return whether two distributions are one, or have the same parameters, expanded or not."""
    if one is other or not type(one) is type(other) is SoftplusNormal:
        return one is other
    return all(
        a.data_ptr() == b.data_ptr() for a, b in ((one.loc, other.loc), (one.rho, other.rho))
    )


def _prior_of_all(priors: list[Event], shape: Size) -> Event | None:
    """The prior of vectors ``[..., number of weights]``, where each weight has the same."""
    first, keys = priors[0], {prior.same_for_each for prior in priors}
    if len(keys) > 1 or None in keys:
        return _prior_of_few(priors, shape)
    if first.of_vector is None or first.of_vector.shape() != shape:
        first.of_vector = first.base_dist.single().expand(shape).to_event(1)
    return first.of_vector


def _prior_of_few(priors: list[Event], shape: Size) -> Event | None:
    """The joint of fixed Normals, each weight with its own, where joining takes no time."""
    normals: list[Any] = [prior.base_dist for prior in priors]
    if shape.numel() >= SMALL or any(type(normal) is not SummedNormal for normal in normals):
        return None
    pairs = [(normal.loc, normal.scale) for normal in normals]
    if any(x.requires_grad or x.dtype != pairs[0][0].dtype for pair in pairs for x in pair):
        return None
    if sum(loc.numel() for loc, _ in pairs) != shape.numel():  # as of pruned weights
        return None
    dims = len(shape) - 1
    loc, scale = (joined([x.flatten(dims) for x in column]) for column in zip(*pairs, strict=True))
    return SummedNormal(loc, scale, validate_args=False).to_event(1)


def _replace(trace: Any, vector: FlatSample, fn: Event | DetachedSample) -> None:
    members = {name: trace.nodes.pop(name) for name in vector.parts}
    name, node = next(iter(members.items()))
    trace.nodes[name] = {**node, "fn": fn, "value": vector.value, "members": members}
