"""Whether several draws of all latents at once are what they are one after the other."""

from __future__ import annotations

from typing import Any

from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroModule
from torch import nn
from torch.distributions import Distribution
from torch.nn.modules.conv import _ConvNd

from pyro_bbb._prior import Function, Prior
from pyro_bbb._pyro import declared_names
from pyro_bbb.guides import Ensemble
from pyro_bbb.models import BayesianModel

MOST = 2**24  # numbers in all draws: of more there is no gain, and they fill the memory
OF_CONVOLUTIONS = 2**18  # weights: of more there is no gain either, and their outputs are large


def can_vectorise(
    model: BayesianModel, guide: Any, latents: dict[str, int], num_particles: int
) -> bool:
    """Whether several draws at once are possible, and not slower than one after the other.

    Args:
        model: the model.
        guide: its guide.
        latents: how many numbers each latent of the model holds, by name.
        num_particles: number of draws.
    """
    if not isinstance(guide, AutoGuide) or isinstance(guide, Ensemble):
        return False
    if type(model).forward is not BayesianModel.forward or not _draws_apart(model):
        return False
    weights = sum(latents.values())
    few = weights < OF_CONVOLUTIONS or not any(isinstance(x, _ConvNd) for x in model.modules())
    fits = num_particles * weights <= MOST
    return few and fits and latents.keys() <= declared_names(model)


def _draws_apart(root: nn.Module) -> bool:
    """Whether every declared latent's distribution is known to be one for each of several draws.

    A function of a user's may read other latents, and work on several draws as if on one.
    """
    for module in root.modules():
        if isinstance(module, Prior) and (isinstance(module, Function) or not _is_ours(module)):
            return False
        samples = module._pyro_samples.values() if isinstance(module, PyroModule) else ()
        if not all(isinstance(prior, Distribution) or _is_ours(prior) for prior in samples):
            return False
    return True


def _is_ours(prior: Any) -> bool:
    return type(prior).__module__.startswith("pyro_bbb.")
