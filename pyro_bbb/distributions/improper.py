# SPDX-License-Identifier: Apache-2.0
r"""Scale-free priors, whose densities have no finite integral.

The log-uniform prior of a weight (Kingma et al. 2015; Molchanov et al. 2017, "Variational Dropout
Sparsifies Deep Neural Networks"), $p(w) \propto 1 / |w|$, prefers no scale. The constant of

$$\ln p(w) = -\ln|w| + E\ln|\epsilon| - \tfrac12\ln 2\pi e,
  \qquad E\ln|\epsilon| = -\tfrac12(\gamma + \ln 2), \quad \epsilon \sim N(0, 1)$$

is such that the KL from it to $N(\mu, \sigma^2)$ depends on $r = |\mu| / \sigma$ alone, and is 0 at
$r = 0$:

$$\mathrm{KL} = E\ln|r + \epsilon| - E\ln|\epsilon| \ge 0$$

A weight that the data do not need gains by more noise until it is all noise, and can be pruned. The
prior is improper, and so is the exact posterior: it has infinite mass at 0 (Hron et al. 2017,
arXiv:1711.02989). What remains is the variational objective.

The normal-Jeffreys prior (Louizos et al. 2017, "Bayesian Compression for Deep Learning") does the
same to a group of n weights, such as all that leave an input: $w \sim N(0, \tau^2 I)$ with
$p(\tau) \propto 1/\tau$, which is integrated out. With the constant of

$$\ln p(w) = -\tfrac n2 \ln\frac{\lVert w\rVert^2}{n} - \tfrac n2\ln 2\pi e
  = \max_\tau \ln N(w \mid 0, \tau^2 I)$$

Jensen's inequality bounds the KL to q by that from the best Normal, which is 0 where all weights
are noise of one scale:

$$\mathrm{KL} \le \tfrac n2\ln\tfrac1n\sum_j(\mu_j^2 + \sigma_j^2) - \sum_j\ln\sigma_j
  = \min_\tau \mathrm{KL}[q \| N(0, \tau^2 I)]$$
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from pyro import distributions as dist
from torch import Size, Tensor
from torch.distributions import constraints

from pyro_bbb._utils.context import only_shapes
from pyro_bbb.distributions.summed_event import HALF_LOG_2PI, total

_MEAN_LOG_NOISE = -0.5 * (0.57721566490153286 + math.log(2))  # E ln|epsilon|


class Improper(dist.TorchDistribution):
    """Base of densities without a finite integral, which cannot be sampled."""

    support: Any = constraints.real
    has_rsample = False

    def sample(self, sample_shape: Any = Size()) -> Tensor:
        """Raise ValueError, except where only the shape of the draw is used."""
        if not only_shapes():
            self._refuse()
        return torch.randn(self._extended_shape(Size(sample_shape))).to(self.mean)

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"the prior {type(self).__name__} is improper: it has no draws and the exact posterior "
            "no distribution, which chains could sample. Train AutoSoftplusNormal(model) by fit, "
            "or take a proper prior such as 'horseshoe' or 'scale_mixture'"
        )


class LogUniform(Improper):
    r"""Log-uniform distribution of real numbers, $p(w) \propto 1 / |w - m|$; improper.

    Molchanov et al. (2017). It has no draws, and the exact posterior under it is not a distribution
    (Hron et al. 2017, arXiv:1711.02989); the variational objective is all there is. Train by the
    KL in closed form, `fit`'s default with this prior: the gradient of a sampled KL, of
    $\ln|w|$, has infinite variance.

    Args:
        loc: centre m, where the density is infinite.
        validate_args: whether to check arguments and values, as for all distributions of Pyro.
    """

    arg_constraints: Any = {"loc": constraints.real}

    def __init__(self, loc: float | Tensor = 0.0, validate_args: bool | None = None) -> None:
        self.loc: Tensor = loc if isinstance(loc, Tensor) else torch.tensor(float(loc))
        super().__init__(self.loc.shape, validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> LogUniform:
        new = self._get_checked_instance(LogUniform, _instance)
        new.loc = self.loc.expand(batch_shape)
        super(LogUniform, new).__init__(Size(batch_shape), validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def mean(self) -> Tensor:
        """The centre, where guides start biases; the integral does not converge."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        return torch.full_like(self.loc, math.inf)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density in nats, elementwise; infinite at the centre."""
        if self._validate_args:
            self._validate_sample(value)
        return (_MEAN_LOG_NOISE - 0.5 - HALF_LOG_2PI) - (value - self.loc).abs().log()


class NormalJeffreysGroups(Improper):
    r"""Normal-Jeffreys distribution of each group of a tensor, a function of its norm; improper.

    Weights of exactly 0 are removed ones, and a group is its remaining weights.

    Args:
        loc: zeros of the tensor's shape.
        group_dim: dimension of the tensor that indexes its groups; ``None`` makes it one group.
    """

    arg_constraints: Any = {}

    def __init__(self, loc: Tensor, group_dim: int | None) -> None:
        self.loc = loc
        self.dims: tuple[int, ...] = tuple(
            i - loc.dim() for i in range(loc.dim()) if i != group_dim
        )
        """Dimensions along a group, from the last."""
        self.support: Any = constraints.independent(constraints.real, loc.dim())
        super().__init__(Size(), loc.shape, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> NormalJeffreysGroups:
        new = self._get_checked_instance(NormalJeffreysGroups, _instance)
        new.loc, new.dims, new.support = self.loc, self.dims, self.support
        super(NormalJeffreysGroups, new).__init__(
            Size(batch_shape), self.event_shape, validate_args=False
        )
        return new

    @property
    def mean(self) -> Tensor:
        """Zero, where guides start biases; the integral does not converge."""
        return self.loc.expand(self.batch_shape + self.event_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density in nats, of the batch shape."""
        value = value.expand(torch.broadcast_shapes(value.shape, self.shape()))
        left = value != 0
        of_groups = self.log_mean_square(value.square(), left) + 1 + 2 * HALF_LOG_2PI
        return -0.5 * total(of_groups.where(left, 0.0), len(self.event_shape))

    def log_mean_square(self, squares: Tensor, left: Tensor) -> Tensor:
        """Return the logarithm of each group's mean square, 0 where none is left."""
        count = left.sum(self.dims, keepdim=True)
        sums = squares.where(left, 0.0).sum(self.dims, keepdim=True)
        return torch.where(count > 0, sums, 1.0).log() - count.clamp(min=1).log()
