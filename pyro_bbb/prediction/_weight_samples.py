# SPDX-License-Identifier: Apache-2.0
"""A network's outputs where weights are drawn: each draw is one function for all inputs.

For few inputs all draws run as one batched pass. So they do for a few inputs at a time where the
network has ordinary weights too, as in front of a random last layer: what these compute is common
to all draws. Otherwise draws run one by one, each in passes large enough by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from pyro_bbb._handlers.substitute import substituted
from pyro_bbb._handlers.vmap import over_draws
from pyro_bbb._ops.tuning import BATCHED_BELOW
from pyro_bbb._utils.inputs import Rows
from pyro_bbb.models import BayesianModel

Draws: TypeAlias = Mapping[str, Tensor]
Part: TypeAlias = tuple[slice, slice, dict[str, Tensor]]  # draws, inputs, and values for these
ALL = slice(None)


def default_rows(x: Rows) -> int:
    """Rows of one pass: on a CPU what stays in its cache, elsewhere what keeps it busy."""
    return 1024 if x.device.type == "cpu" else 8192


def per_draw(
    model: BayesianModel, posterior: Iterable[Draws], x: Rows, rows: int
) -> Iterator[Part]:
    """The likelihood's arguments for every draw, ``[s, n, ...]``, for ``rows`` inputs at a time."""
    done = 0
    for draws in posterior:
        count = len(next(iter(draws.values())))
        block = _batched_rows(model, draws, x, rows)
        for part in _batched(model, draws, x, block) if block else _in_turn(model, draws, x, rows):
            yield slice(part[0].start + done, part[0].stop + done), *part[1:]
        done += count


def _batched_rows(model: BayesianModel, draws: Draws, x: Rows, rows: int) -> int:
    """Inputs of a pass in which all draws are batched; 0 where each draw has its own passes."""
    count = len(next(iter(draws.values())))
    if count == 1 or len(x) < BATCHED_BELOW:
        return rows if count > 1 else 0
    of_convolutions = any(values.dim() > 3 for values in draws.values())  # slow when batched
    all_random = next(model.network.parameters(), None) is None
    return 0 if all_random or of_convolutions else min(rows, max(BATCHED_BELOW, rows // count))


def _batched(model: BayesianModel, draws: Draws, x: Rows, rows: int) -> Iterator[Part]:
    """All draws in one pass, for ``rows`` inputs at a time."""
    parts = [over_draws(partial(_run, model, [inputs]), draws) for inputs in x.split(rows)]
    every = slice(0, len(next(iter(draws.values()))))
    yield every, ALL, {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}


def _in_turn(model: BayesianModel, draws: Draws, x: Rows, rows: int) -> Iterator[Part]:
    """One draw after the other, at all inputs."""
    batches = x.split(rows)
    for s in range(len(next(iter(draws.values())))):
        part = _run(model, batches, {name: values[s] for name, values in draws.items()})
        yield slice(s, s + 1), ALL, {name: value.unsqueeze(0) for name, value in part.items()}


def _run(model: BayesianModel, batches: Iterable[Rows], draw: Draws) -> dict[str, Tensor]:
    """The likelihood's arguments for one draw at all inputs, each ``[n, ...]``."""
    with substituted(model, draw):
        parts = [model.predictive(x) for x in batches]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
