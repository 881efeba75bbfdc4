"""Priors by their parameters, and initial means of a guide."""

from collections.abc import Callable
from typing import Any

import torch
from pyro.distributions import Normal, TorchDistribution
from torch import Tensor

import pyro_bbb as bbb


def make_prior(parameters: tuple[float, ...]) -> TorchDistribution:
    """Make N(0, scale^2) of one parameter, or the scale mixture of three."""
    return Normal(0.0, *parameters) if len(parameters) == 1 else bbb.ScaleMixtureNormal(*parameters)


def normal_means(scale: float) -> Callable[[dict[str, Any]], Tensor]:
    """Make the ``init_loc`` of a guide whose initial means are samples of N(0, scale^2)."""
    return lambda site: scale * torch.randn(site["value"].shape)


def uniform_means(bound: float) -> Callable[[dict[str, Any]], Tensor]:
    """Make the ``init_loc`` of a guide whose initial means are uniform in [-bound, bound]."""
    return lambda site: torch.empty_like(site["value"]).uniform_(-bound, bound)
