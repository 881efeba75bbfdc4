# SPDX-License-Identifier: Apache-2.0
"""A run of chains: its data, its start, its loop over steps, and its checkpoint."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from pyro_bbb._utils.context import seeded
from pyro_bbb._utils.files import loading, require_form
from pyro_bbb._utils.inputs import Rows, input_tensors, to_precision, weighted
from pyro_bbb._utils.progress import progress_bar
from pyro_bbb._utils.validation import as_device, count
from pyro_bbb._utils.version import __version__
from pyro_bbb.data import as_tensors
from pyro_bbb.guides.initial_values import as_initialiser, refuse_unknown
from pyro_bbb.mcmc._chains import Chains
from pyro_bbb.mcmc._potential import MinibatchGradient, Potential
from pyro_bbb.models import BayesianModel
from pyro_bbb.persistence.archive import Json, read, require_run, tidy, write
from pyro_bbb.persistence.definition import definition, in_words
from pyro_bbb.persistence.state import cpu_copy, digest
from pyro_bbb.prediction import posterior_draws

_DRAWS = 100  # of a point of finite energy, before the start is refused


class DivergedError(ArithmeticError):
    """A chain came where its energy or gradient is infinite or not a number.

    Args:
        chain: its number, from 0.
        step: number of the step, from 1.

    Attributes:
        chains: `Chains` of the samples taken before; ``None`` without samples.
    """

    def __init__(self, chain: int, step: int) -> None:
        self.chain: int = chain
        self.step: int = step
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


def initial_positions(potential: Potential, init: Any, seeds: Sequence[int | None]) -> Tensor:
    """Draw a point of finite energy for each chain, ``[chains, d]``, each by its seed."""
    draw, positions = _initialiser(potential, init), []
    for seed in seeds:
        with seeded(seed):
            for _ in range(_DRAWS):  # in deep networks the scale of some draws is 0
                with torch.no_grad():
                    z = potential.unconstrain(draw())
                energy, gradient = potential.value_and_gradient(z)
                if energy.isfinite() and gradient.isfinite().all():
                    break
            else:
                raise ValueError(
                    f"init must be a point of positive density, got energy {energy:.4g}"
                )
        positions.append(z)
    return torch.stack(positions)


def _initialiser(potential: Potential, init: Any) -> Callable[[], dict[str, Tensor]]:
    """Return a function that draws a start."""
    if isinstance(init, str) and init == "prior":
        return potential.draw_prior
    if hasattr(init, "sample_posterior") or isinstance(init, AutoGuide):
        x = potential.x[:1]
        return lambda: {
            name: values[0]
            for name, values in next(posterior_draws(potential.model, init, x, 1)).items()
        }
    if init is None:
        init = potential.model.initial_locs()
    refuse_unknown(init, potential.sites)
    initialise = as_initialiser(init)
    return lambda: {name: initialise(site) for name, site in potential.sites.items()}


class Shuffled:
    """Minibatches of equal size without end, in a new order for each pass; its rest is left out."""

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
    """All chains, from their start to the last draw.

    ``owner`` is the public function; ``counters`` and the tensors of ``state`` change, and
    ``draws`` has quantities of each draw by name, ``[chains, ...]``.
    """

    owner: str
    counters: Any
    state: Any
    draws: dict[str, list[Tensor]]

    def __init__(self, potential: Potential, batches: Shuffled, z: Tensor) -> None:
        self.potential, self.sampling_batches, self.start = potential, batches, z
        self.use(batches, z)

    def use(self, batches: Shuffled, z: Tensor) -> None:
        """Take minibatches from now on from these."""
        self.batches = batches
        self._gradient = MinibatchGradient(self.potential, z, batches.first())

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return energies and gradients given the next minibatch."""
        return self._gradient(z, *next(self.batches))

    @abstractmethod
    def step(self) -> None:
        """Take one step with all chains."""

    @abstractmethod
    def over(self) -> bool:
        """Return whether no step is left."""

    @abstractmethod
    def chains(self) -> Chains:
        """Return the draws so far."""

    def finish(
        self, total: int, progress: bool, checkpoint: Any, every: int, options: dict[str, Any]
    ) -> Chains:
        """Take all steps, from a checkpoint on if there is one, and write others when due."""
        count("checkpoint_every", every)
        folder = None
        if checkpoint is not None:
            if not isinstance(checkpoint, str | PathLike):
                raise TypeError(f"checkpoint must be a path, got {checkpoint!r}")
            folder, self.definition = Path(checkpoint), self._definition(options)
            self._resume(folder)
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
                if folder and counters.done // every > done // every:
                    self._write(folder)
        if folder and counters.done > start:
            self._write(folder)
        return self.chains()

    def _definition(self, options: dict[str, Any]) -> dict[str, Json]:
        """Return what defines the run: options of the function, data, model and start."""
        model, batches = self.potential.model, self.sampling_batches
        constants = model.state_dict()  # parameters and buffers that are not sampled
        return {
            "version of pyro_bbb": __version__,
            "version of torch": str(torch.__version__),
            **options,
            "batch_size": batches.batch_size,
            **definition(model, "model"),
            **{f"model.{name}": in_words(value) for name, value in constants.items()},
            "init": in_words(options["init"]),
            "data": digest([*input_tensors(batches.x), batches.y])[:16],
            "initial positions": list(self.start.shape)
            if options["seed"] is None
            else digest([self.start])[:16],
        }

    def _resume(self, folder: Path) -> None:
        """Return to the state of the checkpoint in a folder, if there is one."""
        try:
            spec, tensors = read(folder, self.owner)
        except FileNotFoundError:
            return
        tidy(folder)
        require_run(folder, spec.get("run"), self.definition)
        with loading(folder):
            require_form(spec, {"run": dict[str, Any], "counters": type(self.counters)})
            self.restore(spec["counters"], tensors)

    def _write(self, folder: Path) -> None:
        """Replace the checkpoint by the present state, with that of random numbers."""
        tensors = {f"state.{name}": value for name, value in vars(self.state).items()}
        tensors |= {f"draws.{name}": torch.stack(v) for name, v in self.draws.items() if v}
        tensors |= {"order": self.batches.order, "random.cpu": torch.get_rng_state()}
        if self.start.is_cuda:
            tensors["random.cuda"] = torch.cuda.get_rng_state(self.start.device)
        spec = {"run": self.definition, "counters": dict(vars(self.counters))}
        write(folder, self.owner, spec, {name: cpu_copy(value) for name, value in tensors.items()})

    def restore(self, counters: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Return to the state of a checkpoint."""
        vars(self.counters).update(counters)
        device = self.start.device
        for name in vars(self.state):
            setattr(self.state, name, tensors[f"state.{name}"].to(device))
        for name in self.draws:
            self.draws[name] = list(tensors.get(f"draws.{name}", torch.empty(0)).to(device))
        self.batches.order = tensors["order"]
        torch.set_rng_state(tensors["random.cpu"])
        if "random.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random.cuda"], device)
