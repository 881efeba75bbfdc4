# SPDX-License-Identifier: Apache-2.0
"""Curvature that tasks gave the weights as Kronecker products, and the prior that it makes."""

import warnings
from typing import Any

import torch
from pyro.distributions import MultivariateNormal, TransformedDistribution
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor
from torch.distributions.transforms import ReshapeTransform

from _helpers.continual_memory import Memory, first_variances
from _helpers.run import Data
from pyro_bbb import guides
from pyro_bbb.guides.covariance import Kronecker, PartsNormal


class KroneckerMemory(Memory):
    r"""Means of the weights, and the curvature that the tasks so far gave them.

    Laplace's approximation of one task after the other (Ritter, Botev and Barber 2018,
    arXiv:1805.07810): the next prior of a kernel $[o, i]$ has the latest mean and the precision

    $$h I + \lambda \Big(\sum_t H_t\Big) \otimes \Big(\frac1T \sum_t A_t\Big)$$

    with h that of the first prior, $\lambda$ the strength, and $H_t \otimes A_t$ the Gauss-Newton
    curvature of task t: $H_t$ ``[o, o]`` of the outputs, $A_t$ ``[i, i]`` of the inputs, of trace
    1. That of a bias is $h I + \lambda \sum_t H_t$.

    Args:
        first_prior: prior of the weights before any task.
        strength: factor of the curvature that tasks gave.
    """

    def __init__(self, first_prior: Any, strength: float) -> None:
        super().__init__(first_prior, strength)
        self.first: dict[str, float] = {}  # precision of the first prior
        self.of_outputs: dict[str, Tensor] = {}  # sum of the tasks'
        self.of_inputs: dict[str, list[Tensor]] = {}  # one of each task; none for biases

    def normal(self, name: str) -> TorchDistribution:
        """As for `Memory`."""
        loc, first = self.loc[name], self.first[name]
        of_outputs = self.strength * self.of_outputs[name]
        if name not in self.of_inputs:
            precision = of_outputs + first * torch.eye(len(loc))
            return MultivariateNormal(loc, precision_matrix=precision)
        of_inputs = torch.stack(self.of_inputs[name]).mean(0)
        return kronecker_normal(loc, of_outputs, of_inputs, first)

    def add(self, model: Any, guide: Any, data: Data) -> None:
        """As for `Memory`."""
        laplace = guides.Laplace(model, structure="kron")
        with warnings.catch_warnings():  # of its draws, which nobody predicts with
            warnings.simplefilter("ignore", guides.LinearizationWarning)
            laplace.approximate(data)
        variances, loc = first_variances(model), guide.median()
        for name, part in zip(laplace.site_names, laplace.covariance, strict=True):
            self.loc[name] = loc[name].detach()
            self.first[name] = 1 / variances[name].mean().item()
            self.add_factors(name, part)

    def add_factors(self, name: str, part: Any) -> None:
        """Add the factors of the curvature, which is what a precision has above the prior's."""
        if self.loc[name].dim() == 1:
            size = len(part.scale_tril)
            gained = torch.cholesky_inverse(part.scale_tril) - self.first[name] * torch.eye(size)
        else:
            curvature = (part.scale**-2 - self.first[name]).clamp(min=0)  # [o, i], of rank one
            gained = part.out * curvature.sum(1) @ part.out.T
            of_inputs = part.inner * (curvature.sum(0) / curvature.sum()) @ part.inner.T
            self.of_inputs.setdefault(name, []).append(of_inputs)
        self.of_outputs[name] = self.of_outputs.get(name, 0.0) + gained


def kronecker_normal(
    loc: Tensor, of_outputs: Tensor, of_inputs: Tensor, first: float
) -> TransformedDistribution:
    r"""Normal of a matrix whose precision is $h I + H \otimes A$.

    Args:
        loc: mean ``[o, i]``.
        of_outputs: H ``[o, o]``, positive semidefinite.
        of_inputs: A ``[i, i]``, likewise.
        first: h, positive.
    """
    outer, out = torch.linalg.eigh(of_outputs)
    inner, directions = torch.linalg.eigh(of_inputs)
    curvature = torch.outer(outer.clamp(min=0), inner.clamp(min=0))
    part = Kronecker(slice(0, loc.numel()))
    part.set(out=out, inner=directions, scale=(curvature + first).rsqrt())
    flat = PartsNormal(loc.flatten(), [part])
    return TransformedDistribution(flat, [ReshapeTransform(flat.event_shape, loc.shape)])
