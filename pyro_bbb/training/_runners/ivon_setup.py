# SPDX-License-Identifier: Apache-2.0
"""Set-up of a run with IVON: what it can train, and the priors that enter in closed form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from pyro import distributions as dist
from pyro import poutine
from torch import Tensor, nn

from pyro_bbb._handlers.pruned_sites import unpruned_entries
from pyro_bbb._utils.context import evaluating
from pyro_bbb.distributions import SummedNormal, softplus
from pyro_bbb.distributions.summed_event import innermost
from pyro_bbb.guides import AutoSoftplusNormal
from pyro_bbb.models import BayesianModel
from pyro_bbb.training._batches import Batches
from pyro_bbb.training._config import FitConfig
from pyro_bbb.training._runners.ivon import FlatPosterior, NaturalGradient, NormalPriors
from pyro_bbb.training._runners.ivon_objective import NaturalGradientELBO
from pyro_bbb.training._runners.ivon_options import IVON
from pyro_bbb.training._schedules import default_lr
from pyro_bbb.training.objectives import recorded_elbo

# Bounds of the Hessian at the start: below, first steps are too large for networks; above, the
# means of a short run move too slowly.
LEAST_HESSIAN, MOST_HESSIAN = 1.0, 10.0


def natural_gradients(
    model: BayesianModel, guide: Any, batches: Batches, config: FitConfig, options: IVON
) -> tuple[NaturalGradientELBO, partial[NaturalGradient]]:
    """The objective and the optimiser of a run.

    Raises:
        ValueError: guide, schedule or options with which IVON cannot train.
    """
    _check(guide, config, len(batches))
    locs, rhos = _parameters(guide)
    found = _normals(model, guide, *batches.examples)
    unpruned = unpruned_entries(guide)
    left = _joined(locs, unpruned.masks, torch.ones_like) if unpruned else None
    priors = _priors(locs, found, left)
    num_data = model.num_data / config.last_kl_weight(model.num_data)
    hessian = _initial_hessian(rhos, priors.precision, num_data, options.hess_init)
    posterior = FlatPosterior(locs, rhos, priors, left, hessian)
    open_priors = frozenset(locs.keys() - found.keys())
    elbo = NaturalGradientELBO(
        posterior, guide.latents, open_priors, config.num_particles, unpruned
    )
    num_steps = config.epochs * len(batches)
    optimizer = partial(
        NaturalGradient,
        posterior=posterior,
        options=options,
        num_steps=num_steps,
        max_lr=default_lr(num_steps),
    )
    return elbo, optimizer


def _check(guide: Any, config: FitConfig, num_batches: int) -> None:
    if not isinstance(guide, AutoSoftplusNormal):
        raise ValueError(
            "optimizer 'ivon' trains a guide of independent Normals, AutoSoftplusNormal(model), "
            f"got {type(guide).__name__}: take that guide, or another optimizer"
        )
    if config.estimator != "reparam":
        raise ValueError(
            "optimizer 'ivon' needs estimator='reparam': its Hessian comes from the noise of the "
            f"weights, got estimator {config.estimator!r}"
        )
    if recorded_elbo(config.loss, config.num_particles).closed_form:
        raise ValueError(
            "optimizer 'ivon' has an objective of its own, recorded as by loss='trace', got "
            f"loss {config.loss!r}"
        )
    plain = replace(config.schedule, warmup_epochs=0, cooling_epochs=0, initial_temperature=None)
    sizes = {"num_batches": num_batches, "batch_size": 1, "num_data": num_batches}
    weights = [plain.weight(batch=i, **sizes) for i in range(1, num_batches + 1)]
    if not min(weights) > (1 - 1e-6) * max(weights):
        raise ValueError(
            "optimizer 'ivon' needs a kl_schedule that weighs all minibatches of an epoch alike, "
            "as 'uniform' does, also with warm-up and temperature: got weights from "
            f"{min(weights):.3g} to {max(weights):.3g}"
        )


def _parameters(guide: AutoSoftplusNormal) -> tuple[dict[str, nn.Parameter], ...]:
    """The guide's ``loc`` and ``rho`` by site name."""
    found = [dict(guide.get_submodule(kind).named_parameters()) for kind in ("locs", "rhos")]
    frozen = [
        name
        for name, loc in found[0].items()
        if not (loc.requires_grad and found[1][name].requires_grad)
    ]
    if frozen:
        raise ValueError(
            f"optimizer 'ivon' trains all latents of the guide, got frozen ones: {frozen}; another "
            "optimizer leaves them as they are"
        )
    kinds = {(str(x.dtype), str(x.device)) for x in found[0].values()}
    if len(kinds) > 1:
        raise ValueError(
            f"optimizer 'ivon' needs latents of one precision on one device, got {sorted(kinds)}"
        )
    return tuple(found)


def _normals(
    model: BayesianModel, guide: AutoSoftplusNormal, x: Any, y: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Location and scale of the latents whose prior is a Normal of fixed numbers.

    A prior that depends on another latent or on a parameter needs a gradient, as the latents do.
    """
    draws = {n: v.detach().requires_grad_() for n, v in guide.median().items()}
    conditioned = poutine.condition(model, data=draws)
    with evaluating(model), torch.enable_grad():
        trace = poutine.trace(conditioned).get_trace(x[:2], y[:2], 0.5)
    found = {}
    for name, latent in guide.latents.items():
        normal = innermost(trace.nodes[name]["fn"])
        if latent.transform is None and type(normal) in (dist.Normal, SummedNormal):
            parameters = normal.loc, normal.scale
            if not any(p.requires_grad for p in parameters):
                found[name] = tuple(p.expand(latent.shape) for p in parameters)
    return found


def _priors(
    locs: Mapping[str, Tensor],
    normals: Mapping[str, tuple[Tensor, Tensor]],
    unpruned: Tensor | None,
) -> NormalPriors:
    """The priors of the whole vector; one number for all where there is one."""
    loc = _joined(locs, {n: loc for n, (loc, _) in normals.items()}, torch.zeros_like)
    precisions = {n: scale.square().reciprocal() for n, (_, scale) in normals.items()}
    precision = _joined(locs, precisions, torch.zeros_like)
    if unpruned is not None:
        precision = precision * unpruned
    if (precision == precision[0]).all():
        precision = precision[0].clone()
    return NormalPriors(loc if loc.any() else None, precision)


def _initial_hessian(
    rhos: Mapping[str, Tensor], precision: Tensor, num_data: float, hess_init: float | None
) -> Tensor:
    """The Hessian at which the posterior has the guide's scales, within bounds, or a given one."""
    scale = softplus(torch.cat([rho.detach().reshape(-1) for rho in rhos.values()]))
    if hess_init is not None:
        return torch.full_like(scale, hess_init)
    # that of a pruned entry, of infinite precision, counts for nothing
    found = (scale.square().reciprocal() - precision) / num_data
    return found.clamp(LEAST_HESSIAN, MOST_HESSIAN)


def _joined(locs: Mapping[str, Tensor], parts: Mapping[str, Tensor], default: Any) -> Tensor:
    """The parts, or a default where there is none, as one vector."""
    first = next(iter(locs.values()))
    every = [parts[n] if n in parts else default(x, requires_grad=False) for n, x in locs.items()]
    kind = (
        torch.bool if all(x.dtype == torch.bool for x in parts.values()) and parts else first.dtype
    )
    return torch.cat([x.detach().reshape(-1).to(kind) for x in every])
