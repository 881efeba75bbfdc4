# SPDX-License-Identifier: Apache-2.0
r"""Standard deviations of a linear layer's outputs, over its weights.

With $W \sim N(M, S^2)$ and $b \sim N(m, s^2)$ elementwise an input $x$ has the outputs
$N(Mx + m, v)$, $v = S^2 x^2 + s^2$ (Kingma et al. 2015, equation 6). The derivatives of $\sqrt v$
need no variance of weights but the one that the outputs were made of: in $S$ they are
$x^2 S / \sqrt v$.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


def linear_std(x: Tensor, scale: Tensor, bias_scale: Tensor | None) -> Tensor:
    r"""$\sqrt{S^2 x^2 + s^2}$; where that is 0, it has no derivative, and 0 for one.

    $S$ is ``[out, in]`` and the result ``[batch, out]``; for a single output ``[in]`` and
    ``[batch]``. Without $s$ the bias is not random.
    """
    watched = torch._C._are_functorch_transforms_active()
    if scale.dim() != 2 or watched or torch.is_autocast_enabled(x.device.type):
        return _by_autograd(x, scale, bias_scale)
    std: Tensor = LinearStd.apply(x, scale, bias_scale)[0]
    return std


def _by_autograd(x: Tensor, scale: Tensor, bias_scale: Tensor | None) -> Tensor:
    """The same by operations that a transform, or autocasting, can take one by one."""
    of_bias = None if bias_scale is None else bias_scale.square()
    variance = F.linear(x.square(), scale.square(), of_bias)
    noisy = variance > 0
    return variance.where(noisy, 1.0).sqrt().where(noisy, 0.0)


class LinearStd(Function):
    """`linear_std` in few passes over the weights."""

    @staticmethod
    def forward(
        x: Tensor, scale: Tensor, bias_scale: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        squares = x.square()
        variance = scale.square()
        of_bias = None if bias_scale is None else bias_scale.square()
        return F.linear(squares, variance, of_bias).sqrt_(), squares, variance

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        std, squares, variance = output
        ctx.mark_non_differentiable(squares, variance)
        ctx.set_materialize_grads(False)  # of all weights, for nothing
        ctx.save_for_backward(*inputs, std, squares, variance)

    @staticmethod
    def backward(ctx: Any, of_std: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if of_std is None:
            return None, None, None
        *inputs, std, squares, variance = ctx.saved_tensors
        x, scale, bias_scale = inputs
        if torch.is_grad_enabled():
            return _to_differentiate(inputs, ctx.needs_input_grad, of_std)
        half = (of_std / std).masked_fill_(std == 0, 0.0)  # of the gradient in the variance, twice
        of_x = of_scale = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = half.mm(variance).mul_(x)
        if ctx.needs_input_grad[1]:
            of_scale = half.t().mm(squares).mul_(scale)
        if ctx.needs_input_grad[2]:
            of_bias = half.sum(0).mul_(bias_scale)
        return of_x, of_scale, of_bias


def _to_differentiate(inputs: list[Any], needed: tuple[bool, ...], of_std: Tensor) -> Any:
    """The derivatives where they will have derivatives themselves."""
    chosen = [x for x, need in zip(inputs, needed, strict=True) if need]
    std = _by_autograd(*inputs)
    found = iter(torch.autograd.grad(std, chosen, of_std, create_graph=True))
    return tuple(next(found) if need else None for need in needed)
