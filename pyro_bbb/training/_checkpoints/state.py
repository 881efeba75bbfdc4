# SPDX-License-Identifier: Apache-2.0
"""State of a training run: what a checkpoint saves, and how to go back to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pyro_bbb._utils.files import LoadError, require_form
from pyro_bbb.guides import Ensemble
from pyro_bbb.persistence.adapters import add_base, is_adapted, take_base
from pyro_bbb.persistence.archive import Json, of_all, of_one
from pyro_bbb.persistence.json_codec import decode, pack
from pyro_bbb.persistence.state_dict import State, cpu_copy
from pyro_bbb.training._batches import Batches
from pyro_bbb.training.history import History
from pyro_bbb.training.optim import JointOptim


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
    baseline: list[float] | None = None  # of objective and data cost, nats per example; once known
    best_epoch: int | None = None  # by the validation so far, from 0


_FORM = {  # of the description, by `TrainingState.save`
    "kind": str,
    "run": dict[str, Any],
    "optimizer": dict[str, Any],
    "aliases": dict[str, str],
    "frozen": list[str],
    "turns": list[int],
    "begun": bool,
    "skipped": list[int],
    "progress": Progress,
    "processes": int,
}


@dataclass(frozen=True)
class TrainingState:
    """The parts of a run that change while it trains."""

    model: nn.Module
    guide: nn.Module
    optim: JointOptim
    batches: Batches
    history: History
    progress: Progress
    device: torch.device
    best: dict[str, Tensor] = field(default_factory=dict)  # parameters at the best epoch, by name

    def save(self) -> tuple[dict[str, Json], dict[str, Tensor]]:
        """All that changes in training, as a description and tensors."""
        state = State({})
        state.add(self.model, "model.")
        state.add(self.guide, "guide.")
        own, adapted = state.tensors, is_adapted(self.model)
        base = {"base": take_base(self.model, state)} if adapted else {}
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
            **base,
        }
        best = {f"best.{name}": x for name, x in self.best.items()}
        tensors = {**own, **numbers, **best, **self._of_processes()}
        return spec, {name: cpu_copy(x) for name, x in tensors.items()}

    def restore(self, spec: Mapping[str, Json], tensors: dict[str, Tensor]) -> None:
        """Go back to such a state."""
        base = {"base": dict[str, Any]} if is_adapted(self.model) else {}
        require_form(spec, {**_FORM, **base})
        state = State(tensors, spec["aliases"], spec["frozen"])
        if base:
            add_base(spec["base"], self.model, "model.", tensors)
        self._restore_optimizer(decode(spec["optimizer"], tensors))
        if unnamed := [name for name in tensors if name.startswith("optimizer.")]:
            raise LoadError(f"optimizer must name all of its tensors, got others {unnamed}")
        state.fill(self.model, "model.")
        state.fill(self.guide, "guide.")
        for ensemble, calls in zip(self._ensembles(), spec["turns"], strict=True):
            ensemble._calls = calls
        for name, values in self.history.series().items():
            values[:] = tensors[f"history.{name}"].tolist()
        self.history.skipped[:] = spec["skipped"]
        named = (
            (name.partition(".")[2], x) for name, x in tensors.items() if name.startswith("best.")
        )
        self.best.update({name: x.to(self.device) for name, x in named})
        vars(self.progress).update(spec["progress"])
        processes, at = self.batches.processes, self.progress
        as_many = spec.get("processes", 1) == processes.size
        mine = of_one(tensors, processes.rank) if as_many else tensors
        order = [mine[f"order.{i}"] for i in range(len(self.batches.order()))]
        self.batches.resume(order, begun=spec["begun"], steps=at.batch, epoch=at.epoch)
        torch.set_rng_state(mine["random.cpu"])  # last: all before may draw
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(mine["random.cuda"], self.device)
        if not as_many:  # new streams for all, from the state of the first
            processes.begin_stream()

    def _restore_optimizer(self, saved: dict[str, Any]) -> None:
        """Go back to an optimiser's state, whose options are of the types of the present ones."""
        groups = self.optim.get_state().get("param_groups", [])
        types = [{name: type(value) for name, value in group.items()} for group in groups]
        pairs = zip(types, saved.get("param_groups", ()), strict=True)
        for i, (expected, group) in enumerate(pairs):
            found = {name: type(value) for name, value in group.items()}
            if found != expected:
                raise LoadError(f"param_groups[{i}] of optimizer must have {expected}, got {found}")
        entries = saved.get("state", {})
        names = [name for entry in entries.values() for name in entry]
        if {int, *map(type, entries)} != {int} or {str, *map(type, names)} != {str}:
            raise LoadError(f"state of optimizer must have names by integers, got {list(entries)}")
        self.optim.set_state(saved)

    def _ensembles(self) -> list[Ensemble]:
        return [module for module in self.guide.modules() if isinstance(module, Ensemble)]

    def _of_processes(self) -> dict[str, Tensor]:
        """Random states of every process."""
        states = {f"order.{i}": x for i, x in enumerate(self.batches.order())}
        states["random.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            states["random.cuda"] = torch.cuda.get_rng_state(self.device)
        return of_all(states, self.batches.processes)
