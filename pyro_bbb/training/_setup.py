# SPDX-License-Identifier: Apache-2.0
"""Set-up of a training run: device, precision, vectorised draws, frozen parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.modules.conv import _ConvNd

from pyro_bbb._handlers.pruned_sites import mask_pruned
from pyro_bbb._handlers.sites import declared_names
from pyro_bbb._utils.validation import as_device, require
from pyro_bbb.elbo import MinibatchELBO, minibatch_elbo
from pyro_bbb.guides import ClosedForm, Collected, Ensemble, collected
from pyro_bbb.guides.kl_weight import with_kl_weight
from pyro_bbb.models import BayesianModel
from pyro_bbb.priors import Function, Prior
from pyro_bbb.training._batches import Batches
from pyro_bbb.training._config import FitConfig
from pyro_bbb.training._ivon import natural_gradients
from pyro_bbb.training._runners.protocol import StepProgram
from pyro_bbb.training._schedules import MAX_LR_OF_LOCS
from pyro_bbb.training._validation import check_fit, warn_if_unscaled
from pyro_bbb.training.history import History

# Draws of a step at once take memory with their number, and gain nothing for large networks.
MOST = 2**24  # numbers in all draws
OF_CONVOLUTIONS = 2**18  # weights of a network with convolutions
_VECTORISED = ("reparam", "stl")  # estimators; the noise of the others is per example anyway


def to_device(model: BayesianModel, guide: Any, device: torch.device | str | None) -> torch.device:
    """Move model and guide to the device, by default where the guide is, and return it."""
    if device is not None:
        device = as_device(device)
        if device.type == "meta":
            raise ValueError("device must hold values, got 'meta'")
        for part in (model, guide):
            if isinstance(part, nn.Module):
                part.to(device)
        return device
    parameters = guide.parameters() if isinstance(guide, nn.Module) else iter(())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


def plans(guide: Any, epochs: int, epoch_steps: int) -> list[tuple[Collected, range]]:
    """Guides that collect iterates, and the steps after which they do."""
    return [(each, each.plan(epochs * epoch_steps, epoch_steps)) for each in collected(guide)]


def make_program(
    guide: Any,
    batches: Batches,
    config: FitConfig,
    history: History,
    scope: Callable[[], AbstractContextManager[None]],
) -> StepProgram:
    """Assemble the computation of a training step, after a check of guide against model."""
    model, weighted = batches.model, with_kl_weight(guide)
    latents = check_fit(model, weighted, *batches.examples)
    warn_if_unscaled(model, batches.spread()[1])
    batches.processes.align(tensors_of(model, guide))
    elbo: Any
    options = {"loss": config.loss, "num_particles": config.num_particles}
    elbo = objective(model, guide, latents, estimator=config.estimator, **options)
    optimizer = config.optimizer
    if config.ivon is not None:
        elbo, optimizer = natural_gradients(model, guide, batches, config, config.ivon)
    network = autocast_network(mask_pruned(model, elbo.unpruned), batches.device, config.autocast)
    if elbo.closed_form and isinstance(guide, ClosedForm):
        network, weighted = guide.in_closed_form(network)
    return StepProgram(
        network,
        weighted,
        elbo,
        (guide, model),
        optimizer,
        config.initial_lr(len(batches)),
        MAX_LR_OF_LOCS if config.lr is None else None,
        history,
        scope,
    )


def objective(
    model: BayesianModel,
    guide: Any,
    latents: dict[str, int],
    *,
    loss: Any,
    num_particles: int,
    estimator: str,
) -> MinibatchELBO:
    """The objective, with several draws at once where that is faster.

    Args:
        model: the model.
        guide: the guide.
        latents: sizes of the model's latents by name.
        loss: as for `fit`; likewise the others.
        num_particles: of each member.
        estimator: by name.
    """
    wanted = minibatch_elbo(loss, num_particles)
    if isinstance(guide, ClosedForm) and (loss is None or wanted.closed_form):
        draws_nothing = estimator == "reparam" and wanted.num_particles == 1
        require("a closed form without draws", {"estimator 'reparam' of one": not draws_nothing})
        return minibatch_elbo("mean_field", 1)
    size = guide.size if isinstance(guide, Ensemble) else 1  # each step trains every member
    draws, name = wanted.num_particles * size, "mean_field" if wanted.closed_form else "trace"
    vectorize = estimator in _VECTORISED and can_vectorise(model, guide, latents, draws)
    elbo = minibatch_elbo(name, draws, vectorize=vectorize)
    elbo.unpruned = getattr(guide, "unpruned", None)
    return elbo


def tensors_of(*modules: Any) -> Iterator[Tensor]:
    """Parameters and buffers of whatever is a module."""
    parts = (part for part in modules if isinstance(part, nn.Module))
    return chain(*(chain(part.parameters(), part.buffers()) for part in parts))


def autocast_network(model: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """The model with its network in lower precision; draws and densities stay in theirs."""
    if dtype is None:
        return model

    def cast(*args: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype):
            return model(*args)

    return cast


def can_vectorise(
    model: BayesianModel, guide: Any, latents: dict[str, int], num_particles: int
) -> bool:
    """Return whether several draws at once are possible, and not slower than one after the other.

    ``latents`` has the sizes of the model's latents by name.
    """
    if not isinstance(guide, AutoGuide) or (isinstance(guide, Ensemble) and not guide.stackable):
        return False
    if type(model).forward is not BayesianModel.forward or not _draws_apart(model):
        return False
    weights = sum(latents.values())
    few = weights < OF_CONVOLUTIONS or not any(isinstance(x, _ConvNd) for x in model.modules())
    fits = num_particles * weights <= MOST
    return few and fits and latents.keys() <= declared_names(model)


def _draws_apart(root: nn.Module) -> bool:
    """Return whether each declared latent has one distribution for every draw, as far as known.

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


class Frozen:
    """The parameters of a model and a guide that need no gradient.

    Pyro asks for a gradient of whatever parameter a module of its own announces.
    """

    def __init__(self, *modules: Any) -> None:
        self._modules = [part for part in modules if isinstance(part, nn.Module)]
        self.parameters: set[Tensor] = set()  # those frozen at the latest `find`
        self.find()

    def find(self) -> None:
        """Find the parameters that are frozen now."""
        self.parameters.clear()
        self.parameters.update(
            p for part in self._modules for p in part.parameters() if not p.requires_grad
        )

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Inside, Pyro may unfreeze them; they leave frozen and without gradient."""
        try:
            yield
        finally:
            for parameter in self.parameters:
                parameter.requires_grad_(False)
                parameter.grad = None
