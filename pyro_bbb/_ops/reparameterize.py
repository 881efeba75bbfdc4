# SPDX-License-Identifier: Apache-2.0
r"""One draw $w = \mu + \mathrm{softplus}(\rho)\,\epsilon$ of many weights, and what scores it.

With hundreds of thousands of weights memory traffic dominates: kernels work in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyro_bbb._ops.buffers import empty_from_pool
from pyro_bbb._ops.flat import FlatTensors, or_zeros, over_parts
from pyro_bbb._ops.multi_sample import ScaleGradient, Shared
from pyro_bbb._ops.reductions import HALF_LOG_2PI, Blocks, batches, concatenated
from pyro_bbb._ops.softplus import softplus, softplus_into


def draw(loc: Tensor, rho: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""$w = \mu + \sigma\epsilon$, $\sigma = \mathrm{softplus}(\rho)$ and $\sum\ln q$ in nats."""
    value, scale, log_q = Draw.apply(loc, rho, noise)
    return value, scale, log_q


def draw_many(
    locs: Sequence[Tensor],
    rhos: Sequence[Tensor],
    noise: FlatTensors,
    shared: Shared | None = None,
) -> tuple[Tensor, FlatTensors, Tensor, list[Tensor]]:
    r"""`draw` of several tensors into one vector: value, scale, $\sum\ln q$, the value's parts.

    Where the noise is several vectors, there are several draws. `shared_by` finds their scales.
    """
    shared = Shared() if shared is None else shared
    if shared.gradient is not None and all(loc.requires_grad for loc in locs):
        rhos = shared.gradient.rhos
    value, scale, log_q, *parts = DrawMany.apply(noise, shared, *locs, *rhos)
    return value, FlatTensors(scale, locs), log_q, parts


class Draw(Function):
    r"""`draw`.

    As a function of the noise, $\ln q = -\sum(\epsilon^2/2 + \ln\sigma + \ln\sqrt{2\pi})$ depends
    on $\rho$ only.
    """

    @staticmethod
    def forward(loc: Tensor, rho: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value = torch.square(noise, out=empty_from_pool(noise))
        log_q = value.sum().mul_(-0.5).sub_(noise.numel() * HALF_LOG_2PI)
        scale = softplus_into(rho, empty_from_pool(rho))
        log_q.sub_(torch.log(scale, out=value).sum())
        return torch.addcmul(loc, scale, noise, out=value), scale, log_q

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, rho, noise = inputs
        ctx.save_for_backward(rho, noise, output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, of_value: Tensor | None, of_scale: Tensor | None, of_log_q: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        rho, noise, scale = ctx.saved_tensors
        in_place = not torch.is_grad_enabled()
        of_sigma = torch.zeros_like(scale) if of_value is None else of_value * noise
        if of_scale is not None:
            of_sigma = of_sigma + of_scale
        if of_log_q is not None and in_place:
            of_sigma.addcdiv_(of_log_q, scale, value=-1)
        elif of_log_q is not None:
            of_sigma = of_sigma - of_log_q / scale
        slope = torch.sigmoid(rho)
        of_rho = of_sigma.mul_(slope) if in_place else of_sigma * slope
        needs_noise = of_value is not None and ctx.needs_input_grad[2]
        return of_value, of_rho, of_value * scale if needs_noise else None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], loc: Tensor, rho: Tensor, noise: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        loc, rho, noise = batches(info.batch_size, in_dims, (loc, rho, noise))
        scale = softplus(rho)
        rows = scale.log().reshape(info.batch_size, -1)
        of_noise = (0.5 * noise.square() + HALF_LOG_2PI).reshape(info.batch_size, -1)
        log_q = -(rows + of_noise).sum(1)
        return (loc + scale * noise, scale, log_q), (0, 0, 0)


class DrawMany(Function):
    r"""`Draw` of several tensors into one vector; the weights' own tensors are parts of it.

    Arguments are the noise as `FlatTensors` ``[..., n]``, what several draws share, then means
    and $\rho$ of the tensors. Returns the value ``[..., n]``, the scale ``[n]``,
    $\sum\ln q$ ``[...]``, then the parts of the value.
    """

    @staticmethod
    def forward(noise: FlatTensors, shared: Shared, *parameters: Tensor) -> tuple[Tensor, ...]:
        locs, rhos = _halves(parameters)
        value = noise.empty_like()
        blocks, (*shape, count) = Blocks.of(noise.vector), noise.vector.shape
        pairs = zip(blocks(noise.vector), blocks(value.vector), strict=True)
        squares = [torch.square(some, out=out).sum(-1) for some, out in pairs]
        log_q = concatenated(squares, shape).mul_(-0.5).sub_(count * HALF_LOG_2PI)
        if shared.scale is None or shared.log_scale is None:
            scratch = value.vector[(0,) * len(shape)]
            scale = over_parts(
                softplus_into, FlatTensors(empty_from_pool(scratch), rhos), rhos
            ).vector
            shared.log_scale = torch.log(scale, out=scratch).sum()
            shared.scale = scale
        scale = shared.scale.detach()
        over_parts(torch.addcmul, value, locs, FlatTensors(scale, locs), noise)
        return value.vector, scale, log_q.sub_(shared.log_scale), *value.parts

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        noise, ctx.shared, *parameters = inputs
        ctx.save_for_backward(noise.vector, output[1], *_halves(parameters)[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        of_vector: Tensor | None,
        of_scale: Tensor | None,
        of_log_q: Tensor | None,
        *of_parts: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        noise, _, *rhos = ctx.saved_tensors
        summed = None if ctx.needs_input_grad[-1] else ctx.shared.gradient
        gradient = summed or ScaleGradient(rhos)
        values = _of_values(of_vector, of_parts, FlatTensors(noise, rhos))
        of_locs = gradient.add_draws(*next(values))
        for more in values:
            of_locs.add_(gradient.add_draws(*more))
        gradient.add(of_scale, of_log_q)
        of_rhos = [None] * len(rhos) if summed else gradient.take(ctx.shared)
        return None, None, *FlatTensors(of_locs, rhos).parts, *of_rhos


def _of_values(
    of_vector: Tensor | None, of_parts: Sequence[Tensor | None], noise: FlatTensors
) -> Iterator[tuple[Tensor, Tensor]]:
    """The gradient in each block of draws, of what it has by itself and by its parts; its noise."""
    blocks, like = Blocks.of(noise.vector), noise.like
    vector, *parts = or_zeros((of_vector, *of_parts), (noise.vector, *noise.parts))
    columns = (blocks(x) for x in (noise.vector, vector, *parts))
    for some, by_itself, *by_parts in zip(*columns, strict=True):
        out = FlatTensors(empty_from_pool(some), like)
        yield over_parts(torch.add, out, by_parts, FlatTensors(by_itself, like)).vector, some


def _halves(parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    count = len(parameters) // 2
    return list(parameters[:count]), list(parameters[count:])
