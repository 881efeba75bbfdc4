# SPDX-License-Identifier: Apache-2.0
r"""`fit`: Bayes by Backprop through Pyro's `SVI`.

Each step is `SVI.step` on one minibatch, the KL weighted by the schedule:
$F_i = \pi_i\,\mathrm{KL} - \log p(D_i|w)$ (Blundell et al. 2015, eq. 8). `fit` adds the loading of
data, one optimiser for all parameters, the record of the loss, checkpoints and checks beforehand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pyro
import torch
from pyro.optim import PyroOptim
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from pyro_bbb._param_store import callers_store, own_store
from pyro_bbb._utils.context import explained_batchnorm, network_precision, seeded
from pyro_bbb._utils.distributed import Processes, processes
from pyro_bbb._utils.interrupts import Interrupts
from pyro_bbb._utils.locking import cached_property, locked
from pyro_bbb._utils.progress import progress_bar
from pyro_bbb._utils.threads import ONE_THREAD, use_threads
from pyro_bbb._utils.validation import count, function, kind, one_of, positive, require
from pyro_bbb.elbo import minibatch_elbo
from pyro_bbb.estimators import ESTIMATORS
from pyro_bbb.guides import (
    Approximated,
    Guide,
    NoModeError,
    TooFewIteratesError,
    collected,
)
from pyro_bbb.models import BayesianModel, require_guide
from pyro_bbb.training._baseline import baseline_per_example, warn_if_undertrained
from pyro_bbb.training._batches import Batches, Data, Shard, check_sampler, is_sharded
from pyro_bbb.training._captured import (
    CapturedRunner,
    CudaDevice,
    TracingDevice,
    UnsupportedOptimizerError,
    capture_device,
    is_faster_captured,
)
from pyro_bbb.training._checkpoint import (
    Checkpoint,
    Progress,
    TrainingState,
    check_alike,
    fingerprint,
)
from pyro_bbb.training._distributed import DistributedRunner
from pyro_bbb.training._early_stopping import EarlyStopping
from pyro_bbb.training._ivon import IVON, IVON_LR, NaturalGradientELBO
from pyro_bbb.training._kl_schedule import BatchWeight, KLSchedule, as_kl_schedule
from pyro_bbb.training._lr_schedule import default_lr, lr_factor
from pyro_bbb.training._setup import Frozen, make_program, tensors_of, to_device
from pyro_bbb.training._step import (
    EagerRunner,
    Parts,
    StepProgram,
    StepRunner,
)
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
    minibatch with its own draws of the weights. See `docs/scaling.md`.

    Args:
        model: the model.
        guide: one of `pyro_bbb.guides`, any `pyro.infer.autoguide`, or a guide function.
        data: a pair ``(x, y)`` of tensors, a map-style dataset of pairs (both in memory on
            the device), or a `DataLoader` of batches. A minibatch weighs the KL by its examples
            over ``num_data`` (`docs/questions/kl_weight.md`).
        epochs: passes over the data, at least 1.
        batch_size: examples per minibatch, in all processes together; a `DataLoader` has its own.
            With batch normalisation in training, a last minibatch of one row joins the one before.
        lr: learning rate at the start. By default 32 / steps, clipped to [0.001, 0.03], and to 0.01
            for the guide's means, which suits Adam (`docs/guide/trained.md`); with another
            ``optimizer`` 0.001, with IVON 0.1.
        optimizer: a torch optimiser class or function of ``(parameters, lr=...)``; by default fused
            Adam. Or a `PyroOptim`, which keeps its own learning rates. ``"ivon"``, or `optim.IVON`
            with options, trains an `AutoSoftplusNormal` by natural gradients.
        lr_schedule: ``"cosine"`` (to 0 at the end), ``"warmup_cosine"`` (from 0 in the first 5 %,
            and then the cosine), ``"constant"``, or a function from the fraction of training done,
            in [0, 1), to the factor of ``lr``. It is constant from the ``start`` of a `SWAG` guide.
        num_particles: draws of the weights per step; of an `Ensemble`, from each member.
        kl_schedule: ``"uniform"``, ``"blundell"``, a function of the batch's number (from 1) and
            the number of batches, or a `KLSchedule` with warm-up and temperature.
        estimator: how gradients are estimated: ``"reparam"`` (one draw for all examples),
            ``"local_reparam"``, ``"flipout"`` or ``"stl"``; see `pyro_bbb.estimators`.
        loss: ``"trace"`` or ``"mean_field"`` (closed-form KL where one is registered), or Pyro's
            `Trace_ELBO` or `TraceMeanField_ELBO`. By default ``"trace"``; ``"mean_field"`` for a
            guide with a closed form (`LastLayer`), which then draws nothing, and for improper
            priors such as ``"log_uniform"``, which have no other.
        callbacks: functions called with an `EpochEnd` after each epoch, in every process; one that
            returns true ends the training.
        checkpoint: a folder. A call with the same arguments, on a model and guide made in the same
            way, resumes the run in it (on a CPU to the bit) or returns the result of a finished
            one; another run is an error that names the differences. Functions are compared by name,
            and random numbers other than torch's are not saved.
        checkpoint_every: steps from one checkpoint to the next; by default one after each epoch.
        nonfinite: what to do where the loss or a gradient is not finite: ``"raise"``, or ``"skip"``
            the step, which `History.skipped` then has (100 in a row at most). Gradients are not
            checked with a `PyroOptim`.
        device: where to train; by default where the guide's parameters are.
        autocast: ``torch.bfloat16`` runs the network's products and convolutions in it; draws,
            log-densities and parameters stay in theirs.
        accumulate: minibatches per step, each with its own draws.
        cuda_graph: on a GPU, captures the step in a CUDA graph and replays it for each minibatch;
            `docs/performance.md` has what it needs. A loss or gradient that is not finite is
            reported at the end of its epoch. Changes in Python by a callback (a dropout rate, what
            is frozen) do not reach replayed steps.
        engine: how steps are run: ``"eager"``; ``"compiled"``, recorded once and replayed, which
            falls back to eager (`docs/performance.md`); ``"auto"``, compiled on a CPU for a million
            parameters or fewer in 100 steps or more without callbacks. The result is the same, to
            rounding.
        progress: whether to show a progress bar, in the first process.
        seed: makes the run a function of this number, and leaves torch's random state as it was.
        sample_weight: weights ``[n]`` of the examples in the likelihood, finite and at least 0:
            $\log p(D|w) = \sum_j s_j \log p(y_j|x_j, w)$; ``num_data`` and minibatches count rows.
            For a `DataLoader` ``True``: its batches are then ``(x, y, weight)``.
        validation: further data, as ``data``. After each epoch `History.validation_loss` gets their
            negative log predictive density by ten draws of the weights.
        patience: epochs without a lower validation loss after which training ends. Model and guide
            then have the parameters of the best epoch, `History.best_epoch`, also after Ctrl-C or a
            callback's stop. Not with `SWAG`.

    Returns:
        The record of the loss and its parts. Ctrl-C ends the training after the step under way,
        with ``interrupted`` set; a second Ctrl-C raises KeyboardInterrupt at once.

    Warns:
        UndertrainedWarning: training ended where a posterior that ignores the data has a better
            ELBO or a better likelihood (`docs/guide/trained.md`).
        UserWarning: inputs or targets are far from unit scale.

    Raises:
        CheckpointError: a checkpoint cannot be written or read. The one before is whole; model and
            guide keep what they have learned, the error has ``history``, and ``retry()`` writes it.
        LoadError: the checkpoint is damaged, or something else.
        ValueError: the checkpoint is of another run; data that do not fit model or likelihood, are
            empty or not finite, contradict ``num_data``; an option out of range or of unknown
            name, or options that exclude each other; processes with different arguments or data.
        TypeError: an argument of the wrong kind.
        NonFiniteError: the loss or a gradient is not finite; parameters are those before.
        NoModeError: training ended where a `Laplace` guide cannot be approximated.
        TooFewIteratesError: a callback ended training before a `SWAG` guide had two iterates.
        RuntimeError: the step could not be captured.
    """
    options = Options(**locals())
    options.check()
    device = to_device(model, guide, device)
    group = processes(device)
    options.check_together(group)
    capture = capture_device(options, device)
    interrupts = Interrupts(agreed=group.size > 1)
    history, done = History(num_data=model.num_data), Progress()
    with ExitStack() as at_end:
        at_end.enter_context(seeded(seed))
        at_end.enter_context(own_store(model, guide))
        begin_stream = at_end.enter_context(group.own_stream())
        batches = Batches(data, batch_size, model, device, accumulate, group, guide, sample_weight)
        begin_stream()
        if isinstance(guide, Approximated):
            guide.reset()
        frozen = Frozen(model, guide)
        with frozen.preserved():
            program = make_program(options, batches, history, partial(_in_step, options, frozen))
        at_end.enter_context(use_threads(None, 1 if _is_small(model, batch_size) else None))
        num_steps = epochs * len(batches)
        if not is_faster_captured(options, program, num_steps):
            capture = None
        runner = _runner(options, program, capture, group, interrupts)
        optim = runner.optim if isinstance(runner.optim, JointOptim) else None
        if optim:
            at_end.callback(optim.close)  # gives the parameters their own memory back
            optim.frozen = frozen.parameters
        state = TrainingState(model, guide, runner.optim, batches, history, done, device)
        stopping = None if validation is None else EarlyStopping(state, validation, patience)
        checkpoints = None
        if checkpoint is not None or group.size > 1:
            run = fingerprint(options, state, program.elbo)
            run |= stopping.definition if stopping else {}
            check_alike(run, group)
            if checkpoint is not None:
                folder = Path(checkpoint)
                checkpoints = Checkpoint(folder, checkpoint_every, state, run, runner.flush)
        if checkpoints:
            checkpoints.begin()
            if done.finished:
                return history.completed(done)
        points = isinstance(guide, Guide) and all(member.is_point for member in guide.members)
        if done.baseline is None and not points:  # which have no ELBO
            with frozen.preserved():
                kl_weight = options.last_kl_weight(model.num_data, len(batches))
                done.baseline = baseline_per_example(batches, num_steps, kl_weight)
        loop = Loop(options, state, runner, frozen, checkpoints, stopping, interrupts)
        with interrupts:
            with loop.bar, explained_batchnorm():
                for minibatch, step_lr in loop.steps():
                    runner.step(minibatch, step_lr)
            runner.flush()
            if optim:
                optim.close()
            if done.trained and not done.finished:
                if stopping:
                    stopping.restore()
                if isinstance(guide, Approximated):
                    try:
                        guide.approximate(batches)
                    except (NoModeError, TooFewIteratesError) as error:
                        error.history = history
                        raise
                group.align(tensors_of(model, guide))
                done.finished = True
            if checkpoints:
                checkpoints.write()
            if stopping and not done.finished:
                stopping.restore()  # Ctrl-C came; the checkpoint resumes from the latest epoch
        history = history.completed(done, interrupts.stop)
        if not interrupts.stop:
            with frozen.preserved():
                warn_if_undertrained(options, batches, history)
    return history


class Options(SimpleNamespace):
    """The arguments of one call of `fit`, by name."""

    lr: float | None
    callbacks: Iterable[Callback]

    def check(self) -> None:
        """Check the arguments that can be checked without data and device."""
        kind("model", self.model, BayesianModel)
        require_guide(self.guide)
        count("epochs", self.epochs)
        if self.lr is not None:
            self.lr = positive("lr", self.lr)
        one_of("estimator", self.estimator, ESTIMATORS)
        if self.autocast not in (None, torch.bfloat16):
            raise ValueError(
                f"autocast must be None or torch.bfloat16, got {self.autocast!r} (torch.float16 "
                "needs loss scaling)"
            )
        one_of("nonfinite", self.nonfinite, ("raise", "skip"))
        one_of("engine", self.engine, ("auto", "eager", "compiled"))
        count("accumulate", self.accumulate)
        for name in ("checkpoint_every", "patience"):
            if getattr(self, name) is not None:
                count(name, getattr(self, name))
        if not isinstance(self.checkpoint, str | PathLike | None):
            raise TypeError(f"checkpoint must be a path, got {self.checkpoint!r}")
        lr_factor(self.lr_schedule)
        as_kl_schedule(self.kl_schedule)
        minibatch_elbo(self.loss, self.num_particles)
        if not isinstance(self.callbacks, Iterable):
            raise TypeError(f"callbacks must be several functions, got {self.callbacks!r}")
        self.callbacks = tuple(self.callbacks)  # an iterator is read once
        for callback in self.callbacks:
            function("each of callbacks", callback, "(EpochEnd) -> bool or None")

    def check_together(self, group: Processes) -> None:
        """Raise ValueError if two arguments, or one and several processes, exclude each other."""
        guide, data = self.guide, self.data
        stream = isinstance(data, DataLoader) and isinstance(data.dataset, IterableDataset)
        module = {
            "a guide that is a module, with parameters of its own": not isinstance(guide, nn.Module)
        }
        optimizer = {"a torch optimiser, got a PyroOptim": isinstance(self.optimizer, PyroOptim)}
        if self.cuda_graph:
            lacking = {
                "an engine other than 'eager'": self.engine == "eager",
                "accumulate=1, as it captures one step": self.accumulate > 1,
                "nonfinite='raise', as it reads no loss at a step": self.nonfinite == "skip",
            }
            require("cuda_graph=True", lacking)
        if self.checkpoint is not None:
            again = {"data that can be read again from the start, got a stream": stream}
            require("checkpoint", module | again | optimizer)
        elif self.checkpoint_every is not None:
            require("checkpoint_every", {"checkpoint, the folder to write to": True})
        if self.patience is not None:
            lacking = {
                "validation, the data by which epochs are compared": self.validation is None,
                **module,
                "a guide other than SWAG, which averages the parameters of many epochs": bool(
                    collected(guide)
                ),
            }
            require("patience", lacking)
        if group.size > 1:
            graph = {"cuda_graph=False": self.cuda_graph}
            require(f"training in {group.size} processes", module | optimizer | graph)
            check_sampler(data, group)
            if is_sharded(data) and isinstance(guide, Approximated):
                raise ValueError(
                    "data must be the same in every process for a guide that is approximated at "
                    "the end, got a loader that yields each process its own shard"
                )
            if is_sharded(self.validation):
                raise ValueError(
                    "validation must be the same in every process, got a sharded loader"
                )

    @cached_property
    def ivon(self) -> IVON | None:
        """Return the options of IVON, if that is the optimiser."""
        named = isinstance(self.optimizer, str) and self.optimizer == "ivon"
        return IVON() if named else self.optimizer if isinstance(self.optimizer, IVON) else None

    @cached_property
    def schedule(self) -> KLSchedule:
        """Return the weights of the KL."""
        return as_kl_schedule(self.kl_schedule)

    def initial_lr(self, steps_per_epoch: int) -> float:
        """Return the learning rate at the start."""
        if self.lr is not None:
            return self.lr
        if self.ivon is not None:
            return IVON_LR
        return default_lr(self.epochs * steps_per_epoch) if self.optimizer is None else 1e-3

    def last_kl_weight(self, num_data: int, num_batches: int) -> float:
        """Return the sum of the KL's weights over the minibatches of the last epoch."""
        if isinstance(self.schedule.base, str):  # the sum is that of one minibatch of all data
            num_batches = 1
        share, more = divmod(num_data, num_batches)
        epoch = {"epoch": self.epochs - 1, "num_batches": num_batches, "num_data": num_data}
        sizes = (max(1, share + (i < more)) for i in range(num_batches))
        return sum(
            self.schedule.weight(batch=i, batch_size=size, **epoch)
            for i, size in enumerate(sizes, start=1)
        )


@dataclass
class Loop:
    """Yields the minibatches that a run has left; does what is due after each step and epoch."""

    options: Options
    state: TrainingState
    runner: StepRunner
    frozen: Frozen
    checkpoints: Checkpoint | None
    stopping: EarlyStopping | None
    interrupts: Interrupts

    def __post_init__(self) -> None:
        count, at = len(self.state.batches), self.state.progress
        num_steps = self.options.epochs * count
        collecting = collected(self.state.guide)  # guides that collect iterates, after some steps
        self.collected = [(guide, guide.plan(num_steps, count)) for guide in collecting]
        modules = self.state.guide.modules() if isinstance(self.state.guide, nn.Module) else ()
        self.guides = [module for module in modules if isinstance(module, Guide)]
        self.lr_stays = min((guide.start for guide in collecting), default=1.0)
        self.bar = progress_bar(
            num_steps,
            initial=at.epoch * count + at.batch,
            unit="step",
            shown=self.options.progress and self.state.batches.processes.first,
        )

    def steps(self) -> Iterator[tuple[Parts, float]]:
        """Yield each step's minibatch and learning rate until the training has ended."""
        at, count = self.state.progress, len(self.state.batches)
        lr, factor = self.options.initial_lr(count), lr_factor(self.options.lr_schedule)
        while not (at.trained or self.interrupts.stop):
            began = time.perf_counter() - at.seconds
            if at.batch == 0:
                for member in self.guides:
                    member.before_epoch(at.epoch, self.options.epochs, self.state.batches)
            for shard in self._shards():
                if isinstance(elbo := self.runner.program.elbo, NaturalGradientELBO):
                    elbo.rows_per_part = shard.size / shard.draws
                trained = (at.epoch + at.batch / count) / self.options.epochs
                yield self._weighted(shard), lr * factor(min(self.lr_stays, trained))
                at.batch, at.examples = at.batch + 1, at.examples + shard.size
                for guide, steps in self.collected:
                    if at.epoch * count + at.batch in steps:
                        guide.collect()
                at.seconds = time.perf_counter() - began
                self.bar.update()
                if at.batch != count:
                    if self.checkpoints:
                        self.checkpoints.maybe_write(epoch_ended=False)
                    if self.interrupts.stop:
                        return
            if self.interrupts.stop and at.batch < count:
                return
            if at.batch == 0:
                raise ValueError(
                    f"data must give minibatches in every epoch, none in {at.epoch + 1}"
                )
            self._end_epoch()

    def _shards(self) -> Iterator[Shard]:
        try:
            yield from self.state.batches.shards()
        except RuntimeError:  # from a loader whose workers Ctrl-C has ended
            if not self.interrupts.stop:
                raise

    def _weighted(self, shard: Shard) -> Parts:
        """Return the parts of a minibatch, with the weight of the KL of each."""
        batches, at = self.state.batches, self.state.progress
        num_data, seen = batches.model.num_data, batches.num_seen or batches.model.num_data
        weight = self.options.schedule.weight(
            batch=at.batch + 1,
            num_batches=len(batches),
            batch_size=shard.size,
            num_data=seen,
            epoch=at.epoch,
        )
        weight *= seen / num_data  # a sampler that repeats rows gives each epoch `seen` terms
        # each of the J parts has its own draw: `free_energy` weighs its KL by pi_i / J
        return [(x, y, weight / shard.draws) for x, y in shard.parts]

    def _end_epoch(self) -> None:
        """Record the epoch, validate, call the callbacks, and write a checkpoint if one is due."""
        at, history, options = self.state.progress, self.state.history, self.options
        batches, guide = self.state.batches, self.state.guide
        self.runner.flush()
        seconds = max(batches.processes.gather(at.seconds))
        history.close_epoch(len(history.steps) - at.recorded, seconds, at.examples)
        if at.epoch == 0:
            batches.warn_if_contradicted(at.examples, at.batch)
        at.epoch, at.batch, at.examples = at.epoch + 1, 0, 0
        at.recorded, at.seconds = len(history.steps), 0.0
        ended = False
        if self.stopping:
            with self.frozen.preserved():
                ended = self.stopping.after_epoch()
        if not self.bar.disable:
            shown = {"neg_elbo": history.loss, "nll": history.nll}
            shown |= {"validation": history.validation_loss} if self.stopping else {}
            self.bar.set_description(f"epoch {at.epoch}/{options.epochs}", refresh=False)
            self.bar.set_postfix({k: f"{v[-1]:.4g}" for k, v in shown.items()}, refresh=False)
        if options.callbacks:
            end = EpochEnd(at.epoch - 1, batches.model, guide, history)
            with callers_store():
                ended |= any([callback(end) for callback in options.callbacks])
            self.frozen.find()  # a callback may have frozen or unfrozen some
            self.runner.program.elbo.forget_prior()
        # true in any process ends the training
        at.trained = any(batches.processes.gather(ended)) or at.epoch == options.epochs
        if self.checkpoints:
            self.checkpoints.maybe_write(epoch_ended=True)


@contextmanager
def _in_step(options: Options, frozen: Frozen) -> Iterator[None]:
    """Enter the context of a step; callbacks run outside of it."""
    precision = network_precision(options.autocast)
    with pyro.validation_enabled(False), ESTIMATORS[options.estimator](), precision:
        with frozen.preserved():
            yield


def _is_small(model: BayesianModel, batch_size: int) -> bool:
    """Return whether one processor thread is fastest: dense weights, few products per step."""
    shapes = model.latent_shapes().values()
    weights = sum(shape.numel() for shape in shapes)
    products = weights * min(batch_size, model.num_data)
    return products < ONE_THREAD * 128 and all(len(shape) <= 2 for shape in shapes)


def _runner(
    options: Options,
    program: StepProgram,
    capture: CudaDevice | TracingDevice | None,
    group: Processes,
    interrupts: Interrupts,
) -> StepRunner:
    """Return the runner of the steps: captured, of several processes, or eager."""
    if group.size > 1:
        return DistributedRunner(program, group, interrupts)
    if capture is not None:
        try:
            return CapturedRunner(program, capture, required=options.cuda_graph)
        except UnsupportedOptimizerError:
            if options.cuda_graph:
                raise
    return EagerRunner(program)
