# SPDX-License-Identifier: Apache-2.0
r"""Priors with trained parameters, which maximise the ELBO together with the guide's.

Such an empirical Bayes prior (type-II maximum likelihood) is a point estimate: the ELBO rewards it
for the weights that the posterior has, and has no cost for its own freedom.
"""

from __future__ import annotations

import math
from typing import Any

import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from torch import Size, Tensor, nn
from torch.distributions import Distribution

from pyro_bbb._utils.saving import Arguments, Modules, attributes, saveable
from pyro_bbb._utils.validation import positive, probability
from pyro_bbb.distributions import ScaleMixtureNormal, without_validation
from pyro_bbb.priors._base import Prior, named
from pyro_bbb.priors.declaration import announced


@named("learned_scale_mixture")
@saveable()
class LearnedScaleMixture(Prior):
    r"""$\pi N(0, \sigma_1^2) + (1 - \pi) N(0, \sigma_2^2)$ with one learned triple for all weights.

    The prior of Blundell et al. (2015), equation 7, with trained parameters:
    the log-odds of $\pi$ and the logarithms of the scales, which are unconstrained.

    Args:
        pi: initial weight of the first component, in (0, 1).
        sigma1: initial standard deviation of the first component, positive.
        sigma2: initial standard deviation of the second component, positive.

    Attributes:
        logit: the log-odds $\ln\pi - \ln(1 - \pi)$, a parameter.
        log_sigma1: logarithm of $\sigma_1$, a parameter.
        log_sigma2: logarithm of $\sigma_2$, a parameter.

    Raises:
        ValueError: an initial value is out of range.
    """

    def __init__(self, pi: float = 0.5, sigma1: float = 1.0, sigma2: float = 0.1) -> None:
        super().__init__()
        pi = probability("pi", pi)
        sigma1, sigma2 = positive("sigma1", sigma1), positive("sigma2", sigma2)
        self._initial = pi, sigma1, sigma2
        self.logit: nn.Parameter = nn.Parameter(torch.tensor(math.log(pi) - math.log1p(-pi)))
        self.log_sigma1: nn.Parameter = nn.Parameter(torch.tensor(math.log(sigma1)))
        self.log_sigma2: nn.Parameter = nn.Parameter(torch.tensor(math.log(sigma2)))

    @property
    def pi(self) -> Tensor:
        """Weight of the first component, a scalar in [0, 1]."""
        return torch.sigmoid(self.logit)

    @property
    def sigma1(self) -> Tensor:
        """Standard deviation of the first component, a positive scalar."""
        return self.log_sigma1.exp()

    @property
    def sigma2(self) -> Tensor:
        """Standard deviation of the second component, a positive scalar."""
        return self.log_sigma2.exp()

    def forward(self, module: nn.Module, name: str, shape: Size) -> Distribution:
        """Return the present mixture, expanded to ``shape``."""
        logit, log_sigma1, log_sigma2 = (
            announced(module, f"{name}_prior_{key}", parameter)
            for key, parameter in self.named_parameters()
        )
        mixture = ScaleMixtureNormal.from_logit(logit, log_sigma1.exp(), log_sigma2.exp())
        return without_validation(mixture.expand(shape).to_event(len(shape)))

    def extra_repr(self) -> str:
        """Return the present values, for the module's printed form."""
        values = ((key, getattr(self, key).item()) for key in ("pi", "sigma1", "sigma2"))
        return ", ".join(f"{key}={value:.4g}" for key, value in values)


def _learned_normal(cls: Any, arguments: Arguments, modules: Modules) -> nn.Module:
    prior: LearnedNormal = cls()
    prior.scale = arguments["scale"]  # in its dtype
    return prior


@named("learned_normal")
@saveable(attributes("scale"), build=_learned_normal)
class LearnedNormal(Prior):
    """$N(t, s^2)$ with a learned location t for each weight, initially 0.

    The locations are parameters of the module that has the weight, as ``weight_prior_loc``. At the
    optimum they are the posterior means: the KL then bounds only the posterior's scales.

    Args:
        scale: the standard deviation s, positive.

    Raises:
        ValueError: the scale is not positive and finite.
    """

    scale: Tensor

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(positive("scale", scale)), persistent=False)

    def attach(self, module: PyroModule, name: str, shape: Size) -> None:
        """Register the locations on the module."""
        module.register_parameter(f"{name}_prior_loc", nn.Parameter(self.scale.new_zeros(shape)))

    def forward(self, module: nn.Module, name: str, shape: Size) -> Distribution:
        """Return the Normal around the present locations."""
        parameter_name = f"{name}_prior_loc"
        loc = announced(module, parameter_name, module._parameters[parameter_name])  # type: ignore[arg-type]
        normal = dist.Normal(loc, self.scale, validate_args=False)
        return without_validation(normal.to_event(len(shape)))

    def extra_repr(self) -> str:
        """Return the scale, for the module's printed form."""
        return f"scale={self.scale.item():.4g}"
