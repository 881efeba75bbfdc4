# SPDX-License-Identifier: Apache-2.0
r"""Local reparameterisation (Kingma et al. 2015): outputs are drawn instead of weights.

With $W \sim N(M, S^2)$ and $b \sim N(m, s^2)$ elementwise an input $x$ has the outputs

$$z = x M^\top + m + \sqrt{v} \circ \epsilon, \qquad v = x^2 (S^2)^\top + s^2
  \qquad \text{(equation 6)}$$

Where an example meets a weight at several positions (convolutions, sequences), independent outputs
would not be those of one weight: there flipout perturbs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_bbb.estimators._flipout import perturb_by_signs
from pyro_bbb.estimators._per_example import Use, per_example


def local_reparameterization() -> AbstractContextManager[None]:
    """Linear layers draw their outputs instead of their weights; convolutions use flipout."""
    return per_example(_draw_outputs)


def _draw_outputs(use: Use) -> Tensor:
    if use.channel == 1 or use.x.dim() > 2:
        return perturb_by_signs(use)
    offset, used = use.weight.storage_offset(), use.posterior.used
    if offset in used:
        what = "a weight is used twice, with other noise each time; flipout keeps it"
        use.draws.warn("twice", what)
    used.add(offset)
    loc, scale = use.posterior.seen_as(use.weight)
    bias, bias_scale, of_bias = use.bias, None, use.draws.find(use.bias)
    if bias is not None and of_bias is not None:
        bias, bias_scale = of_bias.seen_as(bias)
    mean, std = use.operation(use.x, loc, bias), linear_std(use.x, scale, bias_scale)
    return torch.addcmul(mean, std, torch.randn_like(std))


def linear_std(x: Tensor, scale: Tensor, bias_scale: Tensor | None) -> Tensor:
    r"""Return $\sqrt{x^2 (S^2)^\top + s^2}$; where that is 0, its derivative is taken as 0.

    $S$ is ``[out, in]`` and the result ``[batch, out]``; for a single output ``[in]`` and
    ``[batch]``. Without $s$ the bias is not random.
    """
    of_bias = None if bias_scale is None else bias_scale.square()
    variance = F.linear(x.square(), scale.square(), of_bias)
    noisy = variance > 0
    return variance.where(noisy, 1.0).sqrt().where(noisy, 0.0)
