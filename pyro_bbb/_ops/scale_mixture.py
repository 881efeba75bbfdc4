# SPDX-License-Identifier: Apache-2.0
r"""The log-density of a mixture of two zero-mean Normals, in few passes over many weights.

With hundreds of thousands of weights memory traffic dominates: kernels work in place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function

from pyro_bbb._ops.buffers import empty_from_pool
from pyro_bbb._ops.reductions import HALF_LOG_2PI, Blocks, concatenated, total

Coefficients: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def coefficients(log_pi: Tensor, log_rest: Tensor, sigma1: Tensor, sigma2: Tensor) -> Coefficients:
    r"""The h, c, d, delta, kappa, floor of `log_mixture`; its reference is the wider component.

    The weights are $\ln\pi$ of the first component and $\ln(1 - \pi)$ of the second.
    """
    second = ((sigma2 > sigma1) & (log_rest > -math.inf)) | (log_pi == -math.inf)
    wide, narrow = torch.where(second, sigma2, sigma1), torch.where(second, sigma1, sigma2)
    log_first = torch.where(second, log_rest, log_pi)
    log_second = torch.where(second, log_pi, log_rest)
    log_wide, log_narrow = wide.log(), narrow.log()
    h = math.sqrt(0.5) / wide
    c = log_first - log_wide - HALF_LOG_2PI
    d = log_second - log_narrow - HALF_LOG_2PI
    delta = log_second - log_first + (log_wide - log_narrow)
    kappa = (wide - narrow) / narrow * (wide / narrow + 1)  # (wide/narrow)^2 - 1
    return h, c, d, delta, kappa, _floor(kappa.detach())


def _floor(kappa: Tensor) -> Tensor:
    """The t below which 1 + kappa / (1 + e^-t) rounds to 1; none if kappa is huge."""
    numbers = torch.finfo(kappa.dtype)
    smallest = 8 * numbers.tiny  # well clear of subnormal numbers
    floor = torch.where(kappa * smallest < numbers.eps / 2, math.log(smallest), -math.inf)
    return floor.to(kappa.dtype)


LARGEST = 80.0  # e^80 is a number in single precision


@dataclass(frozen=True)
class Numbers:
    r"""Coefficients of `LogOneMixture`: $h^2$, c, $\delta$, $\kappa$ and the floor of t."""

    h2: float
    c: float
    delta: float
    kappa: float
    floor: float

    @classmethod
    def of(cls, pi: float, sigma1: float, sigma2: float, dtype: torch.dtype) -> Numbers:
        """The coefficients, found in double precision."""
        fraction, *scales = (torch.tensor(x, dtype=torch.float64) for x in (pi, sigma1, sigma2))
        found = coefficients(fraction.log(), torch.log1p(-fraction), *scales)
        h, c, _, delta, kappa, _ = (x.item() for x in found)
        floor = _floor(torch.tensor(kappa, dtype=dtype)).item()
        return cls(h * h, c, delta, kappa, floor)


def log_mixture(w: Tensor, coefficients: Coefficients, dims: int) -> Tensor:
    r"""$\ln\big(\pi N(w|0, \sigma_1^2) + (1 - \pi) N(w|0, \sigma_2^2)\big)$, summed.

    This is $\ln(e^{a} + e^{b})$ for the quadratics $a = c - z^2$ of the wider component, $z = hw$,
    and $b = a + t$, $t = \delta - \kappa z^2 \le \delta$: no large numbers cancel. Where b is well
    above a, it is written as $b + \mathrm{softplus}(-t)$, else as $a + \mathrm{softplus}(t)$: so
    autograd finds the fraction of either component to all digits, however small. Where it is too
    small to count, ``floor`` bounds t, as processors are slow on subnormal numbers. The sum is over
    the last ``dims`` dimensions.
    """
    h, c, d, delta, kappa, floor = coefficients
    z2 = (w * h).square()
    t = torch.maximum(torch.addcmul(delta, kappa, z2, value=-1), floor)
    narrow = t > 1  # at 0 the derivative in w would lose a digit
    larger = torch.where(narrow, d - (1 + kappa) * z2, c - z2)
    softplus = torch.logaddexp(torch.where(narrow, -t, t), t.new_zeros(()))
    return total(larger + softplus, dims)


class LogOneMixture(Function):
    r"""`log_mixture` where the coefficients are numbers: a third of the passes over the weights.

    Its value is $c - h^2w^2 + \mathrm{softplus}(t)$, $t = \delta - \kappa h^2 w^2$; the softplus is
    $-\ln(1 / (1 + e^t))$, as no t is above $\delta$, which must be below `LARGEST`.
    """

    @staticmethod
    def forward(w: Tensor, one: Numbers, dims: int) -> Tensor:
        found = [_total(some, one, dims) for some in Blocks.of(w, dims)(w)]
        return concatenated(found, w.shape[: w.dim() - dims])

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
        for some, out, of_each in zip(*columns, strict=True):
            r = _exponent(some, one, 1, out).sigmoid_()
            torch.addcmul(some, some, r, value=one.kappa, out=r).mul_(of_each)
        return of_w, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        w, one, dims = args
        result: Tensor = LogOneMixture.apply(w.movedim(in_dims[0], 0), one, dims)
        return result, 0


def _total(w: Tensor, one: Numbers, dims: int) -> Tensor:
    """The log-density, summed over the last ``dims`` dimensions."""
    fractions = _exponent(w, one, -1, empty_from_pool(w)).sigmoid_()
    minus_value = total(fractions.log_(), dims)  # the logarithm is -softplus(t)
    zero = torch.zeros((), dtype=w.dtype, device=w.device)
    z2 = torch.addcmul(zero, w, w, value=one.h2, out=fractions if dims else None)
    minus_value.add_(total(z2, dims))
    count = math.prod(w.shape[w.dim() - dims :])
    return minus_value.neg_().add_(one.c * count)


def _exponent(w: Tensor, one: Numbers, sign: int, out: Tensor) -> Tensor:
    """The exponent t or -t, where t is bounded by its floor; written to ``out``."""
    delta = torch.full((), sign * one.delta, dtype=w.dtype, device=w.device)
    t = torch.addcmul(delta, w, w, value=-sign * one.kappa * one.h2, out=out)
    return t.clamp_(min=one.floor) if sign > 0 else t.clamp_(max=-one.floor)
