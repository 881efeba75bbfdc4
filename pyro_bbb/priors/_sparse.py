# SPDX-License-Identifier: Apache-2.0
"""Improper priors that prune: training leaves noise where the data need no weight, or group."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Size, Tensor, nn
from torch.distributions import Distribution

from pyro_bbb._utils.saving import attributes, saveable
from pyro_bbb._utils.validation import one_of
from pyro_bbb.distributions import LogUniform
from pyro_bbb.distributions.improper import NormalJeffreysGroups
from pyro_bbb.priors._base import Independent, Prior, named
from pyro_bbb.priors._hierarchical import Per, group_dim


@named("log_uniform")
def log_uniform() -> Prior:
    """Return independent log-uniform distributions, which prune weights; see `LogUniform`."""
    return Independent(LogUniform())


@named("normal_jeffreys")
@saveable(attributes("per"))
class NormalJeffreys(Prior):
    r"""$w \sim N(0, \tau^2 I)$, $p(\tau) \propto 1/\tau$, for each group; it prunes groups.

    Louizos et al. (2017), "Bayesian Compression for Deep Learning", with the scales integrated out:
    $p(w) \propto \lVert w\rVert^{-n}$ for a group of n weights. It is improper, and so is the exact
    posterior, which has infinite mass at 0 (Hron et al. 2017, arXiv:1711.02989). What remains is
    the variational objective, with $\min_\tau \mathrm{KL}[q \| N(0, \tau^2 I)]$ as the KL of a
    group. `fit` takes it in closed form, for `AutoSoftplusNormal`; what needs draws of the prior,
    or chains, is refused.

    Args:
        per: groups: ``"unit"``, each row of a kernel (its first dimension); ``"input"``, each
            column (the second); or ``"layer"``, the tensor. A vector is one group.

    Raises:
        ValueError: an unknown ``per``.
    """

    is_fixed = True
    zero: Tensor

    def __init__(self, per: Per = "unit") -> None:
        super().__init__()
        one_of("per", per, get_args(Per))
        self.per: Per = per
        self.register_buffer("zero", torch.zeros(()), persistent=False)

    def forward(self, module: nn.Module, name: str, shape: Size) -> Distribution:
        """Return the distribution of all groups of the weight."""
        return NormalJeffreysGroups(self.zero.expand(shape), group_dim(self.per, shape))

    def extra_repr(self) -> str:
        """Return the groups, for the module's printed form."""
        return f"per {self.per}"
