# SPDX-License-Identifier: Apache-2.0
r"""Divergences of the guides' Normals from priors, KL[q || p] in nats."""

from __future__ import annotations

import math

import torch
from pyro import distributions as dist
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor
from torch.distributions import Laplace, Normal, kl_divergence, register_kl

from pyro_bbb._ops.normal import MeanDistance, NormalKL, unexpanded
from pyro_bbb._ops.reductions import HALF_LOG_2PI, total
from pyro_bbb.distributions.normal import PrunedNormal, SoftplusNormal
from pyro_bbb.distributions.summed_event import Event


@register_kl(Event, dist.Independent)
def _kl_events(q: Event, p: dist.Independent) -> Tensor:
    """KL[q || p] of many weights in nats, summed."""
    dims = q.reinterpreted_batch_ndims
    if dims != p.reinterpreted_batch_ndims:
        raise NotImplementedError("events of different dimensions have no divergence")
    q, p = q.base_dist, p.base_dist
    plain = isinstance(q, SoftplusNormal) and not isinstance(q, PrunedNormal)
    if plain and isinstance(p, Normal) and q.batch_shape == p.batch_shape:
        kl: Tensor = NormalKL.apply(q.loc, q.scale, unexpanded(p.loc), unexpanded(p.scale), dims)
        return kl
    return total(kl_divergence(q, p), dims)


@register_kl(SoftplusNormal, Normal)
def _kl_normal(q: SoftplusNormal, p: Normal) -> Tensor:
    r"""KL[q || p] in nats, exactly 0 for equal distributions.

    $\tfrac12(t - 1)(t + 1) - \ln t + \tfrac12 (\mu_q - \mu_p)^2 / \sigma_p^2$ with
    $t = \sigma_q / \sigma_p$: near 1 neither t - 1 nor ln t loses digits, as t^2 - 1 would.
    """
    t = q._compact_scale / unexpanded(p.scale)
    z = (q.loc - p.loc) / p.scale
    of_scale = torch.addcmul(-t.log(), t - 1, t + 1, value=0.5)
    return torch.addcmul(of_scale, z, z, value=0.5)


@register_kl(SoftplusNormal, Laplace)
def _kl_laplace(q: SoftplusNormal, p: Laplace) -> Tensor:
    r"""KL[q || p] in nats: $E_q|w - m| / b + \ln 2b - \ln\sigma - \tfrac12\ln 2\pi e$."""
    mean_distance: Tensor = MeanDistance.apply(q.loc - p.loc, q.scale)
    log_ratio = unexpanded(p.scale).log() - q._compact_scale.log()
    return mean_distance / p.scale + log_ratio + (math.log(2) - 0.5 - HALF_LOG_2PI)


@register_kl(PrunedNormal, Normal)
@register_kl(PrunedNormal, Laplace)
def _kl_pruned(q: PrunedNormal, p: Normal | Laplace) -> Tensor:
    """KL[q || p] of the unpruned entries in nats; 0 for the removed ones."""
    return kl_divergence(SoftplusNormal(q.loc, q.rho), p).where(q.unpruned, 0.0)


@register_kl(PrunedNormal, MaskedDistribution)
def _kl_pruned_masked(q: PrunedNormal, p: MaskedDistribution) -> Tensor:
    """KL[q || p] of the unpruned entries in nats; 0 for the removed ones."""
    return kl_divergence(q, p.base_dist).where(q.unpruned, 0.0)
