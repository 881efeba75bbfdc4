r"""One draw $w = \mu + \mathrm{softplus}(\rho)\,\epsilon$ of many weights, and what scores it.

With hundreds of thousands of weights it is memory that costs: what can be computed in place is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyro_bbb._event import HALF_LOG_2PI
from pyro_bbb._softplus import softplus, softplus_into

Scale: TypeAlias = tuple[Tensor, Tensor]  # standard deviations and the sum of their logarithms


@contextmanager
def shared_scales() -> Iterator[None]:
    """Parameters stay as they are inside: several draws of one posterior find its scale once."""
    token = _SHARED.set({})
    try:
        yield
    finally:
        _SHARED.reset(token)


_SHARED: ContextVar[dict[Any, Scale] | None] = ContextVar("shared_scales", default=None)


def draw(loc: Tensor, rho: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""$w = \mu + \sigma\epsilon$, $\sigma = \mathrm{softplus}(\rho)$ and $\sum\ln q$ in nats.

    Args:
        loc: mean.
        rho: unconstrained scale, of the same shape.
        noise: $\epsilon$, of the same shape.
    """
    shared = _SHARED.get()
    if shared is None:
        value, scale, log_q, _ = Draw.apply(loc, rho, noise, None)
        return value, scale, log_q
    key = rho.data_ptr(), rho.shape, rho.dtype
    value, scale, log_q, log_scale = Draw.apply(loc, rho, noise, shared.get(key))
    shared[key] = scale.detach(), log_scale.detach()
    return value, scale, log_q


def draw_many(
    locs: Sequence[Tensor], rhos: Sequence[Tensor], noise: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    r"""`draw` of several tensors into one vector: value, scale, $\sum\ln q$, the value's parts.

    Args:
        locs: means.
        rhos: unconstrained scales.
        noise: $\epsilon$ of all, ``[n]``.
    """
    shared = _SHARED.get()
    key = tuple(rho.data_ptr() for rho in rhos)
    known = None if shared is None else shared.get(key)
    value, scale, log_q, log_scale, *parts = DrawMany.apply(noise, known, *locs, *rhos)
    if shared is not None:
        shared[key] = scale.detach(), log_scale.detach()
    return value, scale, log_q, parts


class Draw(Function):
    r"""`draw`, and $\sum\ln\sigma$ without gradient.

    The last argument is $\sigma$ and $\sum\ln\sigma$ where they are known already. As a function of
    the noise, $\ln q = -\sum(\epsilon^2/2 + \ln\sigma + \ln\sqrt{2\pi})$ depends on $\rho$ only.
    """

    @staticmethod
    def forward(
        loc: Tensor, rho: Tensor, noise: Tensor, known: Scale | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        value = noise.square()
        log_q = value.sum().mul_(-0.5).sub_(noise.numel() * HALF_LOG_2PI)
        if known is None:
            scale = softplus(rho)
            log_scale = torch.log(scale, out=value).sum()
        else:
            scale, log_scale = (x.detach() for x in known)
        torch.addcmul(loc, scale, noise, out=value)
        return value, scale, log_q.sub_(log_scale), log_scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, rho, noise, _ = inputs
        ctx.save_for_backward(rho, noise, output[1])
        ctx.mark_non_differentiable(output[3])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, of_value: Tensor | None, of_scale: Tensor | None, of_log_q: Tensor | None, _: None
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
        return of_value, of_rho, of_value * scale if needs_noise else None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], loc: Tensor, rho: Tensor, noise: Tensor, known: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        loc, rho, noise = (
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip((loc, rho, noise), in_dims, strict=False)
        )
        scale = softplus(rho)
        rows = scale.log().reshape(info.batch_size, -1)
        of_noise = (0.5 * noise.square() + HALF_LOG_2PI).reshape(info.batch_size, -1)
        log_q = -(rows + of_noise).sum(1)
        return (loc + scale * noise, scale, log_q, rows.detach().sum(1)), (0, 0, 0, 0)


class DrawMany(Function):
    r"""`Draw` of several tensors into one vector; the weights' own tensors are parts of it.

    Arguments are the noise ``[n]``, $\sigma$ and $\sum\ln\sigma$ or ``None``, the tensors'
    number, their means and their $\rho$. Returns value and scale ``[n]``, $\sum\ln q$ and
    $\sum\ln\sigma$, then the parts of the value.
    """

    @staticmethod
    def forward(noise: Tensor, known: Scale | None, *parameters: Tensor) -> tuple[Tensor, ...]:
        locs, rhos = _halves(parameters)
        value = noise.square()
        log_q = value.sum().mul_(-0.5).sub_(noise.numel() * HALF_LOG_2PI)
        if known is None:
            scale = over_parts(softplus_into, torch.empty_like(noise), rhos)
            log_scale = torch.log(scale, out=value).sum()
        else:
            scale, log_scale = (x.detach() for x in known)
        over_parts(torch.addcmul, value, locs, scale, noise)
        return value, scale, log_q.sub_(log_scale), log_scale, *parts_of(value, locs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        noise, _, *parameters = inputs
        ctx.save_for_backward(noise, output[1], *_halves(parameters)[1])
        ctx.mark_non_differentiable(output[3])
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        of_whole: Tensor | None,
        of_scale: Tensor | None,
        of_log_q: Tensor | None,
        _: None,
        *of_parts: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        noise, scale, *rhos = ctx.saved_tensors
        of_value = torch.zeros_like(noise) if of_whole is None else of_whole
        given = [
            torch.zeros_like(rho) if part is None else part
            for part, rho in zip(of_parts, rhos, strict=True)
        ]
        of_value = over_parts(torch.add, torch.empty_like(noise), given, of_value)
        of_sigma = of_value * noise
        if of_scale is not None:
            of_sigma.add_(of_scale)
        if of_log_q is not None:
            of_sigma.addcdiv_(of_log_q, scale, value=-1)
        of_sigma.mul_(over_parts(torch.sigmoid, torch.empty_like(noise), rhos))
        return None, None, *parts_of(of_value, rhos), *parts_of(of_sigma, rhos)


def _halves(parameters: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    count = len(parameters) // 2
    return list(parameters[:count]), list(parameters[count:])


def parts_of(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """A vector's parts, of the shapes of other tensors."""
    return list(_unflatten_dense_tensors(vector, like))


def over_parts(
    operation: Callable[..., Tensor], out: Tensor, tensors: Sequence[Tensor], *vectors: Tensor
) -> Tensor:
    """An elementwise operation of tensors side by side, and of vectors, into a vector.

    On a GPU, where each launch costs, the tensors are joined first; elsewhere, where each pass
    over memory costs, each is worked on where it lies.
    """
    if out.is_cuda:
        return operation(torch.cat([x.flatten() for x in tensors]), *vectors, out=out)
    columns = (parts_of(vector, tensors) for vector in (*vectors, out))
    for x, *others, part in zip(tensors, *columns, strict=True):
        operation(x, *others, out=part)
    return out


# `apply` asks for it at every call; to work it out takes as long as a small layer
Draw.forward.__signature__ = inspect.signature(Draw.forward)  # type: ignore[attr-defined]
DrawMany.forward.__signature__ = inspect.signature(DrawMany.forward)  # type: ignore[attr-defined]
