"""`fit`: Bayes by Backprop through Pyro's `SVI`, with the bookkeeping that training needs.

Each step is `SVI.step` on one minibatch with the KL weighted by the schedule; what is around it is
data in memory, one optimiser for all parameters, the record of the loss, and checks beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from os import PathLike
from typing import Any, TypeAlias

import pyro
import torch
from torch import nn
from tqdm.auto import tqdm

from pyro_bbb._handlers.param_store import callers_store, held_by_optimiser, own_store
from pyro_bbb._handlers.pruned_sites import mask_pruned, unpruned_entries
from pyro_bbb._utils.context import seeded
from pyro_bbb._utils.distributed import processes
from pyro_bbb._utils.locking import locked
from pyro_bbb.estimators import ESTIMATORS
from pyro_bbb.guides import Approximated, Ensemble, NoModeError
from pyro_bbb.guides.kl_weight import with_kl_weight
from pyro_bbb.models import BayesianModel
from pyro_bbb.training._batches import Batches, Data
from pyro_bbb.training._checkpoint import Checkpoint, Parts, folder_of
from pyro_bbb.training._fingerprint import check_alike, fingerprint
from pyro_bbb.training._interrupts import AgreedInterrupts, Interrupts
from pyro_bbb.training._loop import Loop, Progress
from pyro_bbb.training._lr_schedule import lr_factor
from pyro_bbb.training._runners.cuda_graph import capturing_device
from pyro_bbb.training._runners.engine import engine
from pyro_bbb.training._schedules import BatchWeight, KLSchedule, as_kl_schedule
from pyro_bbb.training._setup import Frozen, can_vectorise, placed
from pyro_bbb.training._setup import autocast as cast_down
from pyro_bbb.training._validation import check_callbacks, check_fit, check_joined, check_options
from pyro_bbb.training.history import History
from pyro_bbb.training.objectives import RecordedELBO, recorded_elbo
from pyro_bbb.training.optim import JointOptim, Optimizer, make_optim


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


_VECTORISED = ("reparam", "stl")  # estimators; the others' noise is per example anyway


@locked
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
    checkpoint: str | PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    nonfinite: str = "raise",
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
    accumulate: int = 1,
    cuda_graph: bool = False,
    progress: bool = True,
    seed: int | None = None,
) -> History:
    """Trains a guide (and the model's own parameters) by minimising the negative ELBO.

    Processes that `torchrun` started together train together: each takes its share of every
    minibatch and draws of the weights of its own. See `docs/scaling.md`.

    Args:
        model: the model.
        guide: one of `pyro_bbb.guides`, any `pyro.infer.autoguide`, or a guide function. A
            `Laplace` one is approximated at the end.
        data: a pair ``(x, y)`` of tensors, a map-style dataset of pairs (both held in memory on
            the device), or a `DataLoader` of batches. Several processes give it all; each takes
            its share of every batch, but all of a loader that has a `DistributedSampler` or a
            stream, which must be its share already.
        epochs: passes over the data, at least 1.
        batch_size: examples per minibatch, in all processes together; a `DataLoader` has its own.
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
        callbacks: functions called with an `EpochEnd` after each epoch, in every process; one that
            returns true ends the training.
        checkpoint: a folder, from which a run that was interrupted goes on when `fit` is called
            with the same arguments, on a model and guide made in the same way; on a CPU to the bit,
            however it ended. In a new folder a run begins, from that of a finished one its result
            comes at once. Functions are told apart by their names only; random numbers other than
            torch's are not kept. A `DataLoader` must shuffle by torch's, and read no stream. The
            callbacks of an epoch come again where the run ended before the checkpoint after it.
        checkpoint_every: steps from one checkpoint to the next; by default one after each epoch.
        nonfinite: what to do where the loss or a gradient is not finite: ``"raise"``, or ``"skip"``
            the step, which `History.skipped` then has (100 in a row at most; not with
            ``cuda_graph``). Gradients are not looked at where ``optimizer`` is a `PyroOptim`.
        device: where to train; by default where the guide's parameters are.
        autocast: ``torch.bfloat16`` runs the network's products and convolutions in it; draws,
            log-densities and parameters keep their precision.
        accumulate: minibatches of one step, one after the other, each with draws of its own: a
            minibatch this many times as large, in the memory of one.
        cuda_graph: on a GPU, captures the step in a CUDA graph and replays it for each minibatch
            (a smaller last one runs as usual), which saves the launches of its operations. It
            needs data in memory, Adam or AdamW, a guide that is a module but no `Ensemble`, and
            nowhere a number read or made on the host (as by `StudentT` and low-rank guides). The
            random numbers and the result are the same, but for a learning rate in single
            precision; a loss or gradient that is not finite is reported at the end of its epoch.
            What a callback changes in Python (a rate of dropout, what is frozen, a parameter's
            ``data``) has no effect on the steps that are replayed.
        progress: whether to show a progress bar; of several processes the first does.
        seed: makes the run a function of this number, and leaves torch's random state as it was.

    Returns:
        The record of the loss and its parts. Ctrl-C ends the training after the step under way:
        the record so far is returned, with ``interrupted`` set, and model and guide keep what they
        have learned (a second Ctrl-C raises KeyboardInterrupt at once).

    Raises:
        CheckpointError: a checkpoint cannot be written or read. The one before is whole; model and
            guide keep what they have learned, the error has ``history``, and ``retry()`` writes it.
        LoadError: the checkpoint is damaged, or something else.
        ValueError: the checkpoint is of another run; data that do not fit model or likelihood, are
            empty or not finite, contradict ``num_data``; an option out of range or of unknown
            name, or ``cuda_graph``, ``checkpoint`` or several processes with what they cannot work
            on; processes that were given different arguments or data.
        TypeError: an argument of the wrong kind.
        NonFiniteError: the loss or a gradient is not finite; parameters are those before.
        NoModeError: training ended where a `Laplace` guide cannot be approximated.
        RuntimeError: the step could not be captured.
    """
    check_options(model, epochs, lr, estimator, autocast, nonfinite, accumulate, cuda_graph)
    factor, schedule = lr_factor(lr_schedule), as_kl_schedule(kl_schedule)
    draws = recorded_elbo(loss, num_particles).num_particles  # its errors before the work on data
    folder = folder_of(checkpoint, checkpoint_every, guide, data, optimizer)
    history, done, callbacks = History(), Progress(), check_callbacks(callbacks)
    place = placed(model, guide, device)
    graphs = capturing_device(guide, data, optimizer, place) if cuda_graph else None
    team = processes(place)
    check_joined(team, guide, data, optimizer, cuda_graph)
    interrupts = AgreedInterrupts() if team.size > 1 else Interrupts()
    with seeded(seed), own_store(model, guide), team.own_stream() as begin:
        batches = Batches(data, batch_size, model, place, accumulate, team)
        begin()
        if isinstance(guide, Approximated):
            guide.reset()
        weighing, frozen = with_kl_weight(guide), Frozen(model, guide)
        with frozen.preserved():
            latents = check_fit(model, weighing, *batches.examples())
        team.align(_state(model, guide))
        elbo = _objective(model, guide, latents, estimator, loss, draws)
        elbo.unpruned = unpruned_entries(guide)
        program = cast_down(mask_pruned(model, elbo.unpruned), place, autocast)
        make = partial(make_optim, (guide, model), optimizer, lr)
        parts = (model, guide)
        steps = engine(
            program, weighing, elbo, make, history, parts, nonfinite, graphs, team, interrupts
        )
        optim, read = steps.svi.optim, steps.read

        saving: Checkpoint | None = None
        if folder is not None or team.size > 1:
            options = {
                "epochs": epochs,
                "lr": lr,
                "lr_schedule": lr_schedule,
                "num_particles": elbo.num_particles,
                "kl_schedule": schedule,
                "estimator": estimator,
                "loss": type(elbo).__name__,
                "autocast": autocast,
                "accumulate": accumulate,
                "cuda_graph": cuda_graph,
                "nonfinite": nonfinite,
                "seed": seed,
                "num_data": model.num_data,
                "device": place.type,
            }
            run = fingerprint(options, model, guide, batches, optim)
            check_alike(run, team)
            whole = Parts(model, guide, optim, batches, history, done, place)
            saving = Checkpoint(folder, checkpoint_every, whole, run, read) if folder else None
        if saving:
            saving.begin()
            if done.finished:
                return history

        at, total = done.epoch * len(batches) + done.batch, epochs * len(batches)
        silent = not (progress and team.first)
        bar = tqdm(total=total, initial=at, unit="step", disable=silent, dynamic_ncols=True)
        rate, offer = (lambda share: lr * factor(share)), saving.offer if saving else _nothing
        held: frozenset[torch.Tensor] = frozenset()
        if isinstance(optim, JointOptim):
            held, optim.frozen = frozenset(optim.parameters), frozen.parameters

        def inside(*args: Any) -> None:  # each step by itself: callbacks run outside of all this
            with pyro.validation_enabled(False), ESTIMATORS[estimator](), held_by_optimiser(held):
                with frozen.preserved():
                    steps.take(*args)

        loop = Loop(batches, schedule, rate, epochs, history, done, inside, read, offer, bar)
        with bar, interrupts:
            loop.run(interrupts, partial(_call_back, callbacks, model, guide, history, frozen))
        read()
        if done.trained and not done.finished:
            _approximate(guide, batches, history)
            team.align(_state(model, guide))
            done.finished = True
        if saving:
            saving.write()
    return replace(history, interrupted=True) if interrupts.asked else history


def _objective(
    model: BayesianModel,
    guide: Any,
    latents: dict[str, int],
    estimator: str,
    loss: Any,
    num_particles: int,
) -> RecordedELBO:
    """The objective, with several draws at once where that is faster."""
    vectorize = estimator in _VECTORISED and can_vectorise(model, guide, latents, num_particles)
    elbo = recorded_elbo(loss, num_particles, vectorize=vectorize)
    if isinstance(guide, Ensemble):
        elbo.num_particles *= guide.size  # every member's turn in every step
    return elbo


def _call_back(
    callbacks: Iterable[Callback],
    model: BayesianModel,
    guide: Any,
    history: History,
    frozen: Frozen,
    epoch: int,
) -> bool:
    """Calls all callbacks after an epoch; true if one wants to end the training."""
    state = EpochEnd(epoch, model, guide, history)
    with callers_store():
        wanted = any([callback(state) for callback in callbacks])
    frozen.find()  # a callback may have frozen or unfrozen some
    return wanted


def _state(*modules: Any) -> Iterator[torch.Tensor]:
    """Parameters and buffers."""
    parts = (part for part in modules if isinstance(part, nn.Module))
    return chain(*(chain(part.parameters(), part.buffers()) for part in parts))


def _nothing(*_: Any) -> None:
    """What there is to write without checkpoints."""


def _approximate(guide: Any, batches: Batches, history: History) -> None:
    """Finishes a guide that training alone does not."""
    if isinstance(guide, Approximated):
        try:
            guide.approximate(batches)
        except NoModeError as error:
            error.history = history
            raise
