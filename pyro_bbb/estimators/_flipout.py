# SPDX-License-Identifier: Apache-2.0
r"""Flipout (Wen et al. 2018): random signs of each example's own perturb the drawn weights.

$$x M^\top + \big((x \circ s)(W - M)^\top\big) \circ r, \qquad W \sim N(M, S^2), \quad
  s, r \text{ random signs}$$
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from pyro_bbb.estimators._per_example import Use, per_example


def flipout() -> AbstractContextManager[None]:
    """Linear layers and convolutions perturb each example by its random signs."""
    return per_example(perturb_by_signs)


def perturb_by_signs(use: Use) -> Tensor:
    """Return the mean's outputs, plus those of W - M between random signs."""
    loc, _ = use.posterior.seen_as(use.weight)
    outputs = use.operation(use.x, loc, use.bias)
    perturbation = use.operation(use.x * _signs(use, "in", use.x), use.weight - loc)
    return outputs + perturbation * _signs(use, "out", outputs)


def _signs(use: Use, role: str, like: Tensor) -> Tensor:
    """Return signs per example and channel, the same at every use of this weight's draw."""
    weight, channel, signs = use.weight, use.channel, use.posterior.signs
    if channel == -1 and weight.dim() == 2 and weight.stride(0) < weight.stride(1):
        role = {"in": "out", "out": "in"}[role]  # a transpose puts out what the matrix takes in
    shape = [1] * like.dim()
    shape[0], shape[channel] = like.shape[0], like.shape[channel]
    key = (role, weight.storage_offset(), *shape)
    if key not in signs:
        bits = torch.randint(2, shape, dtype=torch.uint8, device=like.device)
        signs[key] = bits.to(like.dtype).mul_(2).sub_(1)
    return signs[key]
