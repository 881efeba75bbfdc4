# SPDX-License-Identifier: Apache-2.0
"""Steps of a single process, run operation by operation and recorded one by one."""

from __future__ import annotations

from typing import Any

from pyro_bbb.training._runners.protocol import (
    Parts,
    StepProgram,
    gradients,
    mean_parts,
    numbered,
    sums,
)
from pyro_bbb.training.objectives import NonFiniteError
from pyro_bbb.training.optim import JointOptim


class EagerRunner:
    """A `StepRunner` by `SVI.step`."""

    def __init__(self, program: StepProgram) -> None:
        self.program, self.svi = program, program.svi()
        self.optim: Any = self.svi.optim

    def step(self, parts: Parts, lr: float) -> None:
        """Run one step; the learning rate is for an optimiser of all parameters."""
        elbo, history = self.program.elbo, self.program.history
        if isinstance(self.optim, JointOptim):
            self.optim.set_lr(lr)
        try:
            with self.program.scope():
                *others, last = parts
                found = gradients(self.svi, elbo, others)
                self.svi.step(*last)
        except NonFiniteError as error:
            raise numbered(error, history) from None
        found.append(elbo.take_parts())
        history.steps.append(mean_parts(sums(found)), lr)

    def flush(self) -> None:
        """Write what the optimiser keeps; each step is recorded at once."""
        if isinstance(self.optim, JointOptim):
            self.optim.flush()
