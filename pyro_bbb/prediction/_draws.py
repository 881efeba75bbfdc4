# SPDX-License-Identifier: Apache-2.0
r"""Posterior draws of the weights, and the network's outputs for each of them.

A draw $w_s \sim q(w)$, or $p(w \mid D)$ of a Markov chain, is one function $f(\cdot, w_s)$ for all
inputs. Draws come in chunks that bound the memory. For few inputs the draws of a chunk run as one
batched pass, and also for a few inputs at a time where the network has ordinary weights (as in
front of a random last layer), whose outputs are common to all draws. Otherwise draws run one by
one, in passes that are large enough without the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from pyro import poutine
from pyro.infer import MCMC
from pyro.infer.autoguide import AutoGuide
from torch import Tensor, nn

from pyro_bbb._utils.distributed import Processes
from pyro_bbb._utils.inputs import Rows
from pyro_bbb._utils.locking import locked
from pyro_bbb.guides import Guide
from pyro_bbb.latents import over_draws, stack
from pyro_bbb.models import BayesianModel

Draws: TypeAlias = Mapping[str, Tensor]  # [s, ...] by site name
Part: TypeAlias = tuple[slice, slice, dict[str, Tensor]]  # draws, inputs, and values for these
ALL = slice(None)

# Draws made together take at most 64 MiB in single precision; those of large networks are made one
# by one, which takes least memory and no more time.
SAMPLE_CHUNK = 2**24  # numbers
ONE_BY_ONE = 2**18  # numbers of one draw
BATCHED_BELOW = 128  # inputs; the passes of one draw with more inputs are large enough


def posterior_draws(model: BayesianModel, guide: Any, x: Rows, num_samples: int) -> Iterator[Draws]:
    """Yield the posterior's draws in chunks, each ``[s, ...]`` by site name."""
    return split_draws(model, guide, x, num_samples, Processes())[0]


def single_draws(
    model: BayesianModel, guide: Any, x: Rows, num_samples: int
) -> Iterator[dict[str, Tensor]]:
    """Yield the posterior's draws one by one, by site name."""
    for chunk in posterior_draws(model, guide, x, num_samples):
        for values in zip(*chunk.values(), strict=True):
            yield dict(zip(chunk, values, strict=True))


def split_draws(
    model: BayesianModel, guide: Any, x: Rows, num_samples: int, group: Processes
) -> tuple[Iterator[Draws], list[int]]:
    """Return this process's draws in chunks, at least one, and each process's number of draws."""
    draws = given_draws(model, guide)
    if draws is None:
        counts = group.split_counts(num_samples, unit=getattr(guide, "size", 1))
        return _guide_draws(guide, x, group.at_least_one(counts)), counts
    last = _count(draws) - 1
    chosen = torch.linspace(0, last, min(num_samples, last + 1)).round().long()
    counts = group.split_counts(len(chosen))
    mine = chosen.split(counts)[group.rank]
    mine = mine if len(mine) else chosen[:1]
    chunk = _chunk(sum(values[0].numel() for values in draws.values()), one_by_one=True)
    return ({name: v[rows] for name, v in draws.items()} for rows in mine.split(chunk)), counts


def given_draws(model: BayesianModel, guide: Any) -> dict[str, Tensor] | None:
    """Return the draws that the user gave, checked; ``None`` for a guide."""
    if isinstance(guide, MCMC):
        guide = guide.get_samples()
    if not isinstance(guide, Mapping):
        if not callable(guide):
            name = type(guide).__name__
            raise TypeError(f"guide must be a guide, an MCMC or a dict of draws, got {name}")
        stock = isinstance(guide, AutoGuide) and not hasattr(guide, "sample_posterior")
        if stock and guide.prototype_trace is None:  # it would take the observations for a latent
            name = type(guide).__name__
            raise ValueError(f"guide must be trained before, got {name} that never ran")
        return None
    for name, values in guide.items():
        if not isinstance(values, Tensor):
            raise TypeError(f"guide must hold tensors by site name, got {values!r} of {name!r}")
    counts = {name: len(values) if values.dim() else 0 for name, values in guide.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise ValueError(f"guide must hold equally many draws of its latents, got {counts}")
    for name, shape in model.latent_shapes().items():
        own_shape = guide[name].shape[1:] if name in guide else shape
        if own_shape != shape:  # which might broadcast
            raise ValueError(
                f"guide must hold draws of {name!r} of shape {list(shape)}, got {list(own_shape)}"
            )
    return dict(guide)


def _guide_draws(guide: Any, x: Rows, num_samples: int) -> Iterator[Draws]:
    """Yield draws of a guide in chunks; an ensemble's chunks have equally many of each member."""
    parameters = guide.parameters() if isinstance(guide, nn.Module) else ()
    numbers = sum(parameter.numel() for parameter in parameters)
    chunk = min(num_samples, _chunk(numbers, one_by_one=getattr(guide, "is_factorised", False)))
    members = getattr(guide, "size", 1)
    chunk = math.ceil(chunk / members) * members
    sample = _sampler(guide, x[:1])
    for start in range(0, num_samples, chunk):
        yield sample(min(chunk, num_samples - start))


def _chunk(numbers: int, one_by_one: bool) -> int:
    """Return the draws of a chunk: 1 takes least memory, where that costs no time."""
    return 1 if one_by_one and numbers >= ONE_BY_ONE else max(1, SAMPLE_CHUNK // (1 + numbers))


@locked
def _sampler(guide: Any, x: Rows) -> Callable[[int], Draws]:
    """Return a function from a count to draws; what they have in common is computed once."""
    if isinstance(guide, Guide):
        return guide.sampler()
    if hasattr(guide, "sample_posterior"):
        sample: Callable[[int], Draws] = guide.sample_posterior
        return sample

    def one_draw() -> dict[str, Tensor]:
        with torch.no_grad():
            trace = poutine.trace(guide).get_trace(x, None, 1.0)
        return {name: trace.nodes[name]["value"] for name in trace.stochastic_nodes}

    return locked(lambda count: stack([one_draw() for _ in range(count)]))


def _count(draws: Draws) -> int:
    return len(next(iter(draws.values())))


# --- outputs ---


def default_rows(x: Rows) -> int:
    """Return the inputs of one pass: on a CPU what its cache holds, else what keeps it busy."""
    return 1024 if x.device.type == "cpu" else 8192


def per_draw(
    model: BayesianModel, posterior: Iterable[Draws], x: Rows, rows: int
) -> Iterator[Part]:
    """Yield the likelihood's arguments of draws, ``[s, n, ...]``, by passes of ``rows`` inputs."""
    begin = 0
    for draws in posterior:
        count = _count(draws)
        if block := _batched_rows(model, draws, x, rows):
            # all draws w_s of the chunk in one pass: vmap over s
            passes = [over_draws(partial(model.predictive, xs), draws) for xs in x.split(block)]
            yield slice(begin, begin + count), ALL, _joined(passes, 1)
        else:
            for s in range(count):
                draw = {name: values[s] for name, values in draws.items()}
                passes = [model.predictive(xs, draw) for xs in x.split(rows)]
                arguments = {name: v.unsqueeze(0) for name, v in _joined(passes, 0).items()}
                yield slice(begin + s, begin + s + 1), ALL, arguments
        begin += count


def _batched_rows(model: BayesianModel, draws: Draws, x: Rows, rows: int) -> int:
    """Return the inputs of a pass with all draws; 0 if each draw runs alone."""
    count = _count(draws)
    if count == 1 or len(x) < BATCHED_BELOW:
        return rows if count > 1 else 0
    of_convolutions = any(values.dim() > 3 for values in draws.values())  # slow when batched
    all_random = next(model.network.parameters(), None) is None
    return 0 if all_random or of_convolutions else min(rows, max(BATCHED_BELOW, rows // count))


def _joined(passes: list[dict[str, Tensor]], dim: int) -> dict[str, Tensor]:
    return {name: torch.cat([values[name] for values in passes], dim) for name in passes[0]}
