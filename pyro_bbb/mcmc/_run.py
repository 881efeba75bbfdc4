# SPDX-License-Identifier: Apache-2.0
"""A run of chains on minibatches: its data, its loop over steps, and its checkpoint."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_bbb._utils.files import loading, require_form
from pyro_bbb._utils.inputs import Rows, input_tensors, to_precision, weighted
from pyro_bbb._utils.progress import progress_bar
from pyro_bbb._utils.validation import as_device, count
from pyro_bbb._utils.version import __version__
from pyro_bbb.data import as_tensors
from pyro_bbb.mcmc._chains import Chains
from pyro_bbb.models import BayesianModel
from pyro_bbb.persistence.archive import Json, read, require_run, tidy, write
from pyro_bbb.persistence.definition import definition, in_words
from pyro_bbb.persistence.state_dict import cpu_copy, digest


class DivergedError(ArithmeticError):
    """A chain came where its energy or gradient is infinite or not a number.

    Args:
        chain: its number, from 0.
        step: number of the step, from 1.

    Attributes:
        chains: `Chains` of the samples taken before; ``None`` without samples.
    """

    def __init__(self, chain: int, step: int) -> None:
        self.chain, self.step = chain, step
        self.chains: Any = None
        super().__init__(
            f"energy or gradient of chain {chain} is not finite at step {step}; the samples before "
            "are in this error's .chains. Try standardised data, or a lower lr of run_sgmcmc."
        )


def all_data(
    model: BayesianModel, data: Any, device: Any = None, sample_weight: Any = None
) -> tuple[Rows, Tensor]:
    """Return all ``num_data`` rows, checked, and move the model to their device."""
    device = None if device is None else as_device(device)
    x, y = as_tensors(data, device=device, missing=model.likelihood.ignored is not None)
    model.to(x.device)
    x = to_precision(weighted(x, sample_weight), model)
    if len(x) != model.num_data:
        raise ValueError(f"num_data of the model is {model.num_data}, but data has {len(x)}")
    model.check(x, y)
    return x, y


class Shuffled:
    """Minibatches of equal size without end, in a new random order for each pass.

    Rows after the last full batch of a pass are left out.
    """

    def __init__(self, x: Rows, y: Tensor, batch_size: int) -> None:
        self.x, self.y, self.batch_size = x, y, min(batch_size, len(y))
        self.order = torch.empty(0, dtype=torch.long)  # rows still to come

    def first(self) -> tuple[Rows, Tensor]:
        """Return the first rows, as many as in a minibatch."""
        return self.x[: self.batch_size], self.y[: self.batch_size]

    def __iter__(self) -> Iterator[tuple[Rows, Tensor]]:
        return self

    def __next__(self) -> tuple[Rows, Tensor]:
        if self.batch_size == len(self.y):
            return self.x, self.y
        if len(self.order) < self.batch_size:
            self.order = torch.randperm(len(self.y))
        rows, self.order = self.order.tensor_split([self.batch_size])
        rows = rows.to(self.y.device)
        return self.x.index_select(0, rows), self.y.index_select(0, rows)


@dataclass
class Counters:
    """Numbers of a run that change."""

    done: int = 0  # steps, in gradients of each chain
    seconds: float = 0.0


class Run(ABC):
    """State of a run, which a checkpoint holds, and the loop over its steps.

    Attributes:
        counters: numbers of the run.
        state: a dataclass of tensors and of such dataclasses.
        draws: quantities of each draw, by name, ``[chains, ...]``.
        batches: the minibatches, with the rows still to come.
    """

    counters: Any
    state: Any
    draws: dict[str, list[Tensor]]
    batches: Shuffled

    @abstractmethod
    def step(self) -> None:
        """Take one step with all chains."""

    @abstractmethod
    def over(self) -> bool:
        """Return whether no step is left."""

    @abstractmethod
    def chains(self) -> Chains:
        """Return the draws so far."""

    def finish(self, total: int, progress: bool, checkpoint: SavedRun | None) -> Chains:
        """Take all steps that are left, writing a checkpoint when one is due."""
        counters = self.counters
        before, began, start = counters.seconds, time.perf_counter(), counters.done
        with progress_bar(total, initial=counters.done, unit="step", shown=progress) as bar:
            while not self.over():
                done = counters.done
                try:
                    self.step()
                except DivergedError as error:
                    error.chains = self.chains() if any(self.draws.values()) else None
                    raise
                counters.seconds = before + time.perf_counter() - began
                bar.update(counters.done - done)
                if checkpoint and counters.done // checkpoint.every > done // checkpoint.every:
                    checkpoint.write(self)
        if checkpoint and counters.done > start:
            checkpoint.write(self)
        return self.chains()

    def save(self) -> tuple[dict[str, Json], dict[str, Tensor]]:
        """Return all that changes, as numbers and tensors, with the state of random numbers."""
        tensors = {f"state.{name}": value for name, value in _flat(self.state)}
        tensors |= {f"draws.{name}": torch.stack(v) for name, v in self.draws.items() if v}
        tensors |= {"order": self.batches.order, "random.cpu": torch.get_rng_state()}
        if self.batches.y.is_cuda:
            tensors["random.cuda"] = torch.cuda.get_rng_state(self.batches.y.device)
        spec = {"counters": dict(vars(self.counters))}
        return spec, {name: cpu_copy(value) for name, value in tensors.items()}

    def restore(self, spec: Mapping[str, Json], tensors: Mapping[str, Tensor]) -> None:
        """Return to the state of a checkpoint."""
        device = self.batches.y.device
        for name, value in spec["counters"].items():
            setattr(self.counters, name, value)
        moved = {name: value.to(device) for name, value in tensors.items()}
        self.state = _filled(self.state, moved, "state.")
        for name in self.draws:
            self.draws[name] = list(moved.get(f"draws.{name}", ()))
        self.batches.order = tensors["order"]
        torch.set_rng_state(tensors["random.cpu"])
        if "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"], device)


@dataclass(frozen=True)
class SavedRun:
    """The checkpoint of a run, in a folder that is complete at every moment."""

    folder: Path
    every: int  # steps from one checkpoint to the next
    definition: Mapping[str, Json]
    owner: str  # the function

    def resume(self, run: Run) -> None:
        """Restore the run from the checkpoint, if the folder holds one.

        Raises:
            LoadError: the folder is damaged, or holds something else.
            ValueError: the checkpoint is of another run.
        """
        try:
            spec, tensors = read(self.folder)
        except FileNotFoundError:
            return
        tidy(self.folder)
        require_run(self.folder, spec, self.owner, self.owner, self.definition)
        with loading(self.folder):
            form = {"kind": str, "run": dict[str, Any], "counters": type(run.counters)}
            require_form(spec, form)
            run.restore(spec, tensors)

    def write(self, run: Run) -> None:
        """Replace the checkpoint by the run's present state."""
        spec, tensors = run.save()
        write(self.folder, {"kind": self.owner, "run": self.definition, **spec}, tensors)


def checkpoint_folder(checkpoint: Any, every: int) -> Path | None:
    """Return the folder of a checkpoint, with the options checked."""
    count("checkpoint_every", every)
    if checkpoint is None:
        return None
    if not isinstance(checkpoint, str | PathLike):
        raise TypeError(f"checkpoint must be a path, got {checkpoint!r}")
    return Path(checkpoint)


def run_definition(
    model: BayesianModel, batches: Shuffled, init: Any, seed: int | None, z: Tensor
) -> dict[str, Json]:
    """Return what defines a run on minibatches: versions, model, data, seed and start."""
    constants = model.state_dict()  # parameters and buffers that are not sampled
    return {
        "version of pyro_bbb": __version__,
        "version of torch": str(torch.__version__),
        "batch_size": batches.batch_size,
        "seed": seed,
        **definition(model, "model"),
        **{f"model.{name}": in_words(value) for name, value in constants.items()},
        "init": in_words(init),
        "data": digest([*input_tensors(batches.x), batches.y])[:16],
        "initial positions": list(z.shape) if seed is None else digest([z])[:16],
    }


def _flat(state: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in vars(state).items():
        if is_dataclass(value):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _filled(state: Any, tensors: Mapping[str, Tensor], prefix: str) -> Any:
    """Return a state of the same form with the tensors of a checkpoint."""
    values = {
        name: _filled(value, tensors, f"{prefix}{name}.")
        if is_dataclass(value)
        else tensors[prefix + name]
        for name, value in vars(state).items()
    }
    return replace(state, **values)
