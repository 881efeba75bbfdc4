# SPDX-License-Identifier: Apache-2.0
r"""`fit`: Bayes by Backprop through Pyro's `SVI`.

Each step is `SVI.step` on one minibatch, the KL weighted by the schedule:
$F_i = \pi_i\,\mathrm{KL} - \log p(D_i|w)$ (Blundell et al. 2015, eq. 8). `fit` adds the loading of
data, one optimiser for all parameters, the record of the loss, checkpoints and checks beforehand.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from types import SimpleNamespace
from typing import Any, TypeAlias

import pyro
import torch

from pyro_bbb._handlers.param_store import callers_store, own_store
from pyro_bbb._utils.context import explained_batchnorm, seeded
from pyro_bbb._utils.distributed import Processes, processes
from pyro_bbb._utils.interrupts import Interrupts
from pyro_bbb._utils.locking import cached_property, locked
from pyro_bbb._utils.progress import progress_bar
from pyro_bbb._utils.validation import as_float, as_number, count, function, kind, one_of
from pyro_bbb.elbo import minibatch_elbo
from pyro_bbb.estimators import ESTIMATORS
from pyro_bbb.guides import (
    Approximated,
    AutoSoftplusNormal,
    NoModeError,
    TooFewIteratesError,
    collected,
)
from pyro_bbb.models import BayesianModel, require_guide
from pyro_bbb.training._baseline import baseline_per_example, warn_if_undertrained
from pyro_bbb.training._batches import Batches, Data
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
    checkpoint_folder,
    fingerprint,
)
from pyro_bbb.training._distributed import DistributedRunner
from pyro_bbb.training._early_stopping import EarlyStopping, check_validation
from pyro_bbb.training._ivon import IVON, IVON_LR
from pyro_bbb.training._schedules import (
    BatchWeight,
    KLSchedule,
    as_kl_schedule,
    default_lr,
    lr_factor,
)
from pyro_bbb.training._setup import Frozen, check_group, make_program, tensors_of, to_device
from pyro_bbb.training._step import (
    EagerRunner,
    NonFiniteRollback,
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
        lr: learning rate at the start. By default 32 / steps, clipped to [0.001, 0.03], and to 0.01
            for the guide's means, which suits Adam (`docs/guide/trained.md`); with another
            ``optimizer`` 0.001.
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
        accumulate: minibatches of one step, one after the other, each with its own draws: a
            minibatch this many times as large, in the memory of one.
        cuda_graph: on a GPU, captures the step in a CUDA graph and replays it for each minibatch,
            and for the smaller last one, which saves the launches of its operations. It needs data
            in memory, Adam or AdamW, a guide that is a module, and nowhere a number read or made on
            the host (as by `StudentT` and low-rank guides). The random numbers and the result are
            the same, but for a learning rate in single precision; a loss or gradient that is not
            finite is reported at the end of its epoch.
            What a callback changes in Python (a rate of dropout, what is frozen, a parameter's
            ``data``) has no effect on the steps that are replayed.
        engine: how steps are run: ``"eager"``; ``"compiled"``, recorded once and replayed (a list
            of operations on a CPU, a CUDA graph on a GPU), which falls back to eager
            (`docs/performance.md`); ``"auto"``, compiled on a CPU for a million parameters or fewer
            in 100 steps or more without callbacks. The result is the same, to rounding.
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
    options = Options(**locals())
    options.check()
    folder, device = checkpoint_folder(options), to_device(model, guide, device)
    capture, group = capture_device(options, device), processes(device)
    check_group(group, options)
    check_validation(validation, patience, guide, group.size > 1)
    interrupts = Interrupts(agreed=group.size > 1)
    history, done = History(num_data=model.num_data), Progress()
    with ExitStack() as at_end:
        at_end.enter_context(seeded(seed))
        at_end.enter_context(own_store(model, guide))
        if isinstance(guide, AutoSoftplusNormal):
            at_end.enter_context(guide.consecutive())
        begin_stream = at_end.enter_context(group.own_stream())
        batches = Batches(data, batch_size, model, device, accumulate, group, guide, sample_weight)
        begin_stream()
        if isinstance(guide, Approximated):
            guide.reset()
        frozen = Frozen(model, guide)
        scope = partial(_step_scope, estimator, frozen)
        with frozen.preserved():
            program = make_program(options, batches, history, scope)
        num_steps = epochs * len(batches)
        if not is_faster_captured(options, program, num_steps):
            capture = None
        runner = _runner(options, program, capture, group, interrupts)
        at_end.callback(_close, runner)
        if isinstance(runner.optim, JointOptim):
            runner.optim.frozen = frozen.parameters
        state = TrainingState(model, guide, runner.optim, batches, history, done, device)
        stopping = None if validation is None else EarlyStopping(state, validation, patience)
        checkpoints = _checkpoints(options, folder, state, program.elbo, runner, stopping)
        if checkpoints:
            checkpoints.begin()
            if done.finished:
                return replace(history.with_baseline(done.baseline), best_epoch=done.best_epoch)
        if done.baseline is None:
            with frozen.preserved():
                kl_weight = options.last_kl_weight(model.num_data)
                done.baseline = baseline_per_example(batches, num_steps, kl_weight)
        with interrupts:
            loop = Loop(options, state, runner, frozen, checkpoints, stopping, interrupts)
            loop.run()
            runner.flush()
            _close(runner)
            if done.trained and not done.finished:
                if stopping:
                    stopping.restore()
                _approximate(guide, batches, history)
                group.align(tensors_of(model, guide))
                done.finished = True
            if checkpoints:
                checkpoints.write()
            if stopping and not done.finished:
                stopping.restore()  # Ctrl-C came; the checkpoint resumes from the latest epoch
    history = replace(history.with_baseline(done.baseline), best_epoch=done.best_epoch)
    if interrupts.stop:
        return replace(history, interrupted=True)
    warn_if_undertrained(history)
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
        if as_number(self.lr) is not None:
            self.lr = as_number(self.lr)
            number = isinstance(self.lr, int | float) and not isinstance(self.lr, bool)
            if not number or not 0 < as_float(self.lr) < math.inf:
                raise ValueError(f"lr must be a positive number, got {self.lr!r}")
        one_of("estimator", self.estimator, ESTIMATORS)
        if self.autocast is torch.float16:
            raise ValueError("autocast must be torch.bfloat16: torch.float16 needs loss scaling")
        if self.autocast not in (None, torch.bfloat16):
            raise ValueError(f"autocast must be None or torch.bfloat16, got {self.autocast!r}")
        one_of("nonfinite", self.nonfinite, ("raise", "skip"))
        one_of("engine", self.engine, ("auto", "eager", "compiled"))
        count("accumulate", self.accumulate)
        if self.cuda_graph:
            self._check_cuda_graph()
        lr_factor(self.lr_schedule)
        as_kl_schedule(self.kl_schedule)
        minibatch_elbo(self.loss, self.num_particles)
        if not isinstance(self.callbacks, Iterable):
            raise TypeError(f"callbacks must be several functions, got {self.callbacks!r}")
        self.callbacks = tuple(self.callbacks)  # an iterator is read once
        for callback in self.callbacks:
            function("each of callbacks", callback, "(EpochEnd) -> bool or None")

    def _check_cuda_graph(self) -> None:
        if self.engine == "eager":
            raise ValueError("engine must not be 'eager' with cuda_graph=True")
        if self.accumulate > 1:
            raise ValueError("accumulate must be 1 with cuda_graph=True, which captures one step")
        if self.nonfinite == "skip":
            raise ValueError(
                "nonfinite='skip' reads the loss of every step, which cuda_graph=True does not"
            )

    @cached_property
    def ivon(self) -> IVON | None:
        """The options of IVON, if that is the optimiser."""
        named = isinstance(self.optimizer, str) and self.optimizer == "ivon"
        return IVON() if named else self.optimizer if isinstance(self.optimizer, IVON) else None

    @cached_property
    def schedule(self) -> KLSchedule:
        """The weights of the KL."""
        return as_kl_schedule(self.kl_schedule)

    def initial_lr(self, steps_per_epoch: int) -> float:
        """Return the learning rate at the start."""
        if self.lr is not None:
            return float(self.lr)
        if self.ivon is not None:
            return IVON_LR
        return default_lr(self.epochs * steps_per_epoch) if self.optimizer is None else 1e-3

    def last_kl_weight(self, num_data: int) -> float:
        """Return the weight of the KL in the last epoch, as in one minibatch of all data."""
        sizes = {"batch_size": num_data, "num_data": num_data}
        return self.schedule.weight(batch=1, num_batches=1, epoch=self.epochs - 1, **sizes)


@dataclass
class Loop:
    """The loop over epochs and minibatches, from where the run has got to."""

    options: Options
    state: TrainingState
    runner: StepRunner
    frozen: Frozen
    checkpoints: Checkpoint | None
    stopping: EarlyStopping | None
    interrupts: Interrupts

    def __post_init__(self) -> None:
        count, at = len(self.state.batches), self.state.progress
        epochs = self.options.epochs
        self.lr = self.options.initial_lr(count)
        self.lr_factor = lr_factor(self.options.lr_schedule)
        collecting = collected(self.state.guide)  # guides that collect iterates, after some steps
        self.collected = [(guide, guide.plan(epochs * count, count)) for guide in collecting]
        self.lr_stays = min((guide.start for guide in collecting), default=1.0)
        self.bar = progress_bar(
            epochs * count,
            initial=at.epoch * count + at.batch,
            unit="step",
            shown=self.options.progress and self.state.batches.processes.first,
        )

    def run(self) -> None:
        """Train to the end, or up to where Ctrl-C, a callback or the validation ends it."""
        at, group = self.state.progress, self.state.batches.processes
        with self.bar:
            while not (at.trained or self.interrupts.stop):
                if not self._epoch():
                    break
                self._close_epoch()
                stopped = self._validate()
                self._show()
                # true in any process ends the training
                ended = any(group.gather(self._call_back(at.epoch - 1))) or stopped
                at.trained = ended or at.epoch == self.options.epochs
                self._maybe_checkpoint(epoch_ended=True)

    def _epoch(self) -> bool:
        """Run the steps of the epoch; return false if Ctrl-C came before the last."""
        at, count = self.state.progress, len(self.state.batches)
        began = time.perf_counter() - at.seconds
        for parts, size, epochs in self._minibatches():
            factor = self.lr_factor(min(self.lr_stays, epochs / self.options.epochs))
            with explained_batchnorm():
                self.runner.step(parts, self.lr * factor)
            at.batch, at.examples = at.batch + 1, at.examples + size
            for guide, steps in self.collected:
                if at.epoch * count + at.batch in steps:
                    guide.collect()
            at.seconds = time.perf_counter() - began
            self.bar.update()
            if at.batch != count:
                self._maybe_checkpoint(epoch_ended=False)
                if self.interrupts.stop:
                    return False
        if self.interrupts.stop and at.batch < count:
            return False
        if at.batch == 0:
            raise ValueError(f"data must give minibatches in every epoch, none in {at.epoch + 1}")
        return True

    def _minibatches(self) -> Iterator[tuple[Parts, int, float]]:
        """Yield each step's parts ``(x, y, kl_weight)``, its examples, and the epochs before it."""
        batches, at = self.state.batches, self.state.progress
        count, num_data, epoch = len(batches), batches.model.num_data, at.epoch
        seen = batches.num_seen or num_data
        try:
            for batch, shard in enumerate(batches.shards(), start=at.batch + 1):
                where = {"batch": batch, "num_batches": count, "epoch": epoch}
                kl_weight = self.options.schedule.weight(
                    **where, batch_size=shard.size, num_data=seen
                )
                kl_weight *= seen / num_data  # examples seen twice are twice as many, not new ones
                parts = [(x, y, kl_weight / shard.draws) for x, y in shard.parts]
                yield parts, shard.size, epoch + (batch - 1) / count
        except RuntimeError:  # from a loader whose workers Ctrl-C has ended
            if not self.interrupts.stop:
                raise

    def _maybe_checkpoint(self, *, epoch_ended: bool) -> None:
        if self.checkpoints is not None:
            self.checkpoints.maybe_write(epoch_ended)

    def _close_epoch(self) -> None:
        at, history = self.state.progress, self.state.history
        self.runner.flush()
        seconds = max(self.state.batches.processes.gather(at.seconds))
        history.close_epoch(len(history.steps) - at.recorded, seconds, at.examples)
        if at.epoch == 0:
            self.state.batches.warn_if_contradicted(at.examples, at.batch)
        at.epoch, at.batch, at.examples = at.epoch + 1, 0, 0
        at.recorded, at.seconds = len(history.steps), 0.0

    def _validate(self) -> bool:
        """Score the epoch, if there are data for it; return whether training ends."""
        if self.stopping is None:
            return False
        with self.frozen.preserved():
            return self.stopping.after_epoch()

    def _call_back(self, epoch: int) -> bool:
        """Call all callbacks after an epoch; return whether one ends the training."""
        if not self.options.callbacks:
            return False
        end = EpochEnd(epoch, self.state.batches.model, self.state.guide, self.state.history)
        with callers_store():
            ended = any([callback(end) for callback in self.options.callbacks])
        self.frozen.find()  # a callback may have frozen or unfrozen some
        return ended

    def _show(self) -> None:
        at, history = self.state.progress, self.state.history
        if self.bar.disable:
            return
        self.bar.set_description(f"epoch {at.epoch}/{self.options.epochs}", refresh=False)
        shown = {"neg_elbo": f"{history.loss[-1]:.4g}", "nll": f"{history.nll[-1]:.4g}"}
        if history.validation_loss:
            shown["validation"] = f"{history.validation_loss[-1]:.4g}"
        self.bar.set_postfix(shown, refresh=False)


def _runner(
    options: Options,
    program: StepProgram,
    capture: CudaDevice | TracingDevice | None,
    group: Processes,
    interrupts: Interrupts,
) -> StepRunner:
    """Return the runner of the steps: captured, of several processes, or eager."""
    runner: StepRunner
    if group.size > 1:
        runner = DistributedRunner(program, group, interrupts)
    elif capture is None:
        runner = EagerRunner(program)
    else:
        try:
            runner = CapturedRunner(program, capture, required=options.cuda_graph)
        except UnsupportedOptimizerError:
            if options.cuda_graph:
                raise
            runner = EagerRunner(program)
        if capture.asynchronous:
            return runner  # it reads no loss that could be rolled back
    return NonFiniteRollback(runner, program, options.nonfinite)


@contextmanager
def _step_scope(estimator: str, frozen: Frozen) -> Iterator[None]:
    """The context of each single step; callbacks run outside of it."""
    with pyro.validation_enabled(False), ESTIMATORS[estimator](), frozen.preserved():
        yield


def _checkpoints(
    options: Options,
    folder: Any,
    state: TrainingState,
    elbo: Any,
    runner: StepRunner,
    stopping: EarlyStopping | None,
) -> Checkpoint | None:
    """Return the checkpoint of the run, if any; all processes must have the same run."""
    group = state.batches.processes
    if folder is None and group.size == 1:
        return None
    run = fingerprint(options, state, elbo) | (stopping.definition if stopping else {})
    check_alike(run, group)
    if folder is None:
        return None
    return Checkpoint(folder, options.checkpoint_every, state, run, runner.flush)


def _close(runner: StepRunner) -> None:
    """Give the parameters their own memory back; no further step follows."""
    if isinstance(runner.optim, JointOptim):
        runner.optim.close()


def _approximate(guide: Any, batches: Batches, history: History) -> None:
    """Finish a guide whose training is completed by an approximation at its end."""
    if isinstance(guide, Approximated):
        try:
            guide.approximate(batches)
        except (NoModeError, TooFewIteratesError) as error:
            error.history = history
            raise
