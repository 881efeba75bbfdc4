# SPDX-License-Identifier: Apache-2.0
r"""A training step: gradients of a minibatch's parts, the optimiser's move, the record of the loss.

Part $j$ of the $J$ parts of a minibatch has its own draw of the weights, and the objective
$\pi\,\mathrm{KL}_j / J - \log p(D_j|w_j)$: the sum over parts has every example once, and the KL
once, as the mean of $J$ estimates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import pyro
import torch
from pyro.infer import SVI
from torch import Tensor, nn

from pyro_bbb._utils.inputs import Rows
from pyro_bbb.elbo import LossParts, NonFiniteError
from pyro_bbb.training.history import History
from pyro_bbb.training.optim import JointOptim, Optimizer, make_optim

Parts: TypeAlias = Sequence[tuple[Rows, Tensor, float]]  # x, y, and the weight of the KL
_MOST_SKIPPED = 100  # steps skipped in a row, after which training ends


@dataclass(frozen=True)
class StepProgram:
    """Objective, optimiser and record of the steps of one run."""

    model: Any  # a function of (x, y, kl_weight)
    guide: Any  # a function of the same
    elbo: Any  # a recorded ELBO, or IVON's
    modules: tuple[Any, Any]  # guide and model, whose parameters are trained
    optimizer: Optimizer | None  # None for the default
    lr: float  # at the start
    max_lr_of_locs: float | None  # of the default optimiser
    history: History
    nonfinite: str  # "raise", or "skip"
    scope: Callable[[], AbstractContextManager[None]]  # around each step

    def svi(self, joint: Callable[..., JointOptim] = JointOptim, elbo: Any = None) -> SVI:
        """Return Pyro's `SVI` with an optimiser made by ``joint``, perhaps of another objective."""
        optim = make_optim(self.modules, self.optimizer, self.lr, joint, self.max_lr_of_locs)
        return SVI(self.model, self.guide, optim, elbo or self.elbo)


class StepRunner(ABC):
    """Runs and records the steps of `fit`; one that is not finite changes nothing.

    With ``nonfinite="skip"`` the history has the numbers of such steps.
    """

    def __init__(self, program: StepProgram, svi: SVI) -> None:
        self.program, self.svi = program, svi
        self.optim: Any = svi.optim
        self.modules = [module for module in program.modules if isinstance(module, nn.Module)]
        self.buffers = list(chain(*(module.buffers() for module in self.modules)))
        self._changing, self._first, self._in_a_row = self.buffers, True, 0

    @abstractmethod
    def run(self, parts: Parts, lr: float) -> None:
        """Run one step on the parts of a minibatch; no parameter moves on a NonFiniteError."""

    def step(self, parts: Parts, lr: float) -> None:
        """Run one step; raise NonFiniteError if a failed one is not skipped, or too many are."""
        saved = [(buffer, buffer.clone()) for buffer in self._changing]
        try:
            self.run(parts, lr)
        except NonFiniteError as error:
            self._undo(saved)
            self._in_a_row += 1
            if self._in_a_row > _MOST_SKIPPED:
                error.add_note(f"{_MOST_SKIPPED} steps before it were skipped in a row.")
            if self.program.nonfinite == "raise" or self._in_a_row > _MOST_SKIPPED:
                raise
            self.program.history.skipped.append(error.step or 0)
        else:
            if self._first:  # from now on only what a step does change, such as running averages
                self._changing = [buffer for buffer, value in saved if not buffer.equal(value)]
            self._first, self._in_a_row = False, 0

    @torch.no_grad()
    def _undo(self, saved: list[tuple[Tensor, Tensor]]) -> None:
        for buffer, value in saved:
            buffer.copy_(value)
        of_functions = pyro.get_param_store()._params.values()
        of_modules = (module.parameters() for module in self.modules)
        for parameter in chain(of_functions, *of_modules, getattr(self.optim, "parameters", ())):
            parameter.grad = None  # of the particles before
        self.program.elbo.particles.clear()

    def flush(self) -> None:
        """Write what the optimiser keeps, and record the steps that are not recorded yet."""
        if isinstance(self.optim, JointOptim):
            self.optim.flush()


class EagerRunner(StepRunner):
    """Runs `SVI.step`, operation by operation."""

    def __init__(self, program: StepProgram) -> None:
        super().__init__(program, program.svi())

    def run(self, parts: Parts, lr: float) -> None:
        """Run one step; a `PyroOptim` keeps its own learning rates."""
        elbo, history = self.program.elbo, self.program.history
        if isinstance(self.optim, JointOptim):
            self.optim.set_lr(lr)
        try:
            with self.program.scope():
                *first, last = parts
                losses = gradients(self.svi, elbo, first)
                self.svi.step(*last)
        except NonFiniteError as error:
            raise numbered(error, history) from None
        losses.append(elbo.take_parts())
        history.steps.append(mean_parts(sums(losses)), lr)


def gradients(svi: SVI, elbo: Any, parts: Parts) -> list[LossParts]:
    """Add the gradients of the parts of a minibatch to the parameters', and return their losses."""
    losses = []
    for batch in parts:
        svi.loss_and_grads(svi.model, svi.guide, *batch)
        losses.append(elbo.take_parts())
    return losses


def sums(losses: Iterable[LossParts]) -> list[float]:
    """Sum the losses of several parts by column; the last column is their number."""
    rows = [(*vars(loss).values(), 1.0) for loss in losses]
    return [sum(column) for column in zip(*rows, strict=True)] if rows else [0.0] * 7


def mean_parts(row: Sequence[float]) -> LossParts:
    """Return a step's record from `sums`: loss and nll are sums over parts, the others means."""
    loss, kl, log_prior, log_guide, nll, kl_weight, number = row
    return LossParts(loss, kl / number, log_prior / number, log_guide / number, nll, kl_weight)


def numbered(error: NonFiniteError, history: History) -> NonFiniteError:
    """Return the error with the number of its step and the history before it."""
    step = len(history.steps) + len(history.skipped) + 1
    failed = NonFiniteError(error.what, error.names, step)
    failed.history = history
    return failed
