# SPDX-License-Identifier: Apache-2.0
r"""Closed-form divergences of the guides' Normals from priors, KL[q || p] in nats.

| prior | KL of one weight, $t = \sigma_q / \sigma_p$ |
|---|---|
| Normal | $\tfrac12(t - 1)(t + 1) - \ln t + \tfrac12 (\mu_q - \mu_p)^2 / \sigma_p^2$ |
| Laplace | $E_q\lvert w - m\rvert / b + \ln 2b - \ln\sigma_q - \tfrac12\ln 2\pi e$ |
| `LogUniform` | $E\ln\lvert r + \epsilon\rvert - E\ln\lvert\epsilon\rvert$ |

Near t = 1 neither $t - 1$ nor $\ln t$ loses digits, as $t^2 - 1$ would: the KL of equal Normals is
exactly 0. For $x \sim N(d, \sigma^2)$ and $r = d / \sigma$

$$E\lvert x\rvert = \sigma\sqrt{2/\pi}\,e^{-r^2/2} + d\,\mathrm{erf}(r/\sqrt2)$$
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro import distributions as dist
from pyro.distributions.torch_distribution import MaskedDistribution
from torch import Tensor
from torch.autograd import Function
from torch.distributions import Laplace, Normal, kl_divergence, register_kl

from pyro_bbb.distributions.improper import LogUniform, NormalJeffreysGroups
from pyro_bbb.distributions.normal import PrunedNormal, SummedNormal
from pyro_bbb.distributions.summed_event import HALF_LOG_2PI, Event, batches, total, unexpanded


@register_kl(SummedNormal, Normal)
def _kl_normal(q: SummedNormal, p: Normal) -> Tensor:
    """Return KL[q || p] of each weight, exactly 0 for equal distributions."""
    t = q.scale / unexpanded(p.scale)
    z = (q.loc - p.loc) / p.scale
    of_scale = torch.addcmul(-t.log(), t - 1, t + 1, value=0.5)
    return torch.addcmul(of_scale, z, z, value=0.5)


@register_kl(SummedNormal, Laplace)
def _kl_laplace(q: SummedNormal, p: Laplace) -> Tensor:
    """Return KL[q || p] of each weight."""
    mean_distance: Tensor = MeanDistance.apply(q.loc - p.loc, q.scale)
    log_ratio = unexpanded(p.scale).log() - q.scale.log()
    return mean_distance / p.scale + log_ratio + (math.log(2) - 0.5 - HALF_LOG_2PI)


@register_kl(SummedNormal, LogUniform)
def _kl_log_uniform(q: SummedNormal, p: LogUniform) -> Tensor:
    r"""Return KL[q || p] of each weight, to 0.01 nats.

    Molchanov et al. (2017), equation 14, of $1 / \alpha = r^2$ and plus $k_1$: exactly 0 at r = 0.
    """
    k1, k2, k3 = 0.63576, 1.87320, 1.48695
    inverse_alpha = ((q.loc - p.loc) / q.scale).square()
    # ln 0 has no finite slope; the sigmoid is 0 long before
    log_inverse = inverse_alpha.clamp(min=torch.finfo(inverse_alpha.dtype).tiny).log()
    return k1 * torch.sigmoid(k3 * log_inverse - k2) + 0.5 * torch.log1p(inverse_alpha)


@register_kl(PrunedNormal, Normal)
@register_kl(PrunedNormal, Laplace)
@register_kl(PrunedNormal, LogUniform)
def _kl_pruned(q: PrunedNormal, p: Normal | Laplace | LogUniform) -> Tensor:
    """Return KL[q || p] of the unpruned entries, and 0 for the removed ones."""
    return kl_divergence(q.with_positive_scale(), p).where(q.unpruned, 0.0)


@register_kl(PrunedNormal, MaskedDistribution)
def _kl_pruned_masked(q: PrunedNormal, p: MaskedDistribution) -> Tensor:
    """Return KL[q || p] of the unpruned entries, and 0 for the removed ones."""
    return kl_divergence(q, p.base_dist).where(q.unpruned, 0.0)


@register_kl(Event, dist.Independent)
def _kl_events(q: Event, p: dist.Independent) -> Tensor:
    """Return KL[q || p] of many weights, summed."""
    dims = q.reinterpreted_batch_ndims
    if dims != p.reinterpreted_batch_ndims:
        raise NotImplementedError("events of different dimensions have no divergence")
    q, p = q.base_dist, p.base_dist
    plain = isinstance(q, SummedNormal) and not isinstance(q, PrunedNormal)
    if plain and isinstance(p, Normal) and q.batch_shape == p.batch_shape:
        kl: Tensor = NormalKL.apply(q.loc, q.scale, unexpanded(p.loc), unexpanded(p.scale), dims)
        return kl
    return total(kl_divergence(q, p), dims)


@register_kl(Event, NormalJeffreysGroups)
def _kl_normal_jeffreys(q: Event, p: NormalJeffreysGroups) -> Tensor:
    r"""Return the bound of KL[q || p], the KL from the best $N(0, \tau^2)$ of each group."""
    normal = q.base_dist
    pruned = isinstance(normal, PrunedNormal)
    left = normal.unpruned if pruned else torch.ones_like(normal.loc, dtype=torch.bool)
    scale = normal.remaining if pruned else normal.scale
    log_tau = 0.5 * p.log_mean_square(normal.loc.square() + scale.square(), left)
    return total((log_tau - scale.log()).where(left, 0.0), q.reinterpreted_batch_ndims)


# --- fast forms ---


class NormalKL(Function):
    r"""`_kl_normal`, summed over the last ``dims`` dimensions, in few passes.

    Means and scales have the same shape, to which those of the prior expand.
    """

    @staticmethod
    def forward(
        loc: Tensor, scale: Tensor, prior_loc: Tensor, prior_scale: Tensor, dims: int
    ) -> Tensor:
        t = scale / prior_scale
        twice = t - 1
        twice.addcmul_(twice, t)  # (t - 1)(t + 1)
        twice.sub_(t.log_(), alpha=2)
        z = torch.sub(loc, prior_loc, out=t).div_(prior_scale)
        return total(twice.addcmul_(z, z), dims).mul_(0.5)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.dims = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        loc, scale, prior_loc, prior_scale = ctx.saved_tensors
        grad = grad.reshape(grad.shape + (1,) * ctx.dims)
        precision = prior_scale.square().reciprocal()
        if not (torch.is_grad_enabled() or any(ctx.needs_input_grad[2:])):
            of_loc = (loc - prior_loc).mul_(grad * precision)
            of_scale = scale * (grad * precision)
            return of_loc, of_scale.addcdiv_(grad, scale, value=-1), None, None, None
        of_loc = (loc - prior_loc) * (grad * precision)
        of_scale = scale * (grad * precision) - grad / scale
        of_prior_loc = of_prior_scale = None
        if ctx.needs_input_grad[2]:
            of_prior_loc = -of_loc.sum_to_size(prior_loc.shape)
        if ctx.needs_input_grad[3]:
            spread = (scale.square() + (loc - prior_loc).square()) * precision
            of_prior_scale = (grad * (1 - spread) / prior_scale).sum_to_size(prior_scale.shape)
        return of_loc, of_scale, of_prior_loc, of_prior_scale, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        *tensors, dims = args
        result: Tensor = NormalKL.apply(*batches(info.batch_size, in_dims, tuple(tensors)), dims)
        return result, 0


class MeanDistance(Function):
    r"""$E|x|$ for $x \sim N(d, \sigma^2)$.

    The derivatives, $\mathrm{erf}(r/\sqrt2)$ in d and $\sqrt{2/\pi}\,e^{-r^2/2}$ in $\sigma$, are
    finite also where those of the terms are not.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(d: Tensor, scale: Tensor) -> Tensor:
        in_d, in_scale = _distance_slopes(d, scale)
        return torch.addcmul(d * in_d, scale, in_scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        d, scale = ctx.saved_tensors
        in_d, in_scale = _distance_slopes(d, scale)
        return (grad * in_d).sum_to_size(d.shape), (grad * in_scale).sum_to_size(scale.shape)


def _distance_slopes(d: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    r = d / scale
    return torch.erf(math.sqrt(0.5) * r), math.sqrt(2 / math.pi) * torch.exp(-0.5 * r.square())
