# SPDX-License-Identifier: Apache-2.0
"""Weights of several guides sampled as the rows of one matrix, for ensembles trained at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Size, Tensor

from pyro_bbb._handlers.flat_site import FlatNormal, FlatSample
from pyro_bbb._ops.flat import FlatTensors, joined_rows
from pyro_bbb._ops.reductions import HALF_LOG_2PI
from pyro_bbb._ops.softplus import softplus
from pyro_bbb._ops.step_context import current_step
from pyro_bbb.distributions import SoftplusNormal
from pyro_bbb.distributions.detached import DetachedSample

Named: TypeAlias = Mapping[str, Tensor]


class StackedSample(FlatSample):
    """Draws of the members of an ensemble, draw i of member i modulo their number.

    Args:
        locs: means of each member by site name.
        rhos: likewise.
        shape: of the plates around, whose number of draws is a multiple of that of members.
    """

    def __init__(
        self,
        locs: Sequence[Named],
        rhos: Sequence[Named],
        shape: Size,
    ) -> None:
        names, like = list(locs[0]), list(locs[0].values())
        loc, rho = (_rows(tensors, shape) for tensors in (locs, rhos))
        noise, scale = torch.randn_like(loc), softplus(rho)
        self.value = torch.addcmul(loc, scale, noise)
        log_q = -0.5 * noise.square().sum(-1) - scale.log().sum(-1) - loc.shape[-1] * HALF_LOG_2PI
        self.joint = FlatNormal([loc], self.value, noise, scale, log_q)
        self.detached = partial(DetachedSample, noise, scale, log_q)
        each = (FlatTensors(x, like).parts for x in (loc, rho, self.value, noise, scale))
        parts = dict(zip(names, zip(*each, strict=True), strict=True))
        self.values = {name: value for name, (_, _, value, _, _) in parts.items()}
        self.parts = {
            name: SoftplusNormal.drawn(loc, rho, value, noise, partial(_same, scale))
            for name, (loc, rho, value, noise, scale) in parts.items()
        }


def sample_stacked(
    locs: Sequence[Named], rhos: Sequence[Named], shape: Size
) -> dict[str, SoftplusNormal]:
    """The distributions of the parts of a new `StackedSample`, which `get_traces` will ask for."""
    sample = StackedSample(locs, rhos, shape)
    current_step().sample = sample
    return sample.parts


def _rows(members: Sequence[Named], shape: Size) -> Tensor:
    """The numbers of all members ``[*shape, n]``, repeated as often as there are draws of each."""
    rows = joined_rows([list(tensors.values()) for tensors in members])
    draws = shape.numel() // len(rows)  # of each
    return (rows if draws == 1 else rows.repeat(draws, 1)).reshape(*shape, -1)


def _same(x: Tensor) -> Tensor:
    return x
