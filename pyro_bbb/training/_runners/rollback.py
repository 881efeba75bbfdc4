# SPDX-License-Identifier: Apache-2.0
"""Rollback of steps whose loss or gradient is not finite."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pyro
import torch
from torch import Tensor, nn

from pyro_bbb.training._runners.protocol import Parts, StepProgram, StepRunner
from pyro_bbb.training.objectives import NonFiniteError

_IN_A_ROW = 100  # steps skipped, after which training is over


class NonFiniteRollback:
    """A `StepRunner` around another one: a failed step leaves buffers and objective as they were.

    ``nonfinite`` is ``"raise"`` or ``"skip"``; the history has the numbers of skipped steps.
    """

    def __init__(self, runner: StepRunner, program: StepProgram, nonfinite: str) -> None:
        self.runner, self.program, self.nonfinite = runner, program, nonfinite
        self.optim: Any = runner.optim
        self.modules = [module for module in program.modules if isinstance(module, nn.Module)]
        self._buffers = list(chain(*(module.buffers() for module in self.modules)))
        self._first, self._in_a_row = True, 0

    def step(self, parts: Parts, lr: float) -> None:
        """Run one step; NonFiniteError where it is not to be skipped, or too many were."""
        saved = [(buffer, buffer.clone()) for buffer in self._buffers]
        try:
            self.runner.step(parts, lr)
        except NonFiniteError as error:
            self._undo(saved)
            self._count(error)
        else:
            if self._first:  # from now on only what a step does change, such as running averages
                self._buffers = [buffer for buffer, value in saved if not buffer.equal(value)]
            self._first, self._in_a_row = False, 0

    def flush(self) -> None:
        """Add to the history what the steps have not yet recorded."""
        self.runner.flush()

    @torch.no_grad()
    def _undo(self, saved: list[tuple[Tensor, Tensor]]) -> None:
        for buffer, value in saved:
            buffer.copy_(value)
        of_functions = pyro.get_param_store()._params.values()
        of_modules = (module.parameters() for module in self.modules)
        for parameter in chain(of_functions, *of_modules, getattr(self.optim, "parameters", ())):
            parameter.grad = None  # of the particles before
        self.program.elbo.particles.clear()

    def _count(self, error: NonFiniteError) -> None:
        self._in_a_row += 1
        if self.nonfinite == "raise":
            raise error
        if self._in_a_row > _IN_A_ROW:
            error.add_note(f"{_IN_A_ROW} steps before it were skipped in a row.")
            raise error
        self.program.history.skipped.append(error.step or 0)
