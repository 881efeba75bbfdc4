"""Checkpoints of `fit`: all that a run is, in a folder that is whole at every moment.

Tensors lie in safetensors, the rest in a JSON description, written as `pyro_bbb.save` writes; to
read one executes nothing. Parameters, buffers, the optimiser, random states, the data's order, the
history and how far the run is go in, so that it goes on as if it had not been interrupted. Of
several processes the first writes and reads; each has random states of its own in there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from pyro.optim import PyroOptim
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from pyro_bbb.guides import Ensemble
from pyro_bbb.persistence import LoadError
from pyro_bbb.persistence.archive import Json, first_does, of_all, of_one, read_for_all, tidy, write
from pyro_bbb.persistence.json_codec import pack, unpack
from pyro_bbb.persistence.state_dict import State, cpu_copy
from pyro_bbb.training._batches import Batches
from pyro_bbb.training._fingerprint import differences
from pyro_bbb.training._loop import Progress
from pyro_bbb.training.history import History
from pyro_bbb.training.optim import JointOptim

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


@dataclass(frozen=True)
class Parts:
    """What a run consists of.

    Args:
        model: the model.
        guide: the guide.
        optim: the optimiser.
        batches: the data.
        history: the record so far.
        progress: how far the run is.
        device: where it trains.
    """

    model: nn.Module
    guide: nn.Module
    optim: JointOptim
    batches: Batches
    history: History
    progress: Progress
    device: torch.device

    def state(self) -> tuple[dict[str, Json], dict[str, Tensor]]:
        """All that changes in training, as a description and tensors."""
        state = State({})
        state.add(self.model, "model.")
        state.add(self.guide, "guide.")
        own = state.tensors
        series = self.history.series().items()
        numbers = {f"history.{name}": torch.tensor(x, dtype=torch.float64) for name, x in series}
        spec = {
            "optimizer": pack(self.optim.get_state(), "optimizer", own),
            "aliases": state.aliases,
            "frozen": state.frozen,
            "turns": [ensemble._calls for ensemble in self._ensembles()],
            "begun": self.batches.begun,
            "skipped": list(self.history.skipped),
            "progress": dict(vars(self.progress)),
            "processes": self.batches.processes.size,
        }
        tensors = {**own, **numbers, **self._of_processes()}
        return spec, {name: cpu_copy(x) for name, x in tensors.items()}

    def restore(self, spec: Mapping[str, Json], tensors: dict[str, Tensor]) -> None:
        """Goes back to such a state."""
        state = State(tensors, spec["aliases"], spec["frozen"])
        self.optim.set_state(unpack(spec["optimizer"], tensors))
        state.fill(self.model, "model.")
        state.fill(self.guide, "guide.")
        for ensemble, calls in zip(self._ensembles(), spec["turns"], strict=True):
            ensemble._calls = calls
        for name, values in self.history.series().items():
            values[:] = tensors[f"history.{name}"].tolist()
        self.history.skipped[:] = spec["skipped"]
        vars(self.progress).update(spec["progress"])
        processes, at = self.batches.processes, self.progress
        as_many = spec.get("processes", 1) == processes.size
        mine = of_one(tensors, processes.rank) if as_many else tensors
        order = [mine[f"order.{i}"] for i in range(len(self.batches.order()))]
        self.batches.resume(order, begun=spec["begun"], taken=at.batch, epoch=at.epoch)
        torch.set_rng_state(mine["random.cpu"])  # last: all before may draw
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(mine["random.cuda"], self.device)
        if not as_many:  # new streams for all, from the state of the first
            processes.begin_stream()

    def _ensembles(self) -> list[Ensemble]:
        return [module for module in self.guide.modules() if isinstance(module, Ensemble)]

    def _of_processes(self) -> dict[str, Tensor]:
        """Random states, those of each process."""
        states = {f"order.{i}": x for i, x in enumerate(self.batches.order())}
        states["random.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            states["random.cuda"] = torch.cuda.get_rng_state(self.device)
        return of_all(states, self.batches.processes)


class Checkpoint:
    """The checkpoint of one run.

    Args:
        folder: where it lies.
        every: steps from one to the next; ``None`` for the end of each epoch.
        parts: what the run consists of.
        run: its fingerprint.
        settle: called before the state is taken.
    """

    def __init__(
        self,
        folder: Path,
        every: int | None,
        parts: Parts,
        run: dict[str, Json],
        settle: Callable[[], None],
    ) -> None:
        self.folder, self.every, self.parts, self.settle = folder, every, parts, settle
        self.run, self.processes = run, parts.batches.processes

    def begin(self) -> None:
        """Resumes the run from its checkpoint, or writes its first.

        Raises:
            CheckpointError: the folder cannot be read or written.
            LoadError: a file is damaged, or is no checkpoint.
            ValueError: the checkpoint is of another run.
        """
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
        if spec.get("kind") != _KIND:
            raise LoadError(f"{self.folder} holds something else than a checkpoint of fit")
        if found := differences(spec["run"], self.run):
            raise ValueError(
                f"checkpoint {self.folder} is of another run, so that this one cannot go on from "
                f"it. {'; '.join(found)}. Give the same arguments, or another folder"
            )
        self.parts.restore(spec, tensors)

    def offer(self, whole_epoch: bool) -> None:
        """Writes where one is due.

        Args:
            whole_epoch: whether an epoch has just ended.
        """
        at = self.parts.progress
        steps = at.epoch * len(self.parts.batches) + at.batch
        if whole_epoch if self.every is None else steps % self.every == 0:
            self.write()

    def write(self) -> None:
        """Writes the run as it is now.

        Raises:
            CheckpointError: it cannot be written; the one before is whole.
            TypeError: a part of the state is nothing that can be kept.
        """
        self.settle()
        spec, tensors = self.parts.state()
        try:
            self._write({"kind": _KIND, "run": self.run, **spec}, tensors)
        except CheckpointError as error:
            error.history = self.parts.history
            raise

    def _write(self, spec: dict[str, Json], tensors: dict[str, Tensor]) -> None:
        try:
            first_does(self.processes, partial(write, self.folder, spec, tensors))
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {self.folder} cannot be written: {error}. The one before it is "
                "whole, and the state of training is kept in memory",
                partial(self._write, spec, tensors),
            ) from error


def folder_of(checkpoint: Any, every: Any, guide: Any, data: Any, optimizer: Any) -> Path | None:
    """The folder for checkpoints, if there is to be one.

    Raises:
        TypeError: it is no path.
        ValueError: a run with such arguments could not be resumed.
    """
    whole = isinstance(every, int) and not isinstance(every, bool) and every >= 1
    if every is not None and not whole:
        raise ValueError(f"checkpoint_every must be an integer of at least 1, got {every!r}")
    if checkpoint is None:
        if every is not None:
            raise ValueError("checkpoint_every needs checkpoint, the folder to write to")
        return None
    if not isinstance(checkpoint, str | PathLike):
        raise TypeError(f"checkpoint must be a path, got {checkpoint!r}")
    stream = isinstance(data, DataLoader) and isinstance(data.dataset, IterableDataset)
    reasons = {
        "a guide that is a module, with parameters of its own": not isinstance(guide, nn.Module),
        "data that can be read again from the start, got a stream": stream,
        "a torch optimiser, got a PyroOptim": isinstance(optimizer, PyroOptim),
    }
    for needed, lacking in reasons.items():
        if lacking:
            raise ValueError(f"checkpoint needs {needed}")
    return Path(checkpoint)
