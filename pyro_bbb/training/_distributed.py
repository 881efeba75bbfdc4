# SPDX-License-Identifier: Apache-2.0
"""Steps of several processes together: their gradients are summed before the optimiser steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyro_bbb._utils.distributed import Processes
from pyro_bbb._utils.interrupts import Interrupts
from pyro_bbb.elbo import NonFiniteError
from pyro_bbb.training._step import (
    Parts,
    StepProgram,
    StepRunner,
    gradients,
    mean_parts,
    numbered,
    sums,
)
from pyro_bbb.training.optim import JointOptim


class DistributedOptim(JointOptim):
    """`JointOptim` that sums the gradients of all processes before it makes a step.

    All processes have the same parameters. They agree on interrupts in each step.
    """

    def __init__(
        self,
        optim_constructor: Callable[..., torch.optim.Optimizer],
        optim_args: Mapping[str, Any],
        *,
        parameters: Mapping[str, nn.Parameter],
        group: Processes,
        interrupts: Interrupts,
    ) -> None:
        super().__init__(optim_constructor, optim_args, parameters=parameters)
        self.group, self.interrupts = group, interrupts
        self.failed: NonFiniteError | None = None  # why this process has no gradient for the step
        self._flat: Tensor | None = None  # buffer of the all-reduce

    @torch.no_grad()
    def _finish_gradients(self) -> None:
        self._all_reduce()
        super()._finish_gradients()

    def _all_reduce(self) -> None:
        """One sum of everything: gradients, which of them exist, failures, interrupts."""
        parameters = self.parameters
        there = [float(p.grad is not None) for p in parameters]
        flags = [*there, float(self.failed is not None), float(self.interrupts.noted)]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        pieces = [g.flatten() for g in [*grads, grads[0].new_tensor(flags)]]
        flat = self._flat = torch.cat(pieces, out=self._flat)
        *totals, last = self.group.all_reduce(flat).split([len(piece) for piece in pieces])
        *counts, failed, interrupted = last.tolist()
        self.interrupts.stop |= interrupted > 0
        if failed:
            raise self._first_failure()
        for parameter, total, number in zip(parameters, totals, counts, strict=True):
            parameter.grad = total.view_as(parameter).to(parameter) if number else None

    def _first_failure(self) -> NonFiniteError:
        """Return the error of the first process that failed."""
        failed, self.failed = self.failed, None
        mine = None if failed is None else (failed.what, failed.names)
        what, names = next(filter(None, self.group.gather(mine)))
        return NonFiniteError(what, names)


class DistributedRunner(StepRunner):
    """Runs the steps of one among several processes; `flush` records the steps of all."""

    def __init__(self, program: StepProgram, group: Processes, interrupts: Interrupts) -> None:
        optim = partial(DistributedOptim, group=group, interrupts=interrupts)
        super().__init__(program, program.svi(optim))
        self.group = group
        self._unrecorded: list[tuple[list[float], float]] = []

    def run(self, parts: Parts, lr: float) -> None:
        """Run one step on this process's parts of the minibatch; there may be none."""
        self.optim.set_lr(lr)
        row = [0.0] * 7
        with self.program.scope():
            try:
                row = sums(gradients(self.svi, self.program.elbo, parts))
            except NonFiniteError as error:
                self.optim.failed = error
            try:
                self.optim(())
            except NonFiniteError as error:
                self.flush()
                raise numbered(error, self.program.history) from None
        self._unrecorded.append((row, lr))

    def flush(self) -> None:
        """Record the steps since the last call; buffers become those of the first process."""
        super().flush()
        unrecorded, self._unrecorded = self._unrecorded, []
        if unrecorded:
            rows = torch.tensor([row for row, _ in unrecorded], dtype=torch.float64)
            rows = self.group.all_reduce(rows.to(self.group.device))
            for row, (_, lr) in zip(rows.tolist(), unrecorded, strict=True):
                self.program.history.steps.append(mean_parts(row), lr)
        self.group.align(self.buffers)
