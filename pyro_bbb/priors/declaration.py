# SPDX-License-Identifier: Apache-2.0
"""Random weights of a module, each declared as a `PyroSample` under one prior."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pyro.nn import PyroModule, PyroSample
from torch import Size, Tensor, nn
from torch.distributions import Distribution

from pyro_bbb._param_store import own_param
from pyro_bbb.priors._base import Prior


class SitePrior:
    """Distribution of a `PyroSample`, from the prior that the module, or its copy, has."""

    def __init__(self, name: str, shape: Sequence[int]) -> None:
        self.name: str = name
        self.shape: Size = Size(shape)

    def __call__(self, module: nn.Module) -> Distribution:
        """Return the prior of the module's weight."""
        if torch._C._current_graph_task_id() != -1:  # a backward pass is under way
            raise RuntimeError(
                f"the backward pass computes a part of the network again and needs {self.name!r} "
                "as it was: pass context_fn=model.checkpoint_contexts and use_reentrant=False to "
                "torch.utils.checkpoint"
            )
        distribution: Distribution = prior_of(module, self.name)(module, self.name, self.shape)
        return distribution


def prior_of(module: nn.Module, name: str) -> Any:
    """Return the prior of a declared weight."""
    return module._modules["prior"].for_weight(name)  # type: ignore[union-attr,operator]


def announced(module: nn.Module, name: str, parameter: nn.Parameter) -> Tensor:
    """Announce a prior's parameter to SVI as ``name`` of the module, and return it.

    `BayesianModel` announces all parameters; a network that is a Pyro model without it needs this.
    """
    context = getattr(module, "_pyro_context", None)
    if context is None or not context.active or not parameter.requires_grad:
        return parameter
    return own_param(module._pyro_get_fullname(name), parameter)  # type: ignore[operator]


def declare(module: PyroModule, prior: Prior, **shapes: Sequence[int]) -> None:
    """Make weights of a module random: one `PyroSample` each, all under one prior.

    Args:
        module: the module; gets the prior as its child ``prior``.
        prior: gives the distributions.
        **shapes: the weights' names and shapes.

    Raises:
        ValueError: the prior does not fit a shape, or has no pattern for a name.
        TypeError: an argument is of another kind.
    """
    for argument, value, expected in (("module", module, PyroModule), ("prior", prior, Prior)):
        if not isinstance(value, expected):
            raise TypeError(f"{argument} must be a {expected.__name__}, got {value!r}")
    for name, shape in shapes.items():
        try:
            valid = all(length >= 0 for length in Size(shape))
        except TypeError:
            valid = False
        if not valid:
            raise TypeError(f"{name} must have a shape of lengths from 0, got {shape!r}")
    module.add_module("prior", prior)
    for name, shape in shapes.items():
        prior.attach(module, name, Size(shape))
        setattr(module, name, PyroSample(SitePrior(name, shape)))  # type: ignore[arg-type]


def declared_shapes(module: nn.Module) -> dict[str, list[int]]:
    """Return the shapes of the weights that `declare` has made random, by name."""
    samples = vars(module).get("_pyro_samples", {})
    return {k: list(site.shape) for k, site in samples.items() if isinstance(site, SitePrior)}
