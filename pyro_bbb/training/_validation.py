"""What `fit` checks before the first step: options, and that guide, model and data fit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from pyro import poutine
from pyro.optim import PyroOptim
from torch import Tensor, nn

from pyro_bbb._handlers.sites import drawn
from pyro_bbb._utils.context import evaluating
from pyro_bbb._utils.distributed import Processes
from pyro_bbb._utils.validation import as_float, count, function
from pyro_bbb.estimators import ESTIMATORS
from pyro_bbb.guides import Approximated
from pyro_bbb.models import BayesianModel
from pyro_bbb.training._batches import check_sampler, gives_each_its_own

C = TypeVar("C")


NONFINITE = ("raise", "skip")


def check_options(
    model: Any,
    epochs: int,
    lr: float,
    estimator: str,
    autocast: torch.dtype | None,
    nonfinite: str,
    accumulate: int,
    cuda_graph: bool,
) -> None:
    """Raises TypeError or ValueError at the first of them that is no good."""
    if not isinstance(model, BayesianModel):
        raise TypeError(f"model must be a BayesianModel, got {type(model).__name__}")
    count("epochs", epochs)
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not 0 < as_float(lr) < math.inf:
        raise ValueError(f"lr must be a positive number, got {lr!r}")
    if not isinstance(estimator, str) or estimator not in ESTIMATORS:
        raise ValueError(f"estimator must be one of {list(ESTIMATORS)}, got {estimator!r}")
    if autocast is torch.float16:
        raise ValueError("autocast must be torch.bfloat16: torch.float16 needs its losses scaled")
    if autocast not in (None, torch.bfloat16):
        raise ValueError(f"autocast must be None or torch.bfloat16, got {autocast!r}")
    if nonfinite not in NONFINITE:
        raise ValueError(f"nonfinite must be one of {list(NONFINITE)}, got {nonfinite!r}")
    count("accumulate", accumulate)
    if cuda_graph and accumulate > 1:
        raise ValueError("accumulate must be 1 where cuda_graph=True captures the step")
    if cuda_graph and nonfinite == "skip":
        raise ValueError("nonfinite='skip' reads every step's loss, which cuda_graph=True does not")


def check_joined(
    processes: Processes, guide: Any, data: Any, optimizer: Any, cuda_graph: bool
) -> None:
    """Raises ValueError if several processes cannot train together with such arguments."""
    if processes.size == 1:
        return
    reasons = {
        "a guide that is a module, with parameters of its own": not isinstance(guide, nn.Module),
        "a torch optimiser, got a PyroOptim": isinstance(optimizer, PyroOptim),
        "cuda_graph=False": cuda_graph,
    }
    for needed, lacking in reasons.items():
        if lacking:
            raise ValueError(f"training in {processes.size} processes needs {needed}")
    check_sampler(data, processes)
    if gives_each_its_own(data) and isinstance(guide, Approximated):
        raise ValueError(
            "data must be whole in every process for a guide that is approximated at the end, got "
            "a loader that gives each process its own share"
        )


def check_callbacks(callbacks: Iterable[C]) -> tuple[C, ...]:
    """The callbacks, if each can be called."""
    if not isinstance(callbacks, Iterable):
        raise TypeError(f"callbacks must be several functions, got {callbacks!r}")
    found = tuple(callbacks)
    for callback in found:
        function("each of callbacks", callback, "(EpochEnd) -> bool or None")
    return found


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
    latents = drawn(model_trace)
    _check_guide(guide_trace, latents)
    return {name: p["value"].numel() for name, p in latents.items()}


def _check_guide(guide_trace: Any, latents: dict[str, Any]) -> None:
    """Whether the guide has a draw for each of the model's latents, of its shape and weight.

    And none else, but for auxiliary ones: its density would count against the model's.
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
                f"guide must weigh its log-density by kl_weight as the model does, not so {name!r} "
                "by its factor; use poutine.scale(scale=kl_weight), or take no such argument"
            )
