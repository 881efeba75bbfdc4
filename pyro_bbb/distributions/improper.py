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
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from pyro import distributions as dist
from torch import Size, Tensor
from torch.distributions import constraints

from pyro_bbb._utils.context import only_shapes
from pyro_bbb.distributions.summed_event import HALF_LOG_2PI

_MEAN_LOG_NOISE = -0.5 * (0.57721566490153286 + math.log(2))  # E ln|epsilon|


class Improper(dist.TorchDistribution):
    """Base of densities without a finite integral, which cannot be sampled."""

    support = constraints.real
    has_rsample = False

    def sample(self, sample_shape: Any = Size()) -> Tensor:
        """Raise ValueError, except where the library asks for the shape of a draw alone."""
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

    arg_constraints = {"loc": constraints.real}

    def __init__(self, loc: float | Tensor = 0.0, validate_args: bool | None = None) -> None:
        self.loc = loc if isinstance(loc, Tensor) else torch.tensor(float(loc))
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
