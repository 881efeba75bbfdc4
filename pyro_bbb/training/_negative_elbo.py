# SPDX-License-Identifier: Apache-2.0
"""The objective of `fit` as a module, for training loops of one's own."""

from __future__ import annotations

from typing import Any

import pyro
import torch
from torch import Tensor, nn

from pyro_bbb._param_store import own_store
from pyro_bbb._utils.context import explained_batchnorm
from pyro_bbb._utils.inputs import as_inputs, weighted
from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.validation import at_least_zero, count, kind, one_of
from pyro_bbb.elbo import LossParts, MinibatchELBO
from pyro_bbb.estimators import ESTIMATORS
from pyro_bbb.guides import ClosedForm
from pyro_bbb.guides.scale_kl import with_kl_weight
from pyro_bbb.models import BayesianModel, require_guide
from pyro_bbb.training._setup import Frozen, check_fit, objective


def negative_elbo(
    model: BayesianModel,
    guide: nn.Module,
    *,
    num_particles: int = 1,
    estimator: str = "reparam",
    loss: Any = None,
    temperature: float = 1.0,
    reduction: str = "sum",
) -> NegativeELBO:
    """Return the objective of `fit` as a module, for any loop (`docs/guide/own_loop.md`).

    Its parameters are the guide's and the model's; called with a minibatch it returns the loss.

    Args:
        model: the model.
        guide: a guide that has its parameters: one of `pyro_bbb.guides`, or any autoguide after a
            first call.
        num_particles: as for `fit`, like ``estimator`` and ``loss``.
        estimator: how gradients are estimated.
        loss: ``"trace"`` or ``"mean_field"``.
        temperature: factor of the KL; 1 is Bayes' rule.
        reduction: ``"sum"``, nats of the minibatch, which `fit` minimises, or ``"mean"``, nats per
            example.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: a number out of range, an unknown name, or a guide without parameters.
    """
    kind("model", model, BayesianModel)
    require_guide(guide)
    if not isinstance(guide, nn.Module):
        raise TypeError(f"guide must be a torch.nn.Module, got {type(guide).__name__}")
    if not any(True for _ in guide.parameters()):
        raise ValueError(
            "guide must have parameters, which an optimiser takes: a stock autoguide makes them at "
            "its first call, guide(x[:2], y[:2])"
        )
    count("num_particles", num_particles)
    one_of("estimator", estimator, ESTIMATORS)
    one_of("reduction", reduction, ("sum", "mean"))
    options = {"loss": loss, "num_particles": num_particles, "estimator": estimator}
    objective(model, guide, {}, **options)  # errors come at once
    return NegativeELBO(model, guide, options, at_least_zero("temperature", temperature), reduction)


class NegativeELBO(nn.Module):
    """Negative ELBO of minibatches, see `negative_elbo`."""

    parts: LossParts | None
    """The latest loss in nats of the minibatch: the KL and the negative log-likelihood, too."""

    def __init__(
        self,
        model: BayesianModel,
        guide: nn.Module,
        options: dict[str, Any],
        temperature: float,
        reduction: str,
    ) -> None:
        super().__init__()
        self.model: BayesianModel = model
        self.guide: nn.Module = guide
        self.options: dict[str, Any] = options
        self.temperature: float = temperature
        self.reduction: str = reduction
        self.parts = None
        self._programs: tuple[Any, Any, MinibatchELBO] | None = None

    @locked
    def forward(
        self,
        x: Any,
        y: Tensor,
        kl_weight: float | None = None,
        *,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of a minibatch, a scalar in nats.

        Args:
            x: inputs ``[batch, ...]``, as for `fit`; a tuple or dict of several.
            y: targets ``[batch, ...]``.
            kl_weight: weight of the KL; by default the examples of the minibatch
                over ``num_data``, times the temperature, for any sampler.
            sample_weight: weights ``[batch]`` of the examples in the likelihood, as for `fit`.

        Raises:
            ValueError: the data do not fit the model.
            NonFiniteError: the loss is not finite.
        """
        x, frozen = weighted(as_inputs(x), sample_weight), Frozen(self.model, self.guide)
        if kl_weight is None:
            kl_weight = self.temperature * len(y) / self.model.num_data
        elif not isinstance(kl_weight, Tensor):
            kl_weight = at_least_zero("kl_weight", kl_weight)
        estimating = ESTIMATORS[self.options["estimator"]]()
        with own_store(self.model, self.guide), frozen.preserved(), estimating:
            with pyro.validation_enabled(False), explained_batchnorm():
                if self._programs is None:
                    self._programs = self._prepare(x, y)
                model, guide, elbo = self._programs
                elbo.particles.clear()  # those of a call that raised
                total: Tensor = elbo.differentiable_loss(model, guide, x, y, kl_weight)
        self.parts = elbo.take_parts()
        return total / len(y) if self.reduction == "mean" else total

    def _prepare(self, x: Any, y: Tensor) -> tuple[Any, Any, MinibatchELBO]:
        """Return model, guide and objective, once data were seen."""
        model: Any = self.model
        model.check(x, y)
        weighted = with_kl_weight(self.guide)
        with torch.random.fork_rng():
            latents = check_fit(model, weighted, x, y)
        elbo = objective(model, self.guide, latents, **self.options)
        if elbo.closed_form and isinstance(self.guide, ClosedForm):
            model, weighted = self.guide.in_closed_form(model)
        return model, weighted, elbo
