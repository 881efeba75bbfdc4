r"""The log-density of a mixture of two zero-mean Normals, in few passes over many weights.

With hundreds of thousands of weights it is memory that costs: what can be computed in place is.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyro_bbb._ops.buffers import empty_from_pool
from pyro_bbb._ops.reductions import HALF_LOG_2PI, Blocks, joined, total, total_log


def coefficients(
    log_pi: Tensor, log_rest: Tensor, sigma1: Tensor, sigma2: Tensor
) -> tuple[Tensor, ...]:
    r"""The h, c, d, delta, kappa, floor of `LogMixture`; its reference is the wider component.

    Args:
        log_pi: $\ln\pi$, the weight of the first component.
        log_rest: $\ln(1 - \pi)$.
        sigma1: standard deviation of the first component.
        sigma2: standard deviation of the second component.
    """
    second = ((sigma2 > sigma1) & (log_rest > -math.inf)) | (log_pi == -math.inf)
    wide, narrow = torch.where(second, sigma2, sigma1), torch.where(second, sigma1, sigma2)
    log_share = torch.where(second, log_rest, log_pi)
    log_other = torch.where(second, log_pi, log_rest)
    log_wide, log_narrow = wide.log(), narrow.log()
    h = math.sqrt(0.5) / wide
    c = log_share - log_wide - HALF_LOG_2PI
    d = log_other - log_narrow - HALF_LOG_2PI
    delta = (log_other - log_share + (log_wide - log_narrow)).detach()
    kappa = (wide - narrow) / narrow * (wide / narrow + 1)  # (wide/narrow)^2 - 1
    return h, c, d, delta, kappa, _floor(kappa.detach())


def _floor(kappa: Tensor) -> Tensor:
    """Where t is so low that 1 + kappa / (1 + e^-t) is 1; there is no such t if kappa is huge."""
    numbers = torch.finfo(kappa.dtype)
    smallest = 8 * numbers.tiny  # well clear of subnormal numbers
    floor = torch.where(kappa * smallest < numbers.eps / 2, math.log(smallest), -math.inf)
    return floor.to(kappa.dtype)


LARGEST = 80.0  # e^80 is a number in single precision


@dataclass(frozen=True)
class Numbers:
    r"""What `LogOneMixture` needs: $h^2$, c, $\delta$, $\kappa$ and the floor of t."""

    h2: float
    c: float
    delta: float
    kappa: float
    floor: float

    @classmethod
    def of(cls, pi: float, sigma1: float, sigma2: float, dtype: torch.dtype) -> Numbers:
        """The coefficients, found in double precision."""
        share, *scales = (torch.tensor(x, dtype=torch.float64) for x in (pi, sigma1, sigma2))
        found = coefficients(share.log(), torch.log1p(-share), *scales)
        h, c, _, delta, kappa, _ = (x.item() for x in found)
        floor = _floor(torch.tensor(kappa, dtype=dtype)).item()
        return cls(h * h, c, delta, kappa, floor)


class LogMixture(Function):
    r"""$c - z^2 + \mathrm{softplus}(t)$ with $t = \delta - \kappa z^2$, $z = hw$, $\delta = d - c$.

    This is $\ln(e^{a} + e^{b})$ for the two quadratics $a = c - z^2$ and $b = a + t$. With the
    wider component as $a$, $t \le \delta$, so that no large numbers cancel. The weights have the
    shape that all arguments broadcast to; the last argument is how many of its trailing dimensions
    are summed over. The $\delta$ given is for its digits and has no gradient: the derivatives in c
    and d are the two shares, however small one of them is.

    The derivatives need the share of the narrower component, $r = 1 / (1 + e^{-t})$. Where it is
    too small to count, ``floor`` bounds t: processors work on subnormal numbers at a hundredth of
    their speed.
    """

    @staticmethod
    def forward(
        w: Tensor,
        h: Tensor,
        c: Tensor,
        d: Tensor,
        delta: Tensor,
        kappa: Tensor,
        floor: Tensor,
        dims: int,
    ) -> Tensor:
        z2 = (w * h).square_()
        t = (z2 * -kappa).add_(delta)
        torch.maximum(t, floor, out=t)
        # softplus(t) = max(t, 0) - ln(1 / (1 + e^-|t|)): beside c only its absolute error matters
        value = t.clamp(min=0).sub_(z2).add_(c)
        shares = t.abs_().sigmoid_()
        return total(value, dims).sub_(total_log(shares, (-math.log(2), 0.0), dims, shares))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.dims = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        w, h, c, d, delta, kappa, floor = ctx.saved_tensors
        grad = grad.reshape(grad.shape + (1,) * ctx.dims)
        if not (torch.is_grad_enabled() or any(ctx.needs_input_grad[1:])):
            t = (w * h).square_().mul_(-kappa).add_(delta)
            r = torch.maximum(t, floor, out=t).sigmoid_()
            return grad * (-2 * h.square()) * r.mul_(kappa).add_(1).mul_(w), *[None] * 7
        z2 = (w * h).square()
        delta = d - c if torch.is_grad_enabled() else delta  # for second derivatives
        t = torch.maximum(torch.addcmul(delta, kappa, z2, value=-1), floor)
        r = torch.sigmoid(t)
        slope = torch.addcmul(w, w * kappa, r)  # in w, over -2 h^2
        parts = (
            lambda: slope * (-2 * grad * h.square()),
            lambda: slope * (-2 * grad * h) * w,
            lambda: grad * torch.sigmoid(-t),
            lambda: grad * r,
            lambda: None,
            lambda: -grad * z2 * r,
        )
        tensors = zip(parts, ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        grads = (part().sum_to_size(x.shape) if needed else None for part, x, needed in tensors)
        return *grads, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        *tensors, dims = args
        rank = max(x.dim() - (d is not None) for x, d in zip(tensors, in_dims, strict=False))
        aligned = [
            x if d is None else _batch_first(x, d, rank)
            for x, d in zip(tensors, in_dims, strict=False)
        ]
        shape = torch.broadcast_shapes(*(x.shape for x in aligned))
        result: Tensor = LogMixture.apply(aligned[0].expand(shape), *aligned[1:], dims)
        return result, 0


class LogOneMixture(Function):
    r"""`LogMixture` where the coefficients are numbers: half the passes over the weights.

    Its value is $c - h^2w^2 + \mathrm{softplus}(t)$, $t = \delta - \kappa h^2 w^2$; the softplus is
    $-\ln(1 / (1 + e^t))$, as no t is above $\delta$, which must be below `LARGEST`.
    """

    @staticmethod
    def forward(w: Tensor, one: Numbers, dims: int) -> Tensor:
        found = [_total(some, one, dims) for some in Blocks.of(w, dims)(w)]
        return joined(found, w.shape[: w.dim() - dims])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        w, ctx.one, ctx.dims = inputs
        ctx.save_for_backward(w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (w,), one = ctx.saved_tensors, ctx.one
        grad = grad.reshape(grad.shape + (1,) * ctx.dims) * (-2 * one.h2)
        if torch.is_grad_enabled():  # for second derivatives
            t = (one.delta - one.kappa * one.h2 * w.square()).clamp(min=one.floor)
            return grad * (w + one.kappa * w * torch.sigmoid(t)), None, None
        of_w, blocks = empty_from_pool(w), Blocks.of(w, ctx.dims)
        columns = (blocks(x) for x in (w, of_w, grad.expand_as(w)))
        for some, room, of_each in zip(*columns, strict=True):
            r = _exponent(some, one, 1, room).sigmoid_()
            torch.addcmul(some, some, r, value=one.kappa, out=r).mul_(of_each)
        return of_w, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        w, one, dims = args
        result: Tensor = LogOneMixture.apply(w.movedim(in_dims[0], 0), one, dims)
        return result, 0


def _total(w: Tensor, one: Numbers, dims: int) -> Tensor:
    """The log-density, summed over the last ``dims`` dimensions."""
    shares = _exponent(w, one, -1, empty_from_pool(w)).sigmoid_()  # the logarithm is -softplus(t)
    least = -math.log1p(math.exp(one.delta))
    minus_value = total_log(shares, (least, 0.0), dims, shares)
    zero = torch.zeros((), dtype=w.dtype, device=w.device)
    z2 = torch.addcmul(zero, w, w, value=one.h2, out=shares if dims else None)
    minus_value.add_(total(z2, dims))
    count = math.prod(w.shape[w.dim() - dims :])
    return minus_value.neg_().add_(one.c * count)


def _exponent(w: Tensor, one: Numbers, sign: int, room: Tensor) -> Tensor:
    """The exponent t or -t, where t is bounded by its floor; written to ``room``."""
    delta = torch.full((), sign * one.delta, dtype=w.dtype, device=w.device)
    t = torch.addcmul(delta, w, w, value=-sign * one.kappa * one.h2, out=room)
    return t.clamp_(min=one.floor) if sign > 0 else t.clamp_(max=-one.floor)


# `apply` asks for it at every call; to work it out takes as long as a small layer
LogMixture.forward.__signature__ = inspect.signature(LogMixture.forward)  # type: ignore[attr-defined]


LogOneMixture.forward.__signature__ = inspect.signature(LogOneMixture.forward)  # type: ignore[attr-defined]


def _batch_first(x: Tensor, dim: int, rank: int) -> Tensor:
    """A batch of tensors as one, of which every entry has ``rank`` dimensions."""
    x = x.movedim(dim, 0)
    return x.reshape(x.shape[:1] + (1,) * (rank + 1 - x.dim()) + x.shape[1:])
