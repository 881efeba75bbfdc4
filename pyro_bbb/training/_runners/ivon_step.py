# SPDX-License-Identifier: Apache-2.0
r"""The step of IVON on flat vectors: natural-gradient descent of a diagonal Gaussian.

Shen et al. (2024), "Variational Learning is Effective for Large Deep Networks", Algorithm 1. Each
coordinate has a mean $m$, a momentum $g$ and a Hessian $h$ of the mean loss per example; the
posterior is $N(m, \sigma^2)$, $\sigma^{-2} = \lambda h + \Lambda_0$, $\Lambda_0 = \lambda\delta$
being the precision of the prior and $\lambda$ the effective number of examples. Scalars are
tensors without dimensions, so that no step waits for its device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class IvonVectors:
    """The state of the algorithm, which `update` changes in place, and a vector for its work."""

    mean: Tensor
    momentum: Tensor
    hessian: Tensor
    work: Tensor


@dataclass(frozen=True)
class IvonScalars:
    r"""The numbers of one step; where all but the last are 0, it leaves the state as it is.

    Args:
        examples: number of examples over which gradients are summed.
        lr: learning rate.
        rate1: $1 - \beta_1$, of the momentum.
        rate2: $1 - \beta_2$, of the Hessian.
        debias: $1 - \beta_1^t$ at step $t$, from 1.
    """

    examples: Tensor
    lr: Tensor
    rate1: Tensor
    rate2: Tensor
    debias: Tensor


def scale_into(hessian: Tensor, precision: Tensor, num_data: Tensor | float, out: Tensor) -> Tensor:
    r"""$\sigma = (\lambda h + \Lambda_0)^{-1/2}$, written to ``out``."""
    return torch.mul(hessian, num_data, out=out).add_(precision).rsqrt_()


def update(
    at: IvonVectors,
    grad: Tensor,
    price: Tensor,
    prior_loc: Tensor | None,
    decay: Tensor,
    now: IvonScalars,
) -> None:
    r"""One step of Algorithm 1, for the prior $N(\mu_0, 1/(\lambda\delta))$.

    $$g \leftarrow \beta_1 g + (1-\beta_1)\hat g, \qquad
      h \leftarrow h - (1-\beta_2)(h-\hat h)
        + \tfrac12(1-\beta_2)^2\frac{(h-\hat h)^2}{h+\delta},$$
    $$m \leftarrow m - \alpha\,\frac{g/(1-\beta_1^t) + \delta(m-\mu_0)}{h+\delta}.$$

    The last term of $h$ keeps $h + \delta$ positive: the sum is
    $\tfrac12\bigl(1 + (1 - x)^2\bigr)$ of it, $x = (1-\beta_2)(h-\hat h)/(h+\delta)$.

    Args:
        at: the state, vectors of ``[n]``.
        grad: $\hat g$, summed over examples.
        price: $\hat h = \hat g\,(\theta - m) / \sigma^2$, whose mean is the mean Hessian (Price
            1958), likewise; changed.
        prior_loc: $\mu_0$, a number or ``[n]``; none where it is 0.
        decay: $\delta$, likewise.
        now: numbers of this step.
    """
    difference = torch.addcmul(at.hessian, price, 1 / now.examples, value=-1, out=price)  # h - ĥ
    difference.mul_(now.rate2)
    curvature = torch.add(at.hessian, decay, out=at.work)
    at.hessian.sub_(difference)
    at.hessian.addcdiv_(difference.square_(), curvature, value=0.5)
    at.momentum.mul_(1 - now.rate1).addcmul_(grad, now.rate1 / now.examples)
    ascent = torch.mul(at.momentum, now.lr / now.debias, out=price)
    ascent.addcmul_(at.mean, now.lr * decay)
    if prior_loc is not None:
        ascent.sub_(now.lr * decay * prior_loc)
    at.mean.addcdiv_(ascent, torch.add(at.hessian, decay, out=at.work), value=-1)


def sum_of_logs(x: Tensor) -> Tensor:
    """The sum of the logarithms of scales, ``[n]``, in pairs: a logarithm costs six products.

    The scale of a finite precision is at least the root of the smallest number, so no product is 0.
    """
    half = len(x) // 2
    pairs = (x[:half] * x[half : 2 * half]).log_().sum()
    return pairs + x[2 * half :].log().sum()


def inverse_softplus(scale: Tensor, out: Tensor) -> Tensor:
    r"""$\rho = \ln(e^\sigma - 1) = \sigma + \ln(-\mathrm{expm1}(-\sigma))$; $-\infty$ for 0."""
    return torch.neg(scale, out=out).expm1_().neg_().log_().add_(scale)
