# SPDX-License-Identifier: Apache-2.0
r"""Moments of a network's tangent layer by layer, for covariances of Kronecker factors.

A layer of inputs $a_t$ (at each position t where its weights are used) and gradients $g_{kt}$ of
output k at its own output gives $J_k = \sum_t g_{kt} a_t^\top$. Under
$W = M + Q\,(S \circ E)\,P^\top$, see `Kronecker`, the covariance of outputs k and l is the sum over
layers of

$$\sum_{ij} S_{ij}^2\,(Q^\top J_k P)_{ij}\,(Q^\top J_l P)_{ij}$$

With a single position, as in a linear layer, no derivative by a weight is made:

$$\sum_i (Q^\top g_k)_i\,(Q^\top g_l)_i \sum_j S_{ij}^2\,(P^\top a)_j^2$$
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_bbb._handlers.layer_uses import LayerUses
from pyro_bbb._utils.inputs import Rows
from pyro_bbb.guides._laplace.gauss_newton import Use, uses_of
from pyro_bbb.guides.covariance import CovariancePart, Kronecker
from pyro_bbb.guides.tangent import NetworkFunction

_ROWS = 64  # examples in one graph


def moments_by_layer(
    model: Any, guide: Any, parts: dict[str, CovariancePart], x: Rows
) -> tuple[Tensor, Tensor]:
    """Means ``[n, ...]`` and covariances ``[n, K, K]`` of the outputs.

    Args:
        model: the model.
        guide: a `Laplace` guide.
        parts: its covariance, by site name: `Kronecker` of weights, `Dense` of biases.
        x: inputs, each of which decides its own outputs alone.
    """
    found = [_moments(model, guide, parts, rows) for rows in x.split(_ROWS)]
    means, covariances = zip(*found, strict=True)
    return torch.cat(means), torch.cat(covariances)


def _moments(
    model: Any, guide: Any, parts: dict[str, CovariancePart], x: Rows
) -> tuple[Tensor, Tensor]:
    loc, latents = guide.loc.detach(), guide.latents
    function = NetworkFunction(model, latents, loc, slice(0, len(loc)))
    values = {name: z.detach().requires_grad_() for name, z in latents.constrain(loc).items()}
    with torch.enable_grad(), LayerUses(values) as layers:
        f = function.run(values, x)
        uses, columns = uses_of(layers.uses), f.flatten(1).sum(0).unbind()
    covariance = f.new_zeros(len(f), f[0].numel(), f[0].numel())
    for use, by_output in zip(uses, _gradients(columns, uses), strict=True):
        covariance += _contribution(parts[use.weight], use.inputs, by_output)
        if use.bias is not None:
            root = parts[use.bias].times_root(by_output.sum(2))
            covariance += root @ root.mT
    return f.detach(), covariance


def _gradients(columns: Sequence[Tensor], uses: list[Use]) -> list[Tensor]:
    """Derivatives of the K outputs by each layer's, ``[n, K, positions, out]``.

    Args:
        columns: the K outputs, each summed over the examples.
        uses: of the weights.
    """
    targets = [use.output for use in uses]
    found = [torch.autograd.grad(column, targets, retain_graph=True) for column in columns]
    return [
        torch.stack([use.gradients(each) for each in by_column], dim=1)
        for use, by_column in zip(uses, zip(*found, strict=True), strict=True)
    ]


def _contribution(part: CovariancePart, inputs: Tensor, by_output: Tensor) -> Tensor:
    """The weight's contribution to the covariance, for inputs ``[n, positions, in]``."""
    if inputs.shape[1] == 1 and isinstance(part, Kronecker):
        rotated = by_output.squeeze(2) @ part.out  # [n, K, out]
        squares = (inputs.squeeze(1) @ part.inner).square() @ part.scale.square().T  # [n, out]
        return (rotated * squares.unsqueeze(1)) @ rotated.mT
    jacobian = by_output.mT @ inputs.unsqueeze(1)  # [n, K, out, in]
    root = part.times_root(jacobian.flatten(2))
    return root @ root.mT
