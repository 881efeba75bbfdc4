"""What `fit` checks before the first step: options, and that guide, model and data fit."""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_bbb._pyro import evaluating
from pyro_bbb.estimators import ESTIMATORS
from pyro_bbb.models import BayesianModel


def check_options(
    model: Any, epochs: int, lr: float, estimator: str, autocast: torch.dtype | None
) -> None:
    """Raises TypeError or ValueError at the first of them that is no good."""
    if not isinstance(model, BayesianModel):
        raise TypeError(f"model must be a BayesianModel, got {type(model).__name__}")
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise ValueError(f"epochs must be an integer of at least 1, got {epochs!r}")
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not 0 < lr < math.inf:
        raise ValueError(f"lr must be a positive number, got {lr!r}")
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator must be one of {list(ESTIMATORS)}, got {estimator!r}")
    if autocast is torch.float16:
        raise ValueError("autocast must be torch.bfloat16: torch.float16 needs its losses scaled")
    if autocast not in (None, torch.bfloat16):
        raise ValueError(f"autocast must be None or torch.bfloat16, got {autocast!r}")


def check_fit(model: BayesianModel, guide: Any, x: Tensor, y: Tensor) -> dict[str, int]:
    """Runs model and guide on two examples before any training step, which builds lazy guides.

    Returns:
        The model's latents by name, and how many numbers each holds.
    """
    args = x[:2], y[:2], 0.5
    with torch.no_grad(), evaluating(model):
        guide_trace = poutine.trace(guide).get_trace(*args)
        try:
            replayed = poutine.replay(model, trace=guide_trace)
            model_trace = poutine.trace(replayed).get_trace(*args)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"guide must draw latents that fit the model: {error}") from error
    sites: Any = model_trace.iter_stochastic_nodes()
    latents = {name: p for name, p in sites if not site_is_subsample(p)}
    _check_guide(guide_trace, latents)
    return {name: p["value"].numel() for name, p in latents.items()}


def _check_guide(guide_trace: Any, latents: dict[str, Any]) -> None:
    """Whether the guide has a draw for each of the model's latents, of its shape and weight."""
    missing = [name for name in latents if name not in guide_trace]
    if missing:
        raise ValueError(
            f"guide must have a posterior for every latent of the model, it lacks {missing}"
        )
    for name, p in latents.items():
        q, shape = guide_trace.nodes[name], p["fn"].shape()
        if q["value"].shape != shape:
            raise ValueError(
                f"guide must draw {name!r} of the model's shape {list(shape)}, it draws "
                f"{list(q['value'].shape)}"
            )
        if not torch.allclose(torch.as_tensor(q["scale"]), torch.as_tensor(p["scale"])):
            raise ValueError(
                f"guide must weigh its log-density by kl_weight as the model does, not so {name!r} "
                "by its factor; use poutine.scale(scale=kl_weight), or take no such argument"
            )
