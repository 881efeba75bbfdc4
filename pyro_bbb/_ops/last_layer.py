# SPDX-License-Identifier: Apache-2.0
r"""Variance of a linear layer's outputs, and a KL, where each row of weights has a full covariance.

The covariance is $L L^\top$ with $L = \mathrm{diag}(\sigma)(I + U)$ and $U$ strictly lower
triangular, one for all rows (k = 1) or one for each. By single operations a step on a small
network took half as long again: they are few numbers, and each operation costs the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class LastLayerVariance(Function):
    r"""Variances ``[k, n]`` of $Wx + b$: $\lVert L^\top (x, 1)\rVert^2$, or without b.

    Its arguments are x ``[n, in]``; the columns' $\sigma$ ``[k, in]`` and U ``[k, in, in]``; and of
    b, the last column, $\sigma$ ``[k]`` and the row of U ``[k, in]``, or ``None``.
    """

    @staticmethod
    def forward(
        x: Tensor,
        scale: Tensor,
        lower: Tensor,
        bias_scale: Tensor | None,
        bias_lower: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        scaled = x * scale.unsqueeze(1)  # [k, n, in]
        whitened = torch.baddbmm(scaled, scaled, lower)
        if bias_scale is None or bias_lower is None:
            return whitened.square().sum(-1), whitened
        whitened += (bias_scale.unsqueeze(-1) * bias_lower).unsqueeze(1)
        return whitened.square().sum(-1).add_(bias_scale.square().unsqueeze(-1)), whitened

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        x, scale, lower, bias_scale, bias_lower, whitened = ctx.saved_tensors
        of_whitened = whitened * (2 * grad).unsqueeze(-1)
        of_scaled = torch.baddbmm(of_whitened, of_whitened, lower.mT)
        of_lower = torch.bmm((x * scale.unsqueeze(1)).mT, of_whitened)
        of_x = (of_scaled * scale.unsqueeze(1)).sum(0)
        of_scale = (of_scaled * x).sum(1)
        if bias_scale is None:
            return of_x, of_scale, of_lower, None, None
        of_row = of_whitened.sum(1)  # [k, in]
        of_bias = (of_row * bias_lower).sum(-1).addcmul_(grad.sum(1), bias_scale, value=2)
        return of_x, of_scale, of_lower, of_bias, of_row * bias_scale.unsqueeze(-1)


class LastLayerKL(Function):
    r"""KL from independent Normals $N(m, s^2)$ in nats, summed over the weights W, or b given W.

    $$\tfrac12\sum_j \frac{(\mu_j - m_j)^2 + \sigma_j^2 (1 + \lVert U_j\rVert^2)}{s_j^2}
      + \sum_j \ln\frac{s_j}{\sigma_j} - \tfrac d2$$

    Its arguments are $\mu$ ``[out, in]``, $\sigma$ ``[k, in]``, U ``[k, in, in]``, m and s like
    $\mu$; or ``[out]``, ``[k]``, ``[k, in]``.
    """

    @staticmethod
    def forward(
        loc: Tensor, scale: Tensor, lower: Tensor, prior_loc: Tensor, prior_scale: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        distance, rows = loc - prior_loc, lower.square().sum(-1).add_(1)
        spread = torch.addcmul(scale.square() * rows, distance, distance)  # E (w - m)^2
        of_moments = (spread / prior_scale.square()).sum().mul_(0.5)
        log_scale = scale.log().sum().mul_(len(loc) / len(scale))
        kl = of_moments.add_(prior_scale.log().sum()).sub_(log_scale).sub_(0.5 * loc.numel())
        return kl, rows, spread

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *output[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        loc, scale, lower, prior_loc, prior_scale, rows, spread = ctx.saved_tensors
        precision = prior_scale.square().reciprocal()
        of_loc = grad * ((loc - prior_loc) * precision)
        shared = precision.sum(0, keepdim=True) if len(scale) < len(loc) else precision
        slope = grad * (shared * scale)  # of half the variance over sigma
        of_scale = torch.addcmul(-grad * (len(loc) / len(scale)) / scale, slope, rows)
        of_lower = lower * (slope * scale).unsqueeze(-1)
        of_prior_loc = of_prior_scale = None
        if ctx.needs_input_grad[3]:
            of_prior_loc = -of_loc
        if ctx.needs_input_grad[4]:
            of_prior_scale = grad * (1 - spread * precision) / prior_scale
        return of_loc, of_scale, of_lower, of_prior_loc, of_prior_scale
