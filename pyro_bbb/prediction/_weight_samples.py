# SPDX-License-Identifier: Apache-2.0
"""A network's outputs where weights are drawn: each draw is one function for all inputs.

For few inputs all draws run as one batched pass. For many, or where a network's operations cannot
be batched over weights, they run one by one, each in passes large enough by themselves.
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
    run, done = partial(_run, model, x.split(rows)), 0
    for draws in posterior:
        count = len(next(iter(draws.values())))
        if count > 1 and len(x) < BATCHED_BELOW:
            yield slice(done, done + count), ALL, over_draws(run, draws)
        else:
            for s in range(count):
                draw = {name: values[s] for name, values in draws.items()}
                part = {name: value.unsqueeze(0) for name, value in run(draw).items()}
                yield slice(done + s, done + s + 1), ALL, part
        done += count


def _run(model: BayesianModel, batches: Iterable[Rows], draw: Draws) -> dict[str, Tensor]:
    """The likelihood's arguments for one draw at all inputs, each ``[n, ...]``."""
    with substituted(model, draw):
        parts = [model.predictive(x) for x in batches]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
