# SPDX-License-Identifier: Apache-2.0
"""`fit`: Bayes by Backprop through Pyro's `SVI`.

Each step is `SVI.step` on one minibatch, the KL weighted by the schedule; `fit` adds data loading,
one optimiser for all parameters, the record of the loss, checkpoints and checks beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import Any, TypeAlias

import pyro
import torch

from pyro_bbb._handlers.param_store import callers_store, own_store
from pyro_bbb._utils.context import seeded
from pyro_bbb._utils.distributed import processes
from pyro_bbb._utils.interrupts import AgreedInterrupts, Interrupts
from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.validation import kind
from pyro_bbb.estimators import ESTIMATORS
from pyro_bbb.guides import Approximated, NoModeError, TooFewIteratesError
from pyro_bbb.models import BayesianModel, require_guide
from pyro_bbb.training._baseline import baseline_per_example, warn_if_undertrained
from pyro_bbb.training._batches import Batches, Data
from pyro_bbb.training._checkpoint import (
    Checkpoint,
    Progress,
    TrainingState,
    check_alike,
    checkpoint_folder,
    fingerprint,
)
from pyro_bbb.training._config import FitConfig
from pyro_bbb.training._early_stopping import EarlyStopping, check_validation
from pyro_bbb.training._loop import Loop
from pyro_bbb.training._runners.choose import capture_device, make_runner
from pyro_bbb.training._runners.protocol import StepProgram
from pyro_bbb.training._schedules import BatchWeight, KLSchedule
from pyro_bbb.training._setup import Frozen, make_program, plans, tensors_of, to_device
from pyro_bbb.training._validation import check_group
from pyro_bbb.training.history import History
from pyro_bbb.training.optim import JointOptim, Optimizer


@dataclass(frozen=True)
class EpochEnd:
    """State of a training run after an epoch, for callbacks of `fit`.

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


@locked
def fit(
    model: BayesianModel,
    guide: Any,
    data: Data,
    *,
    epochs: int,
    batch_size: int = 128,
    lr: float | None = None,
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
    engine: str = "auto",
    progress: bool = True,
    seed: int | None = None,
    sample_weight: Any = None,
    validation: Data | None = None,
    patience: int | None = None,
) -> History:
    r"""Train a guide (and the model's own parameters) by minimising the negative ELBO.

    Processes that `torchrun` started together train together: each computes a shard of every
    minibatch with draws of the weights of its own. See `docs/scaling.md`.

    Args:
        model: the model.
        guide: one of `pyro_bbb.guides`, any `pyro.infer.autoguide`, or a guide function. A
            `Laplace` one is approximated at the end, a `SWAG` one collects iterates before it.
        data: a pair ``(x, y)`` of tensors, a map-style dataset of pairs (both in memory on
            the device), or a `DataLoader` of batches, by any sampler: a minibatch weighs the KL by
            its examples over ``num_data``, also where a sampler repeats rows or leaves some out
            (`docs/questions/kl_weight.md`). Several processes pass it all and split every batch,
            except for a loader with a `DistributedSampler` or of a stream, which must yield the
            shard of its process.
        epochs: passes over the data, at least 1.
        batch_size: examples per minibatch, in all processes together; a `DataLoader` has its own.
            With batch normalisation in training, a last minibatch of one row joins the one before.
        lr: learning rate at the start. By default 32 / steps, but at least 0.001 and at most 0.03,
            of the guide's means at most 0.01, which suits Adam (`docs/guide/trained.md`); with
            another ``optimizer`` 0.001.
        optimizer: a torch optimiser class or function of ``(parameters, lr=...)``; by default fused
            Adam. Or a `PyroOptim`, which keeps its own learning rates. ``"ivon"``, or `optim.IVON`
            with options, trains an `AutoSoftplusNormal` by natural gradients, by default at 0.1.
        lr_schedule: ``"cosine"`` (to 0 at the end), ``"warmup_cosine"`` (from 0 in the first 5 %,
            and then the cosine), ``"constant"``, or a function from the fraction of training done,
            in [0, 1), to the factor of ``lr``. It stays from the ``start`` of a `SWAG` guide on.
        num_particles: draws of the weights per step; of an `Ensemble`, from each member.
        kl_schedule: ``"uniform"``, ``"blundell"``, a function of the batch's number (from 1) and
            the number of batches, or a `KLSchedule`, which also knows warm-up and temperature.
        estimator: how gradients are estimated: ``"reparam"`` (one draw for all examples),
            ``"local_reparam"``, ``"flipout"`` or ``"stl"``; see `pyro_bbb.estimators`.
        loss: ``"trace"`` or ``"mean_field"`` (closed-form KL where one is registered), or Pyro's
            `Trace_ELBO` or `TraceMeanField_ELBO`. By default ``"trace"``; for a guide with a closed
            form (`LastLayer`) ``"mean_field"``, which then draws nothing.
        callbacks: functions called with an `EpochEnd` after each epoch, in every process; one that
            returns true ends the training.
        checkpoint: a folder, from which a run that was interrupted goes on when `fit` is called
            with the same arguments, on a model and guide made in the same way; on a CPU to the bit,
            however it ended. In a new folder a run begins, from that of a finished one its result
            comes at once. Another model is an error that names the differences, but code is not
            compared: functions count by their names; random numbers other than torch's are not
            saved. A `DataLoader` must shuffle by torch's, and read no stream. The
            callbacks of an epoch come again where the run ended before the checkpoint after it.
        checkpoint_every: steps from one checkpoint to the next; by default one after each epoch.
        nonfinite: what to do where the loss or a gradient is not finite: ``"raise"``, or ``"skip"``
            the step, which `History.skipped` then has (100 in a row at most; not with
            ``cuda_graph``). Gradients are not looked at where ``optimizer`` is a `PyroOptim`.
        device: where to train; by default where the guide's parameters are.
        autocast: ``torch.bfloat16`` runs the network's products and convolutions in it; draws,
            log-densities and parameters stay in theirs.
        accumulate: minibatches of one step, one after the other, each with draws of its own: a
            minibatch this many times as large, in the memory of one.
        cuda_graph: on a GPU, captures the step in a CUDA graph and replays it for each minibatch,
            and for the smaller last one, which saves the launches of its operations. It needs data
            in memory, Adam or AdamW, a guide that is a module, and nowhere a number read or made on
            the host (as by `StudentT` and low-rank guides). The random numbers and the result are
            the same, but for a learning rate in single precision; a loss or gradient that is not
            finite is reported at the end of its epoch.
            What a callback changes in Python (a rate of dropout, what is frozen, a parameter's
            ``data``) has no effect on the steps that are replayed.
        engine: how steps are run: ``"eager"``; ``"compiled"``, captured once (on a CPU as a list of
            operations, on a GPU as by ``cuda_graph``) and repeated, or eagerly where they cannot be
            (`docs/performance.md`); ``"auto"``, compiled on a CPU for a million parameters
            or fewer in 100 steps or more without callbacks. The result is the same, to rounding.
        progress: whether to show a progress bar; of several processes the first does.
        seed: makes the run a function of this number, and leaves torch's random state as it was.
        sample_weight: weights ``[n]`` of the examples in the likelihood, finite and at least 0:
            $\log p(D|w) = \sum_j s_j \log p(y_j|x_j, w)$. They are taken as they are: an example
            of weight 2 counts as two, one of weight 0 not at all; ``num_data`` and minibatches
            count rows. Of a `DataLoader` ``True``: its batches are then ``(x, y, weight)``.
        validation: further data, as ``data``, of any number of rows. After each epoch
            `History.validation_loss` gets their negative log predictive density by ten draws of the
            weights, which takes ten passes over them; random numbers of the training stay as they
            are.
        patience: epochs without a lower validation loss after which training ends. Model and guide
            then get back their parameters after the best epoch, `History.best_epoch`, also where
            all epochs were run or Ctrl-C ended them; a copy of them stays in memory. The learning
            rate is that of all ``epochs``. Not with `SWAG`.

    Returns:
        The record of the loss and its parts. Ctrl-C ends the training after the step under way:
        the record so far is returned, with ``interrupted`` set, and model and guide keep what they
        have learned (a second Ctrl-C raises KeyboardInterrupt at once).

    Warns:
        UndertrainedWarning: training ended where a posterior that ignores the data has a better
            ELBO or a better likelihood (`docs/guide/trained.md`).

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
        TooFewIteratesError: a callback ended training before a `SWAG` guide had two iterates.
        RuntimeError: the step could not be captured.
    """
    kind("model", model, BayesianModel)
    require_guide(guide)
    config = FitConfig(
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        optimizer=optimizer,
        lr_schedule=lr_schedule,
        num_particles=num_particles,
        kl_schedule=kl_schedule,
        estimator=estimator,
        loss=loss,
        callbacks=callbacks,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        nonfinite=nonfinite,
        device=device,
        autocast=autocast,
        accumulate=accumulate,
        cuda_graph=cuda_graph,
        engine=engine,
        progress=progress,
        seed=seed,
        patience=patience,
    )
    folder, callbacks = checkpoint_folder(config, guide, data), config.checked_callbacks()
    device = to_device(model, guide, device)
    capture = capture_device(config, guide, data, device)
    group = processes(device)
    check_group(group, guide, data, config)
    check_validation(validation, patience, guide, group.size > 1)
    interrupts = AgreedInterrupts() if group.size > 1 else Interrupts()
    history, done = History(num_data=model.num_data), Progress()
    with seeded(seed), own_store(model, guide), group.own_stream() as begin_stream:
        batches = Batches(data, batch_size, model, device, accumulate, group, guide, sample_weight)
        begin_stream()
        if isinstance(guide, Approximated):
            guide.reset()
        collecting = plans(guide, epochs, len(batches))
        frozen = Frozen(model, guide)
        scope = partial(_step_scope, estimator, frozen)
        with frozen.preserved():
            program = make_program(guide, batches, config, history, scope)
        num_steps = epochs * len(batches)
        runner = make_runner(program, config, capture, group, interrupts, num_steps)
        if isinstance(runner.optim, JointOptim):
            runner.optim.frozen = frozen.parameters
        state = TrainingState(model, guide, runner.optim, batches, history, done, device)
        stopping = None if validation is None else EarlyStopping(state, validation, patience)
        saving = _checkpoint(config, folder, state, program, runner.flush, stopping)
        if saving:
            saving.begin()
            if done.finished:
                return replace(history.with_baseline(done.baseline), best_epoch=done.best_epoch)
        if done.baseline is None:
            with frozen.preserved():
                kl_weight = config.last_kl_weight(model.num_data)
                done.baseline = baseline_per_example(batches, num_steps, kl_weight)
        with interrupts:
            loop = Loop(
                config, state, runner, saving, collecting, partial(_validate, stopping, frozen)
            )
            try:
                loop.run(interrupts, partial(_call_back, callbacks, state, frozen))
                runner.flush()
            finally:
                if isinstance(runner.optim, JointOptim):
                    runner.optim.close()
        if done.trained and not done.finished:
            if stopping:
                stopping.restore()
            _approximate(guide, batches, history)
            group.align(tensors_of(model, guide))
            done.finished = True
        if saving:
            saving.write()
        if stopping and not done.finished:
            stopping.restore()  # Ctrl-C came; the checkpoint goes on from the latest epoch
    history = replace(history.with_baseline(done.baseline), best_epoch=done.best_epoch)
    if interrupts.stop:
        return replace(history, interrupted=True)
    warn_if_undertrained(history)
    return history


def _checkpoint(
    config: FitConfig,
    folder: Any,
    state: TrainingState,
    program: StepProgram,
    flush: Callable[[], None],
    stopping: EarlyStopping | None,
) -> Checkpoint | None:
    """The checkpoint of the run, if it is to have one; all processes must have the same run."""
    group = state.batches.processes
    if folder is None and group.size == 1:
        return None
    run = fingerprint(config, state, program.elbo) | (stopping.definition if stopping else {})
    check_alike(run, group)
    return Checkpoint(folder, config.checkpoint_every, state, run, flush) if folder else None


@contextmanager
def _step_scope(estimator: str, frozen: Frozen) -> Iterator[None]:
    """The context of each single step; callbacks run outside of it."""
    with pyro.validation_enabled(False), ESTIMATORS[estimator](), frozen.preserved():
        yield


def _validate(stopping: EarlyStopping | None, frozen: Frozen) -> bool:
    """Score the epoch, if there are data for it; true if training ends."""
    if stopping is None:
        return False
    with frozen.preserved():
        return stopping.after_epoch()


def _call_back(
    callbacks: Iterable[Callback], state: TrainingState, frozen: Frozen, epoch: int
) -> bool:
    """Call all callbacks after an epoch; true if one wants to end the training."""
    if not callbacks:
        return False
    end = EpochEnd(epoch, state.batches.model, state.guide, state.history)
    with callers_store():
        wanted = any([callback(end) for callback in callbacks])
    frozen.find()  # a callback may have frozen or unfrozen some
    return wanted


def _approximate(guide: Any, batches: Batches, history: History) -> None:
    """Finish a guide that training alone does not."""
    if isinstance(guide, Approximated):
        try:
            guide.approximate(batches)
        except (NoModeError, TooFewIteratesError) as error:
            error.history = history
            raise
