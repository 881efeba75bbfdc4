# SPDX-License-Identifier: Apache-2.0
"""Checks of model, guide and data before the first training step."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from pyro import poutine
from pyro.optim import PyroOptim
from torch import Tensor, nn

from pyro_bbb._handlers.sites import drawn
from pyro_bbb._utils.context import evaluating
from pyro_bbb._utils.distributed import Processes
from pyro_bbb._utils.inputs import Rows
from pyro_bbb._utils.validation import require
from pyro_bbb.guides import Approximated
from pyro_bbb.models import BayesianModel
from pyro_bbb.training._batches import check_sampler, is_sharded
from pyro_bbb.training._config import FitConfig

_UNSCALED = 20.0  # factor between targets and 1


def check_group(group: Processes, guide: Any, data: Any, config: FitConfig) -> None:
    """Raise ValueError if several processes cannot train together with such arguments."""
    if group.size == 1:
        return
    lacking = {
        "a guide that is a module, with parameters of its own": not isinstance(guide, nn.Module),
        "a torch optimiser, got a PyroOptim": isinstance(config.optimizer, PyroOptim),
        "cuda_graph=False": config.cuda_graph,
    }
    require(f"training in {group.size} processes", lacking)
    check_sampler(data, group)
    if is_sharded(data) and isinstance(guide, Approximated):
        raise ValueError(
            "data must be the same in every process for a guide that is approximated at the end, "
            "got a loader that yields each process its own shard"
        )


def check_fit(model: BayesianModel, guide: Any, x: Rows, y: Tensor) -> dict[str, int]:
    """Run model and guide on two examples, which builds lazy guides; return the latents' sizes."""
    args = x[:2], y[:2], 0.5
    with torch.no_grad(), evaluating(model):
        guide_trace = poutine.trace(guide).get_trace(*args)
        try:
            replayed = poutine.replay(model, trace=guide_trace)
            model_trace = poutine.trace(replayed).get_trace(*args)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"guide must draw latents that fit the model: {error}") from error
    latents = drawn(model_trace)
    _check_guide(guide_trace, latents)
    return {name: p["value"].numel() for name, p in latents.items()}


def warn_if_unscaled(model: BayesianModel, y: Tensor) -> None:
    """Warn where real targets are far from the scale 1 of the outputs at the start."""
    y = y[y.isfinite()]  # others are missing
    if not model.likelihood.has_unit or len(y) < 2:
        return
    mean, std = float(y.double().mean()), float(y.double().std())
    if std and not (std > 1 / _UNSCALED and max(std, abs(mean)) < _UNSCALED):
        warnings.warn(
            f"targets have mean {mean:.3g} and standard deviation {std:.3g}; the priors and the "
            "learned noise expect about 0 and 1, and intervals will be wrong otherwise. Train on "
            "data.standardize(y), and undo it by prediction.rescaled(mean, scale).",
            stacklevel=4,
        )


def _check_guide(guide_trace: Any, latents: dict[str, Any]) -> None:
    """Raise ValueError unless the guide draws the model's latents alone, alike in shape and scale.

    Auxiliary sites are exempt; the density of any other would count against the model's.
    """
    missing = [name for name in latents if name not in guide_trace]
    if missing:
        raise ValueError(
            f"guide must have a posterior for every latent of the model, it lacks {missing}"
        )
    sites = drawn(guide_trace).items()
    own = [name for name, q in sites if not (q["infer"] or {}).get("is_auxiliary")]
    if others := [name for name in own if name not in latents]:
        raise ValueError(f"guide must draw latents of the model only, it draws {others} too")
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
