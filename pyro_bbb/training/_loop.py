# SPDX-License-Identifier: Apache-2.0
"""The loop of `fit` over epochs and minibatches, from wherever a run has got to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pyro_bbb._utils.context import explained_batchnorm
from pyro_bbb._utils.interrupts import Interrupts
from pyro_bbb._utils.progress import progress_bar
from pyro_bbb.guides import Collected
from pyro_bbb.training._checkpoint import Checkpoint, TrainingState
from pyro_bbb.training._config import FitConfig
from pyro_bbb.training._runners.protocol import Parts, StepRunner


@dataclass
class Loop:
    """Runs the steps of a training."""

    config: FitConfig
    state: TrainingState
    runner: StepRunner
    checkpoint: Checkpoint | None
    collected: list[tuple[Collected, range]]  # guides, and the steps after which they collect
    validate: Callable[[], bool]  # after an epoch; true ends the training

    def __post_init__(self) -> None:
        batches, at = self.state.batches, self.state.progress
        self.lr = self.config.initial_lr(len(batches))
        self.lr_stays = min((guide.start for guide, _ in self.collected), default=1.0)
        self.bar = progress_bar(
            self.config.epochs * len(batches),
            initial=at.epoch * len(batches) + at.batch,
            unit="step",
            shown=self.config.progress and batches.processes.first,
        )

    def run(self, interrupts: Interrupts, callback: Callable[[int], bool]) -> None:
        """Train to the end, or up to where Ctrl-C or the callback ends it.

        The callback gets an epoch's number after it; true in any process ends the training.
        """
        at, group = self.state.progress, self.state.batches.processes
        with self.bar:
            while not (at.trained or interrupts.stop):
                if self._epoch(interrupts):
                    self._close_epoch()
                    stopped = self.validate()
                    self._show()
                    ended = group.largest(callback(at.epoch - 1)) > 0 or stopped
                    at.trained = ended or at.epoch == self.config.epochs
                    self._maybe_checkpoint(epoch_ended=True)

    def _epoch(self, interrupts: Interrupts) -> bool:
        """Run the steps of the epoch; false if Ctrl-C came before the last."""
        at, count = self.state.progress, len(self.state.batches)
        began = time.perf_counter() - at.seconds
        for parts, size, epochs in self._minibatches(interrupts):
            factor = self.config.lr_factor(min(self.lr_stays, epochs / self.config.epochs))
            with explained_batchnorm():
                self.runner.step(parts, self.lr * factor)
            at.batch, at.examples = at.batch + 1, at.examples + size
            self._collect(at.epoch * count + at.batch)
            at.seconds = time.perf_counter() - began
            self.bar.update()
            if at.batch != count:
                self._maybe_checkpoint(epoch_ended=False)
                if interrupts.stop:
                    return False
        if interrupts.stop and at.batch < count:
            return False
        if at.batch == 0:
            raise ValueError(f"data must give minibatches in every epoch, none in {at.epoch + 1}")
        return True

    def _collect(self, step: int) -> None:
        for guide, steps in self.collected:
            if step in steps:
                guide.collect()

    def _minibatches(self, interrupts: Interrupts) -> Iterator[tuple[Parts, int, float]]:
        """Yield each step's parts ``(x, y, kl_weight)``, its examples, and the epochs before it."""
        batches, epoch = self.state.batches, self.state.progress.epoch
        count, num_data = len(batches), batches.model.num_data
        weight, seen = self.config.schedule.weight, batches.num_seen or num_data
        try:
            for batch, shard in enumerate(batches.shards(), start=self.state.progress.batch + 1):
                where = {"batch": batch, "num_batches": count, "epoch": epoch}
                kl_weight = weight(**where, batch_size=shard.size, num_data=seen)
                kl_weight *= seen / num_data  # examples seen twice are twice as many, not new ones
                parts = [(x, y, kl_weight / shard.draws) for x, y in shard.parts]
                yield parts, shard.size, epoch + (batch - 1) / count
        except RuntimeError:  # from a loader whose workers Ctrl-C has ended
            if not interrupts.stop:
                raise

    def _maybe_checkpoint(self, *, epoch_ended: bool) -> None:
        if self.checkpoint is not None:
            self.checkpoint.maybe_write(epoch_ended)

    def _close_epoch(self) -> None:
        at, history = self.state.progress, self.state.history
        self.runner.flush()
        seconds = self.state.batches.processes.largest(at.seconds)
        history.close_epoch(len(history.steps) - at.recorded, seconds, at.examples)
        if at.epoch == 0:
            self.state.batches.warn_if_contradicted(at.examples, at.batch)
        at.epoch, at.batch, at.examples = at.epoch + 1, 0, 0
        at.recorded, at.seconds = len(history.steps), 0.0

    def _show(self) -> None:
        at, history = self.state.progress, self.state.history
        if self.bar.disable:
            return
        self.bar.set_description(f"epoch {at.epoch}/{self.config.epochs}", refresh=False)
        shown = {"neg_elbo": f"{history.loss[-1]:.4g}", "nll": f"{history.nll[-1]:.4g}"}
        if history.validation_loss:
            shown["validation"] = f"{history.validation_loss[-1]:.4g}"
        self.bar.set_postfix(shown, refresh=False)
