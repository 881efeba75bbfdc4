"""`fit`: Bayes by Backprop through Pyro's `SVI`, with the bookkeeping that training needs.

Each step is `SVI.step` on one minibatch with the KL weighted by the schedule; what is around it is
data in memory, one optimiser for all parameters, the record of the loss, and checks beforehand.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import pyro
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuide
from pyro.optim import PyroOptim
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_bbb._batches import Batches, Data
from pyro_bbb._pyro import declared_names, evaluating, own_store, seeded, weigh
from pyro_bbb.estimators import ESTIMATORS
from pyro_bbb.guides import Approximated, Ensemble, NoModeError, weighs_kl
from pyro_bbb.history import History
from pyro_bbb.models import BayesianModel
from pyro_bbb.objectives import (
    BatchWeight,
    KLSchedule,
    NonFiniteError,
    RecordedELBO,
    as_kl_schedule,
    recorded_elbo,
)
from pyro_bbb.optim import JointOptim
from pyro_bbb.pruning import keeping

Optimizer: TypeAlias = Callable[..., torch.optim.Optimizer] | PyroOptim


@dataclass(frozen=True)
class EpochEnd:
    """What a callback of `fit` sees after each epoch.

    Args:
        epoch: number of the epoch just finished, from 0.
        model: the model in training.
        guide: the guide in training.
        history: the record so far.
    """

    epoch: int
    model: BayesianModel
    guide: Any
    history: History


Callback: TypeAlias = Callable[[EpochEnd], bool | None]


def cosine(progress: float) -> float:
    """From 1 to 0 along half a cosine (Loshchilov and Hutter 2017, SGDR, without restarts)."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def constant(progress: float) -> float:
    """Always 1."""
    return 1.0


_LR_SCHEDULES = {"constant": constant, "cosine": cosine}


def fit(
    model: BayesianModel,
    guide: Any,
    data: Data,
    *,
    epochs: int,
    batch_size: int = 128,
    lr: float = 1e-3,
    optimizer: Optimizer | None = None,
    lr_schedule: str | Callable[[float], float] = "cosine",
    num_particles: int = 1,
    kl_schedule: str | BatchWeight | KLSchedule = "uniform",
    estimator: str = "reparam",
    loss: Any = None,
    callbacks: Iterable[Callback] = (),
    device: torch.device | str | None = None,
    progress: bool = True,
    seed: int | None = None,
) -> History:
    """Trains a guide (and the model's own parameters) by minimising the negative ELBO.

    Args:
        model: the model.
        guide: one of `pyro_bbb.guides`, any `pyro.infer.autoguide`, or a guide function. A
            `Laplace` one is approximated at the end.
        data: a pair ``(x, y)`` of tensors, a map-style dataset of pairs (both held in memory on
            the device), or a `DataLoader` of batches.
        epochs: passes over the data, at least 1.
        batch_size: examples per step; a `DataLoader` has its own.
        lr: learning rate at the start.
        optimizer: a torch optimiser class or function of ``(parameters, lr=...)``; by default fused
            Adam. Or a `PyroOptim`, which keeps its own learning rates.
        lr_schedule: ``"cosine"`` (to 0 at the end), ``"constant"``, or a function from the share
            of training done, in [0, 1), to the factor of ``lr``.
        num_particles: draws of the weights per step; of an `Ensemble`, from each member.
        kl_schedule: ``"uniform"``, ``"blundell"``, a function of the batch's number (from 1) and
            the number of batches, or a `KLSchedule`, which also knows warm-up and temperature.
        estimator: how gradients are estimated: ``"reparam"`` (one draw for all examples),
            ``"local_reparam"``, ``"flipout"`` or ``"stl"``; see `pyro_bbb.estimators`.
        loss: ``"trace"`` or ``"mean_field"`` (closed-form KL where one is registered), or Pyro's
            `Trace_ELBO` or `TraceMeanField_ELBO`.
        callbacks: functions called with an `EpochEnd` after each epoch; one that returns true ends
            the training.
        device: where to train; by default where the guide's parameters are.
        progress: whether to show a progress bar.
        seed: makes the run a function of this number, and leaves torch's random state as it was.

    Returns:
        The record of the loss and its parts.

    Raises:
        ValueError: data that do not fit model or likelihood, are empty or not finite, contradict
            ``num_data``, or an option out of range or of unknown name.
        TypeError: an argument of the wrong kind.
        NonFiniteError: the loss or a gradient is not finite; the parameters are those before.
        NoModeError: training ended where a `Laplace` guide cannot be approximated.
    """
    _check_options(model, epochs, lr, estimator)
    factor, schedule = _lr_factor(lr_schedule), as_kl_schedule(kl_schedule)
    recorded_elbo(loss, num_particles)  # its errors before the work on data
    history, callbacks = History(), tuple(callbacks)
    with seeded(seed), own_store(model, guide):
        batches = Batches(data, batch_size, model, _place(model, guide, device))
        if isinstance(guide, Approximated):
            guide.reset()
        weighed = _weighed(guide)
        latents = _check_fit(model, weighed, *batches.examples())
        vectorize = isinstance(guide, AutoGuide) and latents <= declared_names(model)
        vectorize &= estimator in ("reparam", "stl")  # the others' noise is per example anyway
        if isinstance(guide, Ensemble):
            elbo = recorded_elbo(loss, num_particles)
            elbo.num_particles *= guide.size  # every member's turn in every step
        else:
            elbo = recorded_elbo(loss, num_particles, vectorize=vectorize)
        svi = SVI(keeping(model, guide), weighed, _make_optim(model, guide, optimizer, lr), elbo)
        total = epochs * len(batches)
        bar = tqdm(total=total, unit="step", disable=not progress, dynamic_ncols=True)
        with pyro.validation_enabled(False), ESTIMATORS[estimator](), bar:
            for epoch in range(epochs):
                started, before = time.perf_counter(), len(history.steps)
                for args, share in _epoch(batches, schedule, model.num_data, epoch):
                    _step(svi, elbo, history, args, lr * factor(min(1.0, share / epochs)))
                    bar.update()
                history.close_epoch(len(history.steps) - before, time.perf_counter() - started)
                bar.set_description(f"epoch {epoch + 1}/{epochs}", refresh=False)
                shown = {"neg_elbo": f"{history.loss[-1]:.4g}", "nll": f"{history.nll[-1]:.4g}"}
                bar.set_postfix(shown, refresh=False)
                state = EpochEnd(epoch, model, guide, history)
                if any([callback(state) for callback in callbacks]):
                    break
        if isinstance(guide, Approximated):
            _approximate(guide, batches, history)
    return history


def _epoch(
    batches: Batches, schedule: KLSchedule, num_data: int, epoch: int
) -> Iterator[tuple[tuple[Tensor, Tensor, float], float]]:
    """The arguments ``(x, y, kl_weight)`` of each step, and the epochs done before it."""
    count = len(batches)
    for batch, (x, y) in enumerate(batches, start=1):
        where = {"batch": batch, "num_batches": count, "epoch": epoch}
        kl_weight = schedule.weight(**where, batch_size=len(x), num_data=num_data)
        yield (x, y, kl_weight), epoch + (batch - 1) / count


def _step(svi: SVI, elbo: RecordedELBO, history: History, args: tuple[Any, ...], lr: float) -> None:
    """One SVI step on ``(x, y, kl_weight)``, recorded."""
    if isinstance(svi.optim, JointOptim):
        svi.optim.set_lr(lr)
    try:
        svi.step(*args)
    except NonFiniteError as error:
        failed = NonFiniteError(error.what, error.names, len(history.steps) + 1)
        failed.history = history
        raise failed from None
    history.steps.append(elbo.take_parts(), lr)


def _approximate(guide: Approximated, batches: Batches, history: History) -> None:
    try:
        guide.approximate(batches)
    except NoModeError as error:
        error.history = history
        raise


def _check_options(model: Any, epochs: int, lr: float, estimator: str) -> None:
    if not isinstance(model, BayesianModel):
        raise TypeError(f"model must be a BayesianModel, got {type(model).__name__}")
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise ValueError(f"epochs must be an integer of at least 1, got {epochs!r}")
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not 0 < lr < math.inf:
        raise ValueError(f"lr must be a positive number, got {lr!r}")
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator must be one of {list(ESTIMATORS)}, got {estimator!r}")


def _lr_factor(schedule: str | Callable[[float], float]) -> Callable[[float], float]:
    if callable(schedule):
        return schedule
    if schedule not in _LR_SCHEDULES:
        names = sorted(_LR_SCHEDULES)
        raise ValueError(f"lr_schedule must be one of {names} or a function, got {schedule!r}")
    return _LR_SCHEDULES[schedule]


def _place(model: BayesianModel, guide: Any, device: torch.device | str | None) -> torch.device:
    """Moves model and guide to the device, and says which it is."""
    if device is not None:
        for part in (model, guide):
            if isinstance(part, nn.Module):
                part.to(device)
        return torch.device(device)
    parameters = guide.parameters() if isinstance(guide, nn.Module) else iter(())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


def _check_fit(model: BayesianModel, guide: Any, x: Tensor, y: Tensor) -> set[str]:
    """Runs model and guide on two examples before any training step, which builds lazy guides.

    Returns:
        Names of the model's latents.
    """
    args = x[:2], y[:2], 0.5
    with torch.no_grad(), evaluating(model):
        guide_trace = poutine.trace(guide).get_trace(*args)
        try:
            replayed = poutine.replay(model, trace=guide_trace)
            model_trace = poutine.trace(replayed).get_trace(*args)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"guide must draw latents that fit the model: {error}") from error
    sites = model_trace.iter_stochastic_nodes()
    latents = {name: p for name, p in sites if not site_is_subsample(p)}
    _check_guide(guide_trace, latents)
    return set(latents)


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


def _make_optim(
    model: BayesianModel, guide: Any, optimizer: Optimizer | None, lr: float
) -> PyroOptim:
    named: dict[nn.Parameter, str] = {}
    for part in (guide, model):
        if isinstance(part, nn.Module):
            for name, parameter in part.named_parameters():
                parameter.grad = None  # one left over from elsewhere is not of this objective
                if parameter.requires_grad:
                    named.setdefault(parameter, name)
    if isinstance(optimizer, PyroOptim):
        return optimizer
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer or torch.optim.Adam):
        raise TypeError(
            "optimizer must be a torch optimiser class, a function (parameters, lr=...) -> "
            f"optimiser, or a PyroOptim, got {type(optimizer).__name__}"
        )
    parameters = {name: parameter for parameter, name in named.items()}
    constructor = optimizer or partial(torch.optim.Adam, fused=True)
    return JointOptim(constructor, {"lr": lr}, parameters=parameters)


def _weighed(guide: Any) -> Any:
    """The guide with its log-density weighted like the prior's, where it does not do so itself."""
    if weighs_kl(guide):
        return guide

    def weighed(x: Tensor, y: Tensor, kl_weight: float) -> Any:
        with weigh(kl_weight):
            return guide(x, y, kl_weight)

    return weighed
