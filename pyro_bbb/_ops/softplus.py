# SPDX-License-Identifier: Apache-2.0
r"""$\ln(1 + e^\rho)$ of many weights.

Torch's own `softplus` and `log1p` can take ten times as long as its logarithm: on a processor with
AVX-512, depending on what ran before. With many weights that was half of a training step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyro_bbb._ops.buffers import empty_from_pool
from pyro_bbb._ops.tuning import SMALL

LINEAR = 40.0  # e^-40 is below the rounding of float64


def softplus(rho: Tensor) -> Tensor:
    r"""$\ln(1 + e^\rho)$, exact to rounding in float32 and float64 for every $\rho$."""
    result: Tensor = Softplus.apply(rho)
    return result


def softplus_into(rho: Tensor, out: Tensor) -> Tensor:
    r"""`softplus` without gradient, written to ``out``.

    Of many numbers on a CPU by $\max(\rho, 0) - 2\,\mathrm{artanh}(s / (s - 2))$,
    $s = 1 / (1 + e^{|\rho|})$: no numbers that are close are subtracted.
    """
    if rho.device.type != "cpu" or rho.numel() < SMALL:
        return torch.ops.aten.softplus.out(rho, 1, LINEAR, out=out)
    fraction = torch.abs(rho, out=out).neg_().sigmoid_()
    rest = torch.sub(fraction, 2, out=empty_from_pool(fraction))
    torch.div(fraction, rest, out=out).atanh_()
    return torch.sub(torch.clamp(rho, min=0, out=rest), out, alpha=2, out=out)


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
