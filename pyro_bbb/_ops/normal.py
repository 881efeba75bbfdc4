# SPDX-License-Identifier: Apache-2.0
r"""Closed-form divergences and mean distances of Normals, in few passes over many weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyro_bbb._ops.buffers import empty_from_pool
from pyro_bbb._ops.reductions import batches, total


def unexpanded(x: Tensor) -> Tensor:
    """A tensor with the dimensions that only repeat it reduced to one: less work per weight."""
    return x[tuple(slice(0, 1) if step == 0 else slice(None) for step in x.stride())]


class SquaredDistance(Function):
    r"""$\sum ((w - \mu) / \sigma)^2$ over trailing dimensions, for fixed $\mu$ and $\sigma$.

    Temporary tensors come from the pool, and none is kept for the backward pass.
    """

    @staticmethod
    def forward(value: Tensor, loc: Tensor, scale: Tensor, dims: int) -> Tensor:
        z = torch.sub(value, loc, out=empty_from_pool(value)).div_(scale)
        return total(z.square_(), dims)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.dims = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        value, loc, scale = ctx.saved_tensors
        factor = 2 * grad.reshape(grad.shape + (1,) * ctx.dims) / scale.square()
        if torch.is_grad_enabled():  # for second derivatives
            return (value - loc) * factor, None, None, None
        of_value = torch.sub(value, loc, out=empty_from_pool(value)).mul_(factor)
        return of_value, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        *tensors, dims = args
        found = batches(info.batch_size, in_dims, tuple(tensors))
        result: Tensor = SquaredDistance.apply(*found, dims)
        return result, 0


class NormalKL(Function):
    r"""The closed form of `_kl_normal`, summed over trailing dimensions, in few passes.

    Means and scales have the same shape, to which those of the prior expand.
    """

    @staticmethod
    def forward(
        loc: Tensor, scale: Tensor, prior_loc: Tensor, prior_scale: Tensor, dims: int
    ) -> Tensor:
        t = torch.div(scale, prior_scale, out=empty_from_pool(scale))
        twice = torch.sub(t, 1, out=empty_from_pool(t))
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
            of_loc = torch.sub(loc, prior_loc, out=empty_from_pool(loc)).mul_(grad * precision)
            of_scale = torch.mul(scale, grad * precision, out=empty_from_pool(scale))
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
    r"""$E|x| = \sigma\sqrt{2/\pi}\,e^{-r^2/2} + d\,\mathrm{erf}(r/\sqrt2)$, $r = d/\sigma$.

    That is for $x \sim N(d, \sigma^2)$. The derivatives, $\mathrm{erf}(r/\sqrt2)$ in d and
    $\sqrt{2/\pi}\,e^{-r^2/2}$ in $\sigma$, are finite also where those of the terms are not.
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


class KnownLogProb(Function):
    r"""$\sum\ln N(w; \mu, \sigma^2)$ at $w = \mu + \sigma\epsilon$, whose value is known.

    Naively ``Normal(loc.detach(), scale.detach()).log_prob(value).sum(-1)``: the derivative in the
    value is $-\epsilon / \sigma$, parameters have none.
    """

    @staticmethod
    def forward(value: Tensor, noise: Tensor, scale: Tensor, log_q: Tensor) -> Tensor:
        return log_q.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:3])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_q: Tensor) -> tuple[Tensor | None, ...]:
        noise, scale = ctx.saved_tensors
        ratio = torch.div(noise, scale, out=empty_from_pool(noise))
        return ratio.mul_(-of_log_q.unsqueeze(-1)), None, None, None
