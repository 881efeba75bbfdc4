# SPDX-License-Identifier: Apache-2.0
"""Set-up of a training run: checks of its arguments, device, precision, objective."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.modules.conv import _ConvNd

from pyro_bbb._utils.context import evaluating
from pyro_bbb._utils.inputs import Rows, parts_of
from pyro_bbb._utils.pages import read_on
from pyro_bbb._utils.validation import as_device, require
from pyro_bbb.elbo import MinibatchELBO, minibatch_elbo
from pyro_bbb.guides import ClosedForm, Guide
from pyro_bbb.guides.scale_kl import with_kl_weight
from pyro_bbb.latents import declared_names, drawn
from pyro_bbb.models import BayesianModel
from pyro_bbb.priors import Function, Prior
from pyro_bbb.pruning import keeping
from pyro_bbb.training._baseline import UNSCALED
from pyro_bbb.training._batches import Batches
from pyro_bbb.training._ivon import natural_gradients
from pyro_bbb.training._lr_schedule import MAX_LR_OF_LOCS
from pyro_bbb.training._step import StepProgram
from pyro_bbb.training.history import History

if TYPE_CHECKING:
    from pyro_bbb.training._fit import Options

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
        for module in (model, guide):
            if isinstance(module, nn.Module):
                module.to(device)
        return device
    parameters = guide.parameters() if isinstance(guide, nn.Module) else iter(())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


def make_program(
    options: Options,
    batches: Batches,
    history: History,
    scope: Callable[[], AbstractContextManager[None]],
) -> StepProgram:
    """Assemble the computation of a training step, after a check of guide against model."""
    model, guide = options.model, options.guide
    weighted = with_kl_weight(guide)
    latents = check_fit(model, weighted, *batches.examples)
    warn_if_unscaled(model, *batches.spread())
    batches.processes.align(tensors_of(model, guide))
    elbo: Any
    names = "loss", "num_particles", "estimator"
    elbo = objective(model, guide, latents, **{name: getattr(options, name) for name in names})
    optimizer = options.optimizer
    if options.ivon is not None:
        elbo, optimizer = natural_gradients(options, options.ivon, batches)
    network = keeping(model, guide)
    if elbo.closed_form and isinstance(guide, ClosedForm):
        network, weighted = guide.in_closed_form(network)
    return StepProgram(
        network,
        weighted,
        elbo,
        (guide, model),
        optimizer,
        options.initial_lr(len(batches)),
        MAX_LR_OF_LOCS if options.lr is None else None,
        history,
        options.nonfinite,
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
    """Return the objective, with several draws at once where that is faster.

    With an improper prior the default is the KL in closed form: the gradient of a sampled one has
    infinite variance.

    Raises:
        ValueError: a prior is improper, and the guide has no closed-form KL from it.
    """
    if model.has_improper_prior:
        if not (isinstance(guide, Guide) and all(x.is_factorised for x in guide.members)):
            raise ValueError(
                "guide must have the KL from an improper prior in closed form, as "
                "AutoSoftplusNormal(model) and ensembles of it have, got "
                f"{type(guide).__name__}; or take a proper prior, such as 'scale_mixture'"
            )
        loss = "mean_field" if loss is None else loss
    elbo = minibatch_elbo(loss, num_particles)
    if model.has_improper_prior and (estimator == "stl" or not elbo.closed_form):
        raise ValueError(
            "an improper prior needs loss='mean_field' and no estimator 'stl', which samples the "
            f"KL, got loss={loss!r} and estimator={estimator!r}"
        )
    if isinstance(guide, ClosedForm) and (loss is None or elbo.closed_form):
        draws_nothing = estimator == "reparam" and elbo.num_particles == 1
        require("a closed form without draws", {"estimator 'reparam' of one": not draws_nothing})
        return minibatch_elbo("mean_field", 1)
    size = len(guide.members) if isinstance(guide, Guide) else 1  # each step trains every member
    draws, name = elbo.num_particles * size, "mean_field" if elbo.closed_form else "trace"
    vectorize = estimator in _VECTORISED and can_vectorise(model, guide, latents, draws)
    return minibatch_elbo(name, draws, vectorize=vectorize)


def tensors_of(*modules: Any) -> Iterator[Tensor]:
    """Return the parameters and buffers of those arguments that are modules."""
    trained = (m for m in modules if isinstance(m, nn.Module))
    return chain(*(chain(m.parameters(), m.buffers()) for m in trained))


def can_vectorise(
    model: BayesianModel, guide: Any, latents: dict[str, int], num_particles: int
) -> bool:
    """Return whether several draws at once are possible, and not slower than one after another."""
    if not isinstance(guide, AutoGuide) or not getattr(guide, "stackable", True):
        return False
    if type(model).forward is not BayesianModel.forward or not _draws_apart(model):
        return False
    weights = sum(latents.values())
    few = weights < OF_CONVOLUTIONS or not any(isinstance(x, _ConvNd) for x in model.modules())
    fits = num_particles * weights <= MOST
    return few and fits and latents.keys() <= declared_names(model)


def _draws_apart(root: nn.Module) -> bool:
    """Return whether each declared latent surely has one distribution for every draw."""

    def is_ours(prior: Any) -> bool:
        return type(prior).__module__.startswith("pyro_bbb.")

    for module in root.modules():
        if isinstance(module, Prior) and (isinstance(module, Function) or not is_ours(module)):
            return False
        samples = module._pyro_samples.values() if isinstance(module, PyroModule) else ()
        if not all(isinstance(prior, Distribution) or is_ours(prior) for prior in samples):
            return False
    return True


class Frozen:
    """The parameters without gradient, of which Pyro requires one that a `PyroModule` announces."""

    def __init__(self, *modules: Any) -> None:
        self._modules = [m for m in modules if isinstance(m, nn.Module)]
        self.parameters: set[Tensor] = set()  # frozen at the latest `find`
        self.find()

    def find(self) -> None:
        """Find the parameters that are frozen now."""
        every = chain(*(m.parameters() for m in self._modules))
        self.parameters.clear()
        self.parameters.update(p for p in every if not p.requires_grad)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Inside, Pyro may unfreeze them; they leave frozen and without gradient."""
        try:
            yield
        finally:
            for parameter in self.parameters:
                parameter.requires_grad_(False)
                parameter.grad = None


def check_fit(model: BayesianModel, guide: Any, x: Rows, y: Tensor) -> dict[str, int]:
    """Run model and guide on two examples, which builds lazy guides; return the latents' sizes.

    The guide must draw the model's latents alone, alike in shape and scale. Auxiliary sites are
    exempt; the density of any other would count against the model's.
    """
    args = x[:2], y[:2], 0.5
    with torch.no_grad(), evaluating(model):
        guide_trace = poutine.trace(guide).get_trace(*args)
        try:
            replayed = poutine.replay(model, trace=guide_trace)
            latents = drawn(poutine.trace(replayed).get_trace(*args))
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"guide must draw latents that fit the model: {error}") from error
    if missing := [name for name in latents if name not in guide_trace]:
        raise ValueError(
            f"guide must have a posterior for every latent of the model, it lacks {missing}"
        )
    sites = drawn(guide_trace).items()
    own = [name for name, q in sites if not (q["infer"] or {}).get("is_auxiliary")]
    if further := [name for name in own if name not in latents]:
        raise ValueError(f"guide must draw latents of the model only, it draws {further} too")
    for name, p in latents.items():
        q, shape = guide_trace.nodes[name], p["fn"].shape()
        if q["value"].shape != shape:
            raise ValueError(
                f"guide must draw {name!r} of the model's shape {list(shape)}, it draws "
                f"{list(q['value'].shape)}"
            )
        if not torch.allclose(torch.as_tensor(q["scale"]), torch.as_tensor(p["scale"])):
            raise ValueError(
                f"site {name!r} is scaled differently in guide and model: the guide must weigh its "
                "log-density by kl_weight with poutine.scale(scale=kl_weight), or take no such "
                "argument"
            )
    return {name: p["value"].numel() for name, p in latents.items()}


def warn_if_unscaled(model: BayesianModel, x: Rows, y: Tensor) -> None:
    """Warn where inputs are far above the scale 1 of the weights, or real targets far from it."""
    for name, values in parts_of(x).items():
        if name == "sample_weight" or not values.is_floating_point() or not values.numel():
            continue
        std, mean = torch.std_mean(values.reshape(len(values), -1).double(), 0, correction=0)
        size, j = torch.maximum(std, mean.abs()).max(0)
        if size > UNSCALED:
            warnings.warn(
                f"{name} has mean {mean[j]:.3g} and standard deviation {std[j]:.3g} in column {j}; "
                "the priors expect about 0 and 1. Train on data.standardize(x), images on x / 255. "
                + read_on("questions/it_does_not_work"),
                stacklevel=4,
            )
    y = y[y.isfinite()]  # others are missing
    if not model.likelihood.has_unit or len(y) < 2:
        return
    std, mean = torch.std_mean(y.double())
    if std and not (std > 1 / UNSCALED and max(std, abs(mean)) < UNSCALED):
        warnings.warn(
            f"targets have mean {mean:.3g} and standard deviation {std:.3g}; the priors and the "
            "learned noise expect about 0 and 1, and intervals will be wrong otherwise. Train on "
            "data.standardize(y), and undo it by prediction.rescaled(mean, scale). "
            + read_on("questions/intervals"),
            stacklevel=4,
        )
