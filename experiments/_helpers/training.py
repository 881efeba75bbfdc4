# SPDX-License-Identifier: Apache-2.0
"""Hyper-parameters of trainings: priors, initial means, and the arguments of `pyro_bbb.fit`."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pyro.distributions import Normal, TorchDistribution
from torch import Tensor, nn

import pyro_bbb as bbb


@dataclass(frozen=True, kw_only=True)
class Training:
    """Hyper-parameters that most recipes share; a recipe adds others, and its own defaults."""

    lr: float = 1e-3
    """Adam's learning rate at the start."""
    lr_schedule: str = "cosine"
    """Learning-rate schedule."""
    estimator: str = "reparam"
    """Gradient estimator."""
    num_particles: int = 1
    """Draws of the weights per step."""

    def fit(self, model: Any, guide: Any, data: Any, **options: Any) -> bbb.History:
        """Call `pyro_bbb.fit` with all fields that are its arguments; ``options`` go before.

        Prints the ELBO of the last epoch, unless ``progress`` is False.
        """
        known = inspect.signature(bbb.fit).parameters
        own = {name: value for name, value in vars(self).items() if name in known}
        history = bbb.fit(model, guide, data, **own | options)
        if options.get("progress", True):
            print(final_elbo(history))
        return history


def final_elbo(history: bbb.History) -> str:
    """The negative ELBO of the last epoch, its temperature, and the baseline, as a sentence."""
    if history.baseline_per_example is None:
        return "Point estimate: no ELBO."
    return (
        f"Negative ELBO: {history.neg_elbo_per_example[-1]:.4g} nats per example at temperature "
        f"{history.kl_weight[-1]:.4g}; ignoring the data: {history.baseline_per_example:.4g}."
    )


def dropout_passes(network: nn.Module, x: Tensor, passes: int, seed: int) -> Tensor:
    """Outputs ``[passes, n, ...]`` with dropout left on (Gal and Ghahramani 2016)."""
    torch.manual_seed(seed)
    network.train()
    with torch.no_grad():
        return torch.stack(
            [torch.cat([network(part) for part in x.split(1024)]) for _ in range(passes)]
        )


def make_prior(parameters: tuple[float, ...]) -> TorchDistribution:
    """Make N(0, scale^2) of one parameter, or the scale mixture of three."""
    return Normal(0.0, *parameters) if len(parameters) == 1 else bbb.ScaleMixtureNormal(*parameters)


def normal_means(scale: float) -> Callable[[dict[str, Any]], Tensor]:
    """Make the ``init_loc`` of a guide whose initial means are samples of N(0, scale^2)."""
    return lambda site: scale * torch.randn(site["value"].shape)


def uniform_means(bound: float) -> Callable[[dict[str, Any]], Tensor]:
    """Make the ``init_loc`` of a guide whose initial means are uniform in [-bound, bound]."""
    return lambda site: torch.empty_like(site["value"]).uniform_(-bound, bound)
