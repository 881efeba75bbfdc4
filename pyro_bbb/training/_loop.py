"""The loop of `fit` over epochs and minibatches, from wherever a run has got to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from pyro_bbb.training._batches import Batches
from pyro_bbb.training._interrupts import Interrupts
from pyro_bbb.training._schedules import KLSchedule
from pyro_bbb.training.history import History

Args: TypeAlias = list[tuple[Tensor, Tensor, float]]


@dataclass
class Progress:
    """How far a run is.

    Args:
        epoch: whole epochs done.
        batch: steps done of the epoch under way.
        recorded: steps in the history before this epoch.
        seconds: time that this epoch has taken so far.
        trained: whether all steps are done.
        finished: whether nothing is left to do.
    """

    epoch: int = 0
    batch: int = 0
    recorded: int = 0
    seconds: float = 0.0
    trained: bool = False
    finished: bool = False


@dataclass
class Loop:
    """Takes the steps of a run.

    Args:
        batches: the data.
        schedule: weights of the KL.
        rate: from the share of training done to the learning rate.
        epochs: how many there are to be.
        history: of the run.
        progress: of the run.
        take: takes one step on the parts of its minibatch.
        read: adds to the history what steps left unread.
        offer: offers to write a checkpoint; its argument says whether an epoch has just ended.
        bar: of tqdm.
    """

    batches: Batches
    schedule: KLSchedule
    rate: Callable[[float], float]
    epochs: int
    history: History
    progress: Progress
    take: Callable[[Args, float], None]
    read: Callable[[], None]
    offer: Callable[[bool], None]
    bar: Any

    def run(self, interrupts: Interrupts, callback: Callable[[int], bool]) -> None:
        """Trains to the end, or up to where Ctrl-C or the callback ends it.

        Args:
            interrupts: watched between steps.
            callback: called with an epoch's number after it; true in any process ends the training.
        """
        at = self.progress
        while not (at.trained or interrupts.asked):
            if self._steps(interrupts):
                self._close_epoch()
                ended = self.batches.processes.largest(callback(at.epoch - 1)) > 0
                at.trained = ended or at.epoch == self.epochs
                self.offer(True)

    def _steps(self, interrupts: Interrupts) -> bool:
        """Takes the epoch's steps; false if Ctrl-C came before the last."""
        at = self.progress
        began = time.perf_counter() - at.seconds
        for args, share in self._arguments(interrupts):
            self.take(args, self.rate(min(1.0, share / self.epochs)))
            at.batch += 1
            at.seconds = time.perf_counter() - began
            self.bar.update()
            if at.batch != len(self.batches):
                self.offer(False)
                if interrupts.asked:
                    return False
        if interrupts.asked and at.batch < len(self.batches):
            return False
        if at.batch == 0:
            raise ValueError(f"data must give minibatches in every epoch, none in {at.epoch + 1}")
        return True

    def _arguments(self, interrupts: Interrupts) -> Iterator[tuple[Args, float]]:
        """The arguments ``(x, y, kl_weight)`` of a step's parts, and the epochs done before it."""
        count, epoch = len(self.batches), self.progress.epoch
        num_data = self.batches.model.num_data
        try:
            for batch, share in enumerate(self.batches.shares(), start=self.progress.batch + 1):
                where = {"batch": batch, "num_batches": count, "epoch": epoch}
                kl_weight = self.schedule.weight(**where, batch_size=share.size, num_data=num_data)
                parts = [(x, y, kl_weight / share.draws) for x, y in share.parts]
                yield parts, epoch + (batch - 1) / count
        except RuntimeError:  # from a loader whose workers Ctrl-C has ended
            if not interrupts.asked:
                raise

    def _close_epoch(self) -> None:
        at, history = self.progress, self.history
        self.read()
        seconds = self.batches.processes.largest(at.seconds)
        history.close_epoch(len(history.steps) - at.recorded, seconds)
        at.epoch, at.batch, at.recorded, at.seconds = at.epoch + 1, 0, len(history.steps), 0.0
        self.bar.set_description(f"epoch {at.epoch}/{self.epochs}", refresh=False)
        shown = {"neg_elbo": f"{history.loss[-1]:.4g}", "nll": f"{history.nll[-1]:.4g}"}
        self.bar.set_postfix(shown, refresh=False)
