# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of `fit`: the state of a run, in a folder that is complete at every moment.

Tensors lie in safetensors, the rest in a JSON description, written as `pyro_bbb.save` writes; to
read one executes nothing. Parameters, buffers, the optimiser, random states, the data's order, the
history and how far the run is go in, so that it goes on as if it had not been interrupted. Of
several processes the first writes and reads; each has random states of its own in there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from pyro.optim import PyroOptim
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from pyro_bbb._utils.files import loading
from pyro_bbb._utils.validation import count, require
from pyro_bbb.persistence.archive import (
    Json,
    first_does,
    read_for_all,
    require_run,
    tidy,
    write,
)
from pyro_bbb.training._checkpoints.state import TrainingState
from pyro_bbb.training._config import FitConfig
from pyro_bbb.training.history import History

_KIND = "training"


class CheckpointError(OSError):
    """A checkpoint could not be written or read; what is in memory and on the disk stays whole.

    Args:
        message: what could not be done, and why.
        retry: writes the checkpoint that could not be written.

    Attributes:
        history: of the training so far; the parameters are those after its last step.
        retry: call it once the cause is gone; then the run can go on from that checkpoint.
    """

    def __init__(self, message: str, retry: Callable[[], None] | None = None) -> None:
        super().__init__(message)
        self.retry = retry
        self.history: History | None = None


class Checkpoint:
    """The checkpoint of one run, which has a fingerprint.

    It is written every so many steps, or with ``None`` at the end of each epoch. ``flush`` is
    called before the state is read.
    """

    def __init__(
        self,
        folder: Path,
        every: int | None,
        state: TrainingState,
        run: dict[str, Json],
        flush: Callable[[], None],
    ) -> None:
        self.folder, self.every, self.state, self.flush = folder, every, state, flush
        self.run, self.processes = run, state.batches.processes

    def begin(self) -> None:
        """Resume the run from its checkpoint, or write its first."""
        try:
            spec, tensors = read_for_all(self.folder, self.processes)
        except FileNotFoundError:
            self.write()
        except OSError as error:
            raise CheckpointError(f"checkpoint {self.folder} cannot be read: {error}") from error
        else:
            self._resume(spec, tensors)
        if self.processes.first:
            tidy(self.folder)

    def _resume(self, spec: dict[str, Json], tensors: dict[str, Tensor]) -> None:
        require_run(self.folder, spec, _KIND, "fit", self.run)
        with loading(self.folder):
            self.state.restore(spec, tensors)

    def maybe_write(self, epoch_ended: bool) -> None:
        """Write a checkpoint where one is due."""
        at = self.state.progress
        steps = at.epoch * len(self.state.batches) + at.batch
        if epoch_ended if self.every is None else steps % self.every == 0:
            self.write()

    def write(self) -> None:
        """Write the run as it is now; after a CheckpointError the previous one is complete."""
        self.flush()
        spec, tensors = self.state.save()
        try:
            self._write({"kind": _KIND, "run": self.run, **spec}, tensors)
        except CheckpointError as error:
            error.history = self.state.history
            raise

    def _write(self, spec: dict[str, Json], tensors: dict[str, Tensor]) -> None:
        try:
            first_does(self.processes, partial(write, self.folder, spec, tensors))
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {self.folder} cannot be written: {error}. The previous one is "
                "complete, and the state of training stays in memory",
                partial(self._write, spec, tensors),
            ) from error


def checkpoint_folder(config: FitConfig, guide: Any, data: Any) -> Path | None:
    """The folder for checkpoints, if any; ValueError for a run that could not be resumed."""
    checkpoint, every = config.checkpoint, config.checkpoint_every
    if every is not None:
        count("checkpoint_every", every)
    if checkpoint is None:
        if every is not None:
            raise ValueError("checkpoint_every needs checkpoint, the folder to write to")
        return None
    if not isinstance(checkpoint, str | PathLike):
        raise TypeError(f"checkpoint must be a path, got {checkpoint!r}")
    stream = isinstance(data, DataLoader) and isinstance(data.dataset, IterableDataset)
    lacking = {
        "a guide that is a module, with parameters of its own": not isinstance(guide, nn.Module),
        "data that can be read again from the start, got a stream": stream,
        "a torch optimiser, got a PyroOptim": isinstance(config.optimizer, PyroOptim),
    }
    require("checkpoint", lacking)
    return Path(checkpoint)
