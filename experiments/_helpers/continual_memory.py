# SPDX-License-Identifier: Apache-2.0
"""Precision that tasks gave the weights, and the prior that it makes for the next task."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from pyro import poutine
from pyro.distributions import Normal
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Size, Tensor, nn

from _helpers.run import Data

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
