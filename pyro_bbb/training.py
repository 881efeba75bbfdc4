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
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuide
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_bbb._batches import Batches, Data
from pyro_bbb._captured import CapturedSteps, capturing_device
from pyro_bbb._fit_checks import check_fit, check_options
from pyro_bbb._pyro import (
    declared_names,
    held_by_optimiser,
    own_store,
    seeded,
    weigh,
)
from pyro_bbb._unread import UnreadOptim, unread
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
from pyro_bbb.optim import JointOptim, Optimizer, make_optim
from pyro_bbb.pruning import keeping


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


_VECTORISED_BELOW = 2**18  # weights: from there several draws at once fall out of the cache
_VECTORISED = ("reparam", "stl")  # estimators; the others' noise is per example anyway
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
    autocast: torch.dtype | None = None,
    cuda_graph: bool = False,
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
        autocast: ``torch.bfloat16`` runs the network's products and convolutions in it; draws,
            log-densities and parameters keep their precision.
        cuda_graph: on a GPU, captures the step in a CUDA graph and replays it for each minibatch
            (a smaller last one runs as usual), which saves the launches of its operations. It
            needs data in memory, Adam or AdamW, a guide that is a module but no `Ensemble`, and
            nowhere a number read or made on the host (as by `StudentT` and low-rank guides). The
            random numbers and the result are meant
            to be the same, but for a learning rate in single precision; a loss or gradient that is
            not finite is reported at the end of its epoch. (Tested step by step on the CPU; the
            capture itself was not run on a GPU.)
        progress: whether to show a progress bar.
        seed: makes the run a function of this number, and leaves torch's random state as it was.

    Returns:
        The record of the loss and its parts.

    Raises:
        ValueError: data that do not fit model or likelihood, are empty or not finite, contradict
            ``num_data``, an option out of range or of unknown name, or ``cuda_graph`` where a
            step cannot be captured.
        TypeError: an argument of the wrong kind.
        NonFiniteError: the loss or a gradient is not finite; the parameters are those before.
        NoModeError: training ended where a `Laplace` guide cannot be approximated.
        RuntimeError: the step could not be captured.
    """
    check_options(model, epochs, lr, estimator, autocast)
    factor, schedule = _lr_factor(lr_schedule), as_kl_schedule(kl_schedule)
    recorded_elbo(loss, num_particles)  # its errors before the work on data
    history, callbacks = History(), tuple(callbacks)
    place = _place(model, guide, device)
    graphs = capturing_device(guide, data, optimizer, place) if cuda_graph else None
    with seeded(seed), own_store(model, guide):
        batches = Batches(data, batch_size, model, place)
        if isinstance(guide, Approximated):
            guide.reset()
        weighed = _weighed(guide)
        latents = check_fit(model, weighed, *batches.examples())
        vectorize = estimator in _VECTORISED and _can_vectorise(model, guide, latents)
        elbo = recorded_elbo(loss, num_particles, vectorize=vectorize)
        if isinstance(guide, Ensemble):
            elbo.num_particles *= guide.size  # every member's turn in every step
        program = _autocast(keeping(model, guide), place, autocast)
        make = partial(make_optim, (guide, model), optimizer, lr)
        take: Callable[..., None]
        if graphs is None:
            svi = SVI(program, weighed, make(), elbo)
            take, read = partial(_step, svi, elbo, history), _nothing
        else:
            quiet = unread(elbo)
            svi = SVI(program, weighed, make(partial(UnreadOptim, elbo=quiet)), quiet)
            captured = CapturedSteps(svi, graphs, history, (model, guide))
            take, read = captured.take, captured.read
        total = epochs * len(batches)
        bar = tqdm(total=total, unit="step", disable=not progress, dynamic_ncols=True)
        held = held_by_optimiser(svi.optim.parameters if isinstance(svi.optim, JointOptim) else ())
        with pyro.validation_enabled(False), ESTIMATORS[estimator](), held, bar:
            for epoch in range(epochs):
                started, before = time.perf_counter(), len(history.steps)
                for args, share in _epoch(batches, schedule, model.num_data, epoch):
                    take(args, lr * factor(min(1.0, share / epochs)))
                    bar.update()
                read()
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


def _can_vectorise(model: BayesianModel, guide: Any, latents: dict[str, int]) -> bool:
    """Whether several draws at once are possible, and not slower than one after the other."""
    if not isinstance(guide, AutoGuide) or isinstance(guide, Ensemble):
        return False
    return latents.keys() <= declared_names(model) and sum(latents.values()) < _VECTORISED_BELOW


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


def _nothing() -> None:
    """What there is to read of steps that are read one by one."""


def _approximate(guide: Approximated, batches: Batches, history: History) -> None:
    try:
        guide.approximate(batches)
    except NoModeError as error:
        error.history = history
        raise


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


def _weighed(guide: Any) -> Any:
    """The guide with its log-density weighted like the prior's, where it does not do so itself."""
    if weighs_kl(guide):
        return guide

    def weighed(x: Tensor, y: Tensor, kl_weight: float) -> Any:
        with weigh(kl_weight):
            return guide(x, y, kl_weight)

    return weighed


def _autocast(model: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """The model with its network in lower precision; a guide's draws must fit their densities."""
    if dtype is None:
        return model

    def cast(*args: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype):
            return model(*args)

    return cast
