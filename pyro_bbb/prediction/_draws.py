# SPDX-License-Identifier: Apache-2.0
"""Posterior draws of the weights: from a guide, from MCMC, or given by the user."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from pyro import poutine
from pyro.infer import MCMC
from pyro.infer.autoguide import AutoGuide
from torch import Tensor, nn

from pyro_bbb._handlers.vmap import stack
from pyro_bbb._ops.tuning import ONE_BY_ONE as _LARGE
from pyro_bbb._ops.tuning import SAMPLE_CHUNK as _CHUNK
from pyro_bbb._utils.distributed import Processes
from pyro_bbb._utils.inputs import Rows
from pyro_bbb._utils.locking import locked
from pyro_bbb.guides import AutoSoftplusNormal
from pyro_bbb.models import BayesianModel
from pyro_bbb.prediction._weight_samples import Draws


def posterior_draws(model: BayesianModel, guide: Any, x: Rows, num_samples: int) -> Iterator[Draws]:
    """The posterior's draws in chunks, each ``[s, ...]`` by site name."""
    return split_draws(model, guide, x, num_samples, Processes())[0]


def split_draws(
    model: BayesianModel, guide: Any, x: Rows, num_samples: int, group: Processes
) -> tuple[Iterator[Draws], list[int]]:
    """Draws of this process in chunks, at least one, and the number of draws of each process."""
    given = given_draws(model, guide)
    if given is None:
        counts = group.split_counts(num_samples, unit=getattr(guide, "size", 1))
        return _sample_guide(guide, x, group.at_least_one(counts)), counts
    last = _count(given) - 1
    chosen = torch.linspace(0, last, min(num_samples, last + 1)).round().long()
    counts = group.split_counts(len(chosen))
    mine = chosen.split(counts)[group.rank]
    return _select(given, mine if len(mine) else chosen[:1]), counts


def _select(given: Draws, chosen: Tensor) -> Iterator[Draws]:
    """Some of the given draws, in chunks."""
    numbers = sum(values[0].numel() for values in given.values())
    for rows in chosen.split(_chunk(numbers, one_by_one=True)):
        yield {name: values[rows] for name, values in given.items()}


def _sample_guide(guide: Any, x: Rows, num_samples: int) -> Iterator[Draws]:
    """Draws of a guide in chunks."""
    parameters = guide.parameters() if isinstance(guide, nn.Module) else ()
    numbers = sum(parameter.numel() for parameter in parameters)
    size = min(num_samples, _chunk(numbers, one_by_one=type(guide) is AutoSoftplusNormal))
    members = getattr(guide, "size", 1)
    size = math.ceil(size / members) * members  # an ensemble's draws go round its members
    sample = _sampler(guide, x[:1])
    for start in range(0, num_samples, size):
        yield sample(min(size, num_samples - start))


def _chunk(numbers: int, one_by_one: bool) -> int:
    """Draws at once; one by one they take least memory, where that costs no time."""
    return 1 if one_by_one and numbers >= _LARGE else max(1, _CHUNK // (1 + numbers))


@locked
def _sampler(guide: Any, x: Rows) -> Callable[[int], Draws]:
    """A function from a number to so many draws; their common parts are computed once."""
    if type(guide) is AutoSoftplusNormal:
        posteriors = {each.name: guide._posterior(each) for each in guide._known_latents()}
        return locked(lambda count: {name: q.sample((count,)) for name, q in posteriors.items()})
    if hasattr(guide, "sample_posterior"):
        sample: Callable[[int], Draws] = guide.sample_posterior
        return sample
    return locked(lambda count: stack([_one_draw(guide, x) for _ in range(count)]))


def _count(draws: Draws) -> int:
    return len(next(iter(draws.values())))


def given_draws(model: BayesianModel, guide: Any) -> dict[str, Tensor] | None:
    """Draws that the user gave, checked; ``None`` where there is a guide to draw from."""
    if isinstance(guide, MCMC):
        guide = guide.get_samples()
    if not isinstance(guide, Mapping):
        _check_guide(guide)
        return None
    for name, values in guide.items():
        if not isinstance(values, Tensor):
            raise TypeError(f"guide must hold tensors by site name, got {values!r} of {name!r}")
    counts = {name: len(values) if values.dim() else 0 for name, values in guide.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise ValueError(f"guide must hold equally many draws of its latents, got {counts}")
    for name, shape in model.latent_shapes().items():
        found = guide[name].shape[1:] if name in guide else shape
        if found != shape:  # which might broadcast
            raise ValueError(
                f"guide must hold draws of {name!r} of shape {list(shape)}, got {list(found)}"
            )
    return dict(guide)


def _check_guide(guide: Any) -> None:
    if not callable(guide):
        kind = type(guide).__name__
        raise TypeError(f"guide must be a guide, an MCMC or a dict of draws, got {kind}")
    stock = isinstance(guide, AutoGuide) and not hasattr(guide, "sample_posterior")
    if stock and guide.prototype_trace is None:  # it would take the observations for a latent
        raise ValueError(f"guide must be trained before, got {type(guide).__name__} that never ran")


def medians(guide: Any, x: Rows) -> dict[str, Tensor]:
    if not hasattr(guide, "median"):
        raise TypeError(f"guide must have a method median, got {type(guide).__name__}")
    medians: dict[str, Tensor] = guide.median(x)
    return medians


def _one_draw(guide: Any, x: Rows) -> dict[str, Tensor]:
    with torch.no_grad():
        trace = poutine.trace(guide).get_trace(x, None, 1.0)
    return {name: trace.nodes[name]["value"] for name in trace.stochastic_nodes}
