# SPDX-License-Identifier: Apache-2.0
r"""Priors with a latent scale: $w \sim N(0, \tau^2)$, $\tau \sim p(\tau)$.

The guide infers the scale of each group of weights along with them. A half-Cauchy scale (Carvalho
et al. 2010, "The horseshoe estimator for sparse signals"), here one for each unit's weights, has a
tail heavy enough to leave a needed unit alone and a mode at 0 that shrinks the others. With an
inverse-gamma variance a group of weights is jointly Student t.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, get_args

import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroSample
from torch import Size, Tensor, nn
from torch.distributions import Distribution

from pyro_bbb._utils.saving import Arguments, attributes, saveable
from pyro_bbb._utils.validation import one_of, positive
from pyro_bbb.distributions import without_validation
from pyro_bbb.priors._base import Independent, Prior, named
from pyro_bbb.priors.declaration import prior_of

Per = Literal["layer", "unit", "input"]


def group_dim(per: Per, shape: Size) -> int | None:
    """Return the dimension of a weight that indexes its groups; ``None`` for one group."""
    return {"layer": None, "unit": 0, "input": 1}[per] if len(shape) > 1 else None


def _build(cls: Any, arguments: Arguments, modules: Any) -> nn.Module:
    latent = {arguments["kind"]: modules["hyperprior"].distribution}
    prior: HierarchicalNormal = cls(per=arguments["per"], **latent)
    return prior


@saveable(
    attributes("kind", "per"),
    modules=lambda prior: {"hyperprior": prior.hyperprior},
    build=_build,
)
class HierarchicalNormal(Prior):
    r"""$w \sim N(0, \tau^2)$ with a latent $\tau$, or $\tau^2$, of every group of weights.

    The latent is a sample site of the module that has the weights, ``weight_prior_scale`` (or
    ``weight_prior_variance``), drawn before them.

    Args:
        scale: distribution of $\tau$, scalar and of positive support; by default half-Cauchy of
            scale 1, where no ``variance`` is given.
        variance: distribution of $\tau^2$ instead.
        per: ``"layer"``, one group for each weight tensor; ``"unit"``, one for each row of a
            kernel (its first dimension); or ``"input"``, one for each column (the second). A vector
            is one group.

    Raises:
        ValueError: both distributions are given, one is not scalar or reaches below 0, or an
            unknown ``per``.
        TypeError: a distribution is of another kind.
    """

    def __init__(
        self,
        scale: Distribution | None = None,
        *,
        variance: Distribution | None = None,
        per: Per = "layer",
    ) -> None:
        super().__init__()
        if scale is not None and variance is not None:
            raise ValueError("give the distribution of scale or of variance, not of both")
        self.kind, self.per = "scale" if variance is None else "variance", per
        one_of("per", per, get_args(Per))
        latent = scale if variance is None else variance
        latent = dist.HalfCauchy(torch.tensor(1.0)) if latent is None else latent
        if not isinstance(latent, Distribution):
            raise TypeError(f"{self.kind} must be a distribution, got {latent!r}")
        if latent.batch_shape or latent.event_shape:
            raise ValueError(f"{self.kind} must be a scalar distribution, got {latent}")
        if not getattr(latent.support, "lower_bound", -math.inf) >= 0:
            raise ValueError(f"{self.kind} must be a distribution on positive values, got {latent}")
        self.hyperprior: Independent = Independent(latent)

    def attach(self, module: PyroModule, name: str, shape: Size) -> None:
        """Register the latent scales on the module."""
        layer = self._part(name)
        groups = () if (dim := group_dim(self.per, shape)) is None else shape[dim : dim + 1]
        latent = partial(_hyperprior, name, layer, Size(groups))
        setattr(module, layer, PyroSample(latent))  # type: ignore[arg-type]

    def forward(self, module: nn.Module, name: str, shape: Size) -> Distribution:
        """Return the Normal for the sampled scales, of their plates (if any) as batch shape."""
        drawn: Tensor = getattr(module, self._part(name))  # [*plates, *groups]
        scale = drawn if self.kind == "scale" else drawn.sqrt()
        plates, along = scale.shape, [1] * len(shape)
        if (dim := group_dim(self.per, shape)) is not None:
            plates, along[dim] = scale.shape[:-1], scale.shape[-1]
        scale = scale.reshape(plates + Size(along))
        normal = dist.Normal(torch.zeros_like(scale), scale, validate_args=False)
        return without_validation(normal.expand(plates + shape).to_event(len(shape)))

    def extra_repr(self) -> str:
        """Return the kind of latent and its groups, for the module's printed form."""
        return f"{self.kind} per {self.per}"

    def _part(self, name: str) -> str:
        return f"{name}_prior_{self.kind}"


@named("horseshoe")
def horseshoe(scale: float = 1.0, per: Per = "unit") -> HierarchicalNormal:
    r"""Return half-Cauchy $\tau$ of the given scale, by default one for each unit."""
    return HierarchicalNormal(dist.HalfCauchy(torch.tensor(positive("scale", scale))), per=per)


@named("inverse_gamma")
def inverse_gamma(
    concentration: float = 1.0, rate: float = 1.0, per: Per = "layer"
) -> HierarchicalNormal:
    r"""Return inverse-gamma $\tau^2$: Student t of $2a$ degrees of freedom, a the concentration."""
    arguments = positive("concentration", concentration), positive("rate", rate)
    return HierarchicalNormal(variance=dist.InverseGamma(*map(torch.tensor, arguments)), per=per)


def _hyperprior(weight: str, part: str, shape: Size, module: nn.Module) -> Distribution:
    """Return the distribution of a latent, by the prior of its weight in the module or a copy."""
    distribution: Distribution = prior_of(module, weight).hyperprior(module, part, shape)
    return distribution
