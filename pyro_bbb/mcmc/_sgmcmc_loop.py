# SPDX-License-Identifier: Apache-2.0
"""The loop of `run_sgmcmc` over steps, from wherever a run has got to, and its checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_bbb._utils.files import loading, require_form
from pyro_bbb._utils.progress import progress_bar
from pyro_bbb.mcmc._langevin import ChainState, Cycles, Langevin
from pyro_bbb.mcmc._minibatch_gradient import MinibatchGradient, Shuffled
from pyro_bbb.persistence.archive import Json, read, require_run, tidy, write
from pyro_bbb.persistence.state_dict import cpu_copy

SAVED_FORM = {"kind": str, "run": dict[str, Any], "done": int, "seconds": float}


class DivergedError(ArithmeticError):
    """A chain came where its energy or gradient is infinite or not a number.

    Args:
        chain: its number, from 0.
        step: number of the step, from 1.

    Attributes:
        chains: `Chains` of the samples taken before; ``None`` where there are none.
    """

    def __init__(self, chain: int, step: int) -> None:
        self.chain, self.step = chain, step
        self.chains: Any = None
        super().__init__(
            f"energy or gradient of chain {chain} is not finite at step {step}; the samples before "
            "are in this error's .chains. Try standardised data, or a lower lr of run_sgmcmc."
        )


@dataclass
class Samples:
    """Samples taken so far."""

    z: list[Tensor]  # [chains, d] each
    log_density: list[Tensor]  # [chains] each


class Run:
    """A run of all chains.

    Args:
        langevin: the sampler.
        cycles: which steps warm up, and which samples are taken.
        gradient: energies and gradients given a minibatch.
        batches: the minibatches.
        z: initial positions, ``[chains, d]``.
        lr: learning rate for the mean loss of an example.
        temperature: of the posterior.
    """

    def __init__(
        self,
        langevin: Langevin,
        cycles: Cycles,
        gradient: MinibatchGradient,
        batches: Shuffled,
        z: Tensor,
        lr: float,
        temperature: float,
    ) -> None:
        self.langevin, self.cycles, self.gradient, self.batches = (
            langevin,
            cycles,
            gradient,
            batches,
        )
        self.lr, self.temperature = lr, temperature
        self.state = langevin.begin(z)
        self.samples = Samples([], [])
        self.done, self.seconds = 0, 0.0

    def finish(self, progress: bool, checkpoint: SavedRun | None) -> None:
        """Take all steps that are left, and write a checkpoint where one is due."""
        total, before = self.cycles.steps, self.seconds
        began = time.perf_counter()
        bar = progress_bar(total, initial=self.done, unit="step", shown=progress)
        data = iter(self.batches)
        with bar:
            while self.done < total:
                self._step(*next(data))
                self.seconds = before + time.perf_counter() - began
                bar.update()
                if checkpoint:
                    checkpoint.maybe_write(self)

    def _step(self, x: Any, y: Tensor) -> None:
        step, cycles, state = self.done, self.cycles, self.state
        energy, gradient = self.gradient(state.z, x, y)
        self._require_finite(energy, gradient)
        if cycles.takes_sample(step):
            self.samples.z.append(state.z.clone())
            self.samples.log_density.append(-energy)
        if cycles.warms_up(step):
            self.langevin.adapt(state, gradient, first=step == 0)
        temperature = 0.0 if cycles.is_quiet(step) else self.temperature
        self.langevin.step(state, gradient, self.lr * cycles.lr_factor(step), temperature)
        self.done += 1

    def _require_finite(self, energy: Tensor, gradient: Tensor) -> None:
        if (energy + gradient.sum(1)).isfinite().all():
            return
        wrong = ~(energy.isfinite() & gradient.isfinite().all(1))
        if wrong.any():  # finite numbers can have a sum that is not
            raise DivergedError(int(wrong.nonzero()[0]), self.done + 1)

    def save(self) -> tuple[dict[str, Json], dict[str, Tensor]]:
        """All that changes, as a description and tensors."""
        tensors = {name: cpu_copy(value) for name, value in vars(self.state).items()}
        tensors |= self.batches.random_state(self.state.z)
        if self.samples.z:
            tensors["samples.z"] = cpu_copy(torch.stack(self.samples.z))
            tensors["samples.log_density"] = cpu_copy(torch.stack(self.samples.log_density))
        return {"done": self.done, "seconds": self.seconds}, tensors

    def restore(self, spec: Mapping[str, Json], tensors: Mapping[str, Tensor]) -> None:
        """Go back to such a state."""
        z = self.state.z
        self.done, self.seconds = spec["done"], spec["seconds"]
        self.state = ChainState(*(tensors[name].to(z.device) for name in vars(self.state)))
        if "samples.z" in tensors:
            found = (tensors[f"samples.{name}"].to(z.device) for name in vars(self.samples))
            self.samples = Samples(*map(list, found))
        self.batches.restore_random_state(tensors)


@dataclass(frozen=True)
class SavedRun:
    """The checkpoint of one run, in a folder that is complete at every moment."""

    folder: Path
    every: int  # steps from one checkpoint to the next
    definition: dict[str, Json]
    owner: str  # the function
    form: dict[str, Any]  # of the description

    def resume(self, run: Any) -> None:
        """Go on from the checkpoint, if there is one.

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
            require_form(spec, self.form)
            run.restore(spec, tensors)

    def maybe_write(self, run: Run) -> None:
        """Write a checkpoint where one is due."""
        if run.done % self.every == 0 or run.done == run.cycles.steps:
            self.write(run)

    def write(self, run: Any) -> None:
        """Write a checkpoint."""
        spec, tensors = run.save()
        write(self.folder, {"kind": self.owner, "run": self.definition, **spec}, tensors)
