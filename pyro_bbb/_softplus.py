r"""$\ln(1 + e^\rho)$ of many weights.

Torch's own `softplus` and `log1p` can take ten times as long as its logarithm: on a processor with
AVX-512, depending on what ran before. With many weights that was half of a training step.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyro_bbb._memory import blank
from pyro_bbb._whole import Whole, over_parts

LINEAR = 40.0  # e^-40 is below the rounding of float64


def softplus(rho: Tensor) -> Tensor:
    r"""$\ln(1 + e^\rho)$, exact to rounding in float32 and float64 for every $\rho$."""
    result: Tensor = Softplus.apply(rho)
    return result


def softplus_into(rho: Tensor, out: Tensor) -> Tensor:
    """`softplus` without gradient, written to ``out``."""
    if rho.device.type != "cpu":
        return torch.ops.aten.softplus.out(rho, 1, LINEAR, out=out)
    rest = _minus_half_rest(torch.abs(rho, out=out))
    return torch.sub(torch.clamp(rho, min=0, out=rest), out, alpha=2, out=out)


def softplus_beside(rhos: Sequence[Tensor], out: Whole) -> Whole:
    """`softplus_into` of tensors side by side."""
    if out.vector.device.type != "cpu":
        return over_parts(softplus_into, out, rhos)
    rest = _minus_half_rest(over_parts(torch.abs, out, rhos).vector)
    over_parts(partial(torch.clamp, min=0), Whole(rest, rhos), rhos)
    torch.sub(rest, out.vector, alpha=2, out=out.vector)
    return out


def _minus_half_rest(x: Tensor) -> Tensor:
    r"""Makes of $x = |\rho|$ minus half of $\ln(1 + e^{-x})$; returns memory that it needed.

    That is $\mathrm{artanh}(s / (s - 2))$, $s = 1 / (1 + e^x)$: no numbers that are close are
    subtracted.
    """
    share = x.neg_().sigmoid_()
    room = torch.sub(share, 2, out=blank(share))
    torch.div(share, room, out=x).atanh_()
    return room


class Softplus(Function):
    """`softplus`, whose derivative is the logistic function."""

    @staticmethod
    def forward(rho: Tensor) -> Tensor:
        return softplus_into(rho, torch.empty_like(rho))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (rho,) = ctx.saved_tensors
        return grad * torch.sigmoid(rho)

    jvp = backward  # it is its own transpose

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], rho: Tensor) -> tuple[Tensor, int | None]:
        return softplus(rho), in_dims[0]


# `apply` asks for it at every call; to work it out takes as long as a small layer
Softplus.forward.__signature__ = inspect.signature(Softplus.forward)  # type: ignore[attr-defined]
