# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of `fit`: the state of a run, in a folder that is complete at every moment.

Tensors are in safetensors, everything else in a JSON description, written as `pyro_bbb.save`
writes; reading executes nothing. A checkpoint holds parameters, buffers, the optimiser, random
states, the order of the data, the history and the progress, so that a run resumes to the bit on a
CPU. In a group of processes the first one writes and reads, and each has its own random states. The
fingerprint of a run names its configuration: it is compared on resuming, and between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pyro_bbb._utils.distributed import Processes
from pyro_bbb._utils.files import loading, require_form
from pyro_bbb._utils.inputs import parts_of
from pyro_bbb._utils.version import __version__
from pyro_bbb.guides import Ensemble
from pyro_bbb.persistence.archive import Json, differences, read, require_run, tidy, write
from pyro_bbb.persistence.definition import definition, in_words
from pyro_bbb.persistence.json_codec import decode, encode
from pyro_bbb.persistence.state import (
    State,
    add_base,
    cpu_copy,
    digest,
    is_adapted,
    take_base,
)
from pyro_bbb.training._batches import Batches
from pyro_bbb.training._kl_schedule import KLSchedule
from pyro_bbb.training.history import History
from pyro_bbb.training.optim import JointOptim

if TYPE_CHECKING:
    from pyro_bbb.training._fit import Options

_OPTIONS = (  # of `fit`, in a fingerprint
    *("epochs", "lr", "lr_schedule", "estimator", "autocast", "accumulate"),
    *("cuda_graph", "engine", "nonfinite", "seed", "patience"),
)
_ROWS = 1024  # rows of the data in a fingerprint, evenly spread


class CheckpointError(OSError):
    """A checkpoint could not be written or read; what is in memory and on the disk stays whole.

    ``retry()`` writes the checkpoint that could not be written, and ``history`` is that of the
    training so far; the parameters are those after its last step.
    """

    def __init__(self, message: str, retry: Callable[[], None] | None = None) -> None:
        super().__init__(message)
        self.retry = retry
        self.history: History | None = None


@dataclass
class Progress:
    """Progress of a run."""

    epoch: int = 0  # complete epochs
    batch: int = 0  # steps done of the epoch under way
    examples: int = 0  # in those steps
    recorded: int = 0  # steps in the history before this epoch
    seconds: float = 0.0  # of this epoch so far
    trained: bool = False  # all steps are done
    finished: bool = False  # nothing is left to do
    baseline: list[float] | None = None  # objective and data cost, nats per example
    best_epoch: int | None = None  # by the validation so far, from 0


@dataclass(frozen=True)
class TrainingState:
    """Everything of a run that changes while it trains."""

    model: nn.Module
    guide: nn.Module
    optim: JointOptim
    batches: Batches
    history: History
    progress: Progress
    device: torch.device
    best: dict[str, Tensor] = field(default_factory=dict)  # parameters at the best epoch, by name

    def save(self) -> tuple[dict[str, Json], dict[str, Tensor]]:
        """Return the state as a description and tensors."""
        state = State({})
        state.add(self.model, "model.")
        state.add(self.guide, "guide.")
        tensors = state.tensors
        spec = {
            "optimizer": encode(self.optim.get_state(), "optimizer", tensors),
            "aliases": state.aliases,
            "frozen": state.frozen,
            "turns": [ensemble.turn for ensemble in self._ensembles()],
            "begun": self.batches.begun,
            "skipped": list(self.history.skipped),
            "progress": dict(vars(self.progress)),
            "processes": self.batches.processes.size,
        }
        if is_adapted(self.model):
            spec["base"] = take_base(self.model, state)
        for name, numbers in self.history.series().items():
            tensors[f"history.{name}"] = torch.tensor(numbers, dtype=torch.float64)
        tensors |= {f"best.{name}": x for name, x in self.best.items()}
        for rank, states in enumerate(self.batches.processes.gather(self._random_states())):
            prefix = f"rank{rank}." if rank else ""
            tensors |= {prefix + name: x for name, x in states.items()}
        return spec, {name: cpu_copy(x) for name, x in tensors.items()}

    def restore(self, spec: Mapping[str, Json], tensors: dict[str, Tensor]) -> None:
        """Go back to the state that `save` returned."""
        state = State(tensors, spec["aliases"], spec["frozen"])
        if is_adapted(self.model):
            add_base(spec["base"], self.model, "model.", tensors)
        self.optim.set_state(decode(spec["optimizer"], tensors))
        state.fill(self.model, "model.")
        state.fill(self.guide, "guide.")
        for ensemble, calls in zip(self._ensembles(), spec["turns"], strict=True):
            ensemble.turn = calls
        for name, numbers in self.history.series().items():
            numbers[:] = tensors[f"history.{name}"].tolist()
        self.history.skipped[:] = spec["skipped"]
        best = {name for name in tensors if name.startswith("best.")}
        self.best.update({n.removeprefix("best."): tensors[n].to(self.device) for n in best})
        require_form(spec["progress"], Progress, "progress")
        require_form(spec["progress"]["baseline"], tuple[float, float] | None, "baseline")
        vars(self.progress).update(spec["progress"])
        processes, at = self.batches.processes, self.progress
        same_size = spec["processes"] == processes.size
        prefix = f"rank{processes.rank}." if same_size and processes.rank else ""
        order = [tensors[f"{prefix}order.{i}"] for i in range(len(self.batches.order()))]
        self.batches.resume(order, begun=spec["begun"], steps=at.batch, epoch=at.epoch)
        torch.set_rng_state(tensors[f"{prefix}random.cpu"])  # last, as reading the data may draw
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(tensors[f"{prefix}random.cuda"], self.device)
        if not same_size:  # new streams for all, from the state of the first
            processes.begin_stream()

    def _ensembles(self) -> list[Ensemble]:
        return [module for module in self.guide.modules() if isinstance(module, Ensemble)]

    def _random_states(self) -> dict[str, Tensor]:
        """Return the random states of this process, and those behind the order of the data."""
        states = {f"order.{i}": x for i, x in enumerate(self.batches.order())}
        states["random.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            states["random.cuda"] = torch.cuda.get_rng_state(self.device)
        return states


@dataclass
class Checkpoint:
    """The checkpoint of one run."""

    folder: Path
    every: int | None  # steps from one to the next; None for the ends of epochs
    state: TrainingState
    run: dict[str, Json]  # fingerprint
    flush: Callable[[], None]  # called before the state is read

    def begin(self) -> None:
        """Resume the run from its checkpoint, or write the first one."""
        processes = self.state.batches.processes
        try:
            spec, tensors = processes.on_first(partial(read, self.folder, "fit"))
        except FileNotFoundError:
            self.write()
        except OSError as error:
            raise CheckpointError(f"checkpoint {self.folder} cannot be read: {error}") from error
        else:
            require_run(self.folder, spec.get("run"), self.run)
            with loading(self.folder):
                self.state.restore(spec, tensors)
        if processes.first:
            tidy(self.folder)

    def maybe_write(self, epoch_ended: bool) -> None:
        """Write a checkpoint if one is due."""
        at = self.state.progress
        steps = at.epoch * len(self.state.batches) + at.batch
        if epoch_ended if self.every is None else steps % self.every == 0:
            self.write()

    def write(self) -> None:
        """Write the run as it is now; after a CheckpointError the previous one is complete."""
        self.flush()
        spec, tensors = self.state.save()
        self._write({"run": self.run, **spec}, tensors)

    def _write(self, spec: dict[str, Json], tensors: dict[str, Tensor]) -> None:
        try:
            self.state.batches.processes.on_first(partial(write, self.folder, "fit", spec, tensors))
        except OSError as error:
            failed = CheckpointError(
                f"checkpoint {self.folder} cannot be written: {error}. The previous one is "
                "complete, and the state of training stays in memory",
                partial(self._write, spec, tensors),
            )
            failed.history = self.state.history
            raise failed from error


def fingerprint(options: Options, state: TrainingState, elbo: Any) -> dict[str, Json]:
    """Return the definition of a run by name; functions count by their names."""
    modules, optimizer = {"model": state.model, "guide": state.guide}, state.optim.optimizer
    defaults = optimizer.defaults.items() if optimizer else ()
    words = [f"{name}={value}" for name, value in defaults if name != "lr"]  # set at each step
    return {
        "version of pyro_bbb": __version__,
        "version of torch": str(torch.__version__),
        **{name: _word(getattr(options, name)) for name in _OPTIONS},
        "num_particles": elbo.num_particles,
        "kl_schedule": _word(options.schedule),
        "loss": "mean_field" if elbo.closed_form else "trace",
        "num_data": state.batches.model.num_data,
        "device": state.device.type,
        "optimizer": f"{type(optimizer).__name__}({', '.join(words)})",
        "in evaluation mode": [n for n, m in state.model.named_modules() if not m.training],
        **definition(state.model, "model"),
        **definition(state.guide, "guide"),
        "pruned weights": digest(getattr(state.guide, "unpruned", {}).values())[:16],
        **_data_in_words(state.batches),
        **{
            f"{prefix}.{name}": _shape(x) + ("" if x.requires_grad else ", frozen")
            for prefix, module in modules.items()
            for name, x in module.named_parameters()
        },
    }


def check_alike(run: Mapping[str, Json], processes: Processes) -> None:
    """Raise ValueError, in all processes, where one has another run than the first."""
    runs = processes.gather(run)
    for rank, run_of_rank in enumerate(runs):
        if run_of_rank != runs[0]:
            words = "; ".join(differences(runs[0], run_of_rank)).replace(" there", " on rank 0")
            raise ValueError(
                "all processes must call fit with the same arguments; rank "
                f"{rank} differs: {words.replace(' here', f' on rank {rank}')}"
            )


def _word(value: Any) -> Json:
    if isinstance(value, KLSchedule):
        return {name: _word(option) for name, option in vars(value).items()}
    return value if isinstance(value, bool | int | float | str | None) else in_words(value)


def _data_in_words(batches: Batches) -> dict[str, Json]:
    source = batches.source
    if isinstance(source, DataLoader):
        sampler = type(source.sampler).__name__
        words = f"DataLoader of {len(batches)} batches in the order of a {sampler}"
        return {"data": words, "batch_size": batches.batch_size}
    tensors = {**parts_of(source.x), "y": source.y}
    shapes = {name: _shape(tensor) for name, tensor in tensors.items()}
    number = min(len(source.y), _ROWS)
    rows = torch.arange(number, device=source.y.device) * (len(source.y) - 1)
    rows //= max(number - 1, 1)
    content = digest(x.detach()[rows] for x in tensors.values())[:16]
    return {**shapes, "content of data": content, "batch_size": source.batch_size}


def _shape(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
