# SPDX-License-Identifier: Apache-2.0
"""Memories of earlier tasks: diagonal precisions, or Kronecker factors."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from pyro import poutine
from pyro.distributions import MultivariateNormal, Normal, TransformedDistribution
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Size, Tensor, nn
from torch.distributions.transforms import ReshapeTransform

from _helpers.run import Data
from pyro_bbb import guides
from pyro_bbb.guides.covariance import Kronecker, PartsNormal

ONE_SD = [0.15865525393145707, 0.5, 0.8413447460685429]  # quantiles of a Normal


class Memory(ABC):
    """Means of the weights, and what the tasks so far gave them, by site name.

    Args:
        first_prior: prior of the weights before any task.
        strength: factor of what tasks gave.
    """

    def __init__(self, first_prior: Any, strength: float) -> None:
        self.first_prior, self.strength = first_prior, strength
        self.loc: dict[str, Tensor] = {}

    def prior(self) -> Any:
        """Priors by the weights' names in a network; the first one of weights without a memory."""
        known = {
            name.removeprefix("network."): partial(given, self.normal(name)) for name in self.loc
        }
        return {**known, "*": self.first_prior}

    @abstractmethod
    def normal(self, name: str) -> TorchDistribution:
        """The prior of a weight for the next task."""

    @abstractmethod
    def add(self, model: Any, guide: Any, data: Data) -> None:
        """Add what a task gave to the weights of a guide; the model has them with `first_prior`."""


def given(distribution: TorchDistribution, module: nn.Module, name: str, shape: Size) -> Any:
    """A prior that is known already."""
    return distribution


def first_variances(model: Any) -> dict[str, Tensor]:
    """Variance of each weight's prior in a model, by site name."""
    sites = poutine.trace(model.draw_latents).get_trace().nodes
    return {name: sites[name]["fn"].variance.detach() for name in model.latent_shapes()}


class DiagonalMemory(Memory):
    r"""Means of the weights, and the precision that the tasks so far gave them.

    A posterior has the precision of its prior and what its task gave. The next prior is the first
    one with ``strength`` times the sum of what all tasks gave. With strength 1 that is the
    posterior (`pyro_bbb.priors.from_guide`); more holds the means faster and leaves the variance
    of the posterior to the data, as in generalised VCL (Loo, Swaroop and Turner 2021,
    arXiv:2011.12328) and in EWC.

    Args:
        first_prior: prior of the weights before any task.
        strength: factor of the precision that tasks gave.
    """

    def __init__(self, first_prior: Any, strength: float) -> None:
        super().__init__(first_prior, strength)
        self.first: dict[str, Tensor] = {}  # precision of the first prior
        self.gained: dict[str, Tensor] = {}

    def normal(self, name: str) -> TorchDistribution:
        """As for `Memory`."""
        loc = self.loc[name]
        return Normal(loc, self.precision(name).rsqrt()).to_event(loc.dim())

    def scales(self) -> Iterator[tuple[str, Tensor]]:
        """Name and standard deviation of the prior of each weight that a task was learned with."""
        for name in self.loc:
            yield name, self.precision(name).rsqrt()

    def precision(self, name: str) -> Tensor:
        """Precision of a weight's prior."""
        return self.first[name] + self.strength * self.gained[name]

    def add(self, model: Any, guide: Any, data: Data) -> None:
        """As for `Memory`."""
        variances = first_variances(model)
        for name, loc, scale in moments(guide):
            if name not in self.loc:
                self.first[name] = 1 / variances[name]
                self.gained[name] = torch.zeros_like(loc)
            gain = 1 / scale.square() - self.precision(name)
            self.gained[name] = self.gained[name] + gain.clamp(min=0)
            self.loc[name] = loc


def moments(guide: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, mean and standard deviation of each weight of a Normal guide."""
    for name, (below, loc, above) in guide.quantiles(ONE_SD).items():
        yield name, loc.detach(), ((above - below) / 2).detach()


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
