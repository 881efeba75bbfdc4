r"""Training steps: the gradients of a minibatch's parts, added up over parts and processes.

A step is of one minibatch in several parts, each with a draw of the weights of its own: the parts
that are taken one after the other, and those of other processes. Part $j$ of $J$ has the objective
$\pi\,\mathrm{KL}_j / J - \log p(D_j|w_j)$. Their sum holds every example once, and the KL once
as the mean of $J$ estimates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from pyro.infer import SVI
from torch import Tensor, nn

from pyro_bbb._utils.distributed import Processes
from pyro_bbb.training._interrupts import Interrupts
from pyro_bbb.training.history import History
from pyro_bbb.training.objectives import LossParts, NonFiniteError, RecordedELBO
from pyro_bbb.training.optim import JointOptim

Parts: TypeAlias = Sequence[tuple[Tensor, Tensor, float]]  # x, y, and the weight of the KL


def take_step(svi: SVI, elbo: RecordedELBO, history: History, parts: Parts, lr: float) -> None:
    """One step of a process alone, recorded.

    Args:
        svi: what makes it.
        elbo: its objective.
        history: what it is recorded in.
        parts: of its minibatch.
        lr: learning rate, where the optimiser has one for all parameters.

    Raises:
        NonFiniteError: the loss or a gradient is not finite; no parameter has moved.
    """
    if isinstance(svi.optim, JointOptim):
        svi.optim.set_lr(lr)
    try:
        *others, last = parts
        found = gradients(svi, elbo, others)
        svi.step(*last)
    except NonFiniteError as error:
        raise numbered(error, history) from None
    found.append(elbo.take_parts())
    history.steps.append(mean_parts(sums(found)), lr)


def gradients(svi: SVI, elbo: RecordedELBO, parts: Parts) -> list[LossParts]:
    """Adds the parts' gradients to the parameters'."""
    found = []
    for part in parts:
        svi.loss_and_grads(svi.model, svi.guide, *part)
        found.append(elbo.take_parts())
    return found


def sums(found: Iterable[LossParts]) -> list[float]:
    """The sums over several parts, and their number."""
    rows = [(*vars(each).values(), 1.0) for each in found]
    return [sum(column) for column in zip(*rows, strict=True)] if rows else [0.0] * 7


def mean_parts(row: Sequence[float]) -> LossParts:
    """Of these sums, what a step is: sums over its examples, and means over its draws."""
    loss, kl, log_prior, log_guide, nll, kl_weight, count = row
    return LossParts(loss, kl / count, log_prior / count, log_guide / count, nll, kl_weight)


def numbered(error: NonFiniteError, history: History) -> NonFiniteError:
    """The error with the number of its step and the history before it."""
    step = len(history.steps) + len(history.skipped) + 1
    failed = NonFiniteError(error.what, error.names, step)
    failed.history = history
    return failed


class JoinedOptim(JointOptim):
    """`JointOptim` that adds up the gradients of all processes before it makes a step.

    Args:
        optim_constructor: as for `JointOptim`.
        optim_args: as for `JointOptim`.
        parameters: as for `JointOptim`; the same in all processes.
        processes: those that take part.
        interrupts: agreed on in each step.

    Attributes:
        failed: why this process has no gradient for the step, if it has none.
    """

    def __init__(
        self,
        optim_constructor: Callable[..., torch.optim.Optimizer],
        optim_args: Mapping[str, Any],
        *,
        parameters: Mapping[str, nn.Parameter],
        processes: Processes,
        interrupts: Interrupts,
    ) -> None:
        super().__init__(optim_constructor, optim_args, parameters=parameters)
        self.processes, self.interrupts = processes, interrupts
        self.failed: NonFiniteError | None = None
        self._flat: Tensor | None = None  # memory for what goes between the processes

    @torch.no_grad()
    def _finish_gradients(self) -> None:
        self._add_up()
        super()._finish_gradients()

    def _add_up(self) -> None:
        """One sum of everything: the gradients, whose there are, who failed, and who is to stop."""
        parameters = self.parameters
        there = [float(p.grad is not None) for p in parameters]
        flags = [*there, float(self.failed is not None), float(self.interrupts.noted)]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        pieces = [g.flatten() for g in [*grads, grads[0].new_tensor(flags)]]
        flat = self._flat = torch.cat(pieces, out=self._flat)
        *sums, last = self.processes.all_reduce(flat).split([len(piece) for piece in pieces])
        *counts, failed, asked = last.tolist()
        self.interrupts.asked |= asked > 0
        if failed:
            raise self._first_failure()
        for parameter, total, count in zip(parameters, sums, counts, strict=True):
            parameter.grad = total.view_as(parameter).to(parameter) if count else None

    def _first_failure(self) -> NonFiniteError:
        """The same error in all processes."""
        failed, self.failed = self.failed, None
        mine = b"" if failed is None else json.dumps([failed.what, failed.names]).encode()
        what, names = json.loads(next(filter(None, self.processes.all_gather_bytes(mine))))
        return NonFiniteError(what, names)


class JoinedSteps:
    """Takes the steps of `fit` together with other processes, and records them when asked.

    Args:
        svi: with a `JoinedOptim`.
        elbo: the objective.
        history: to which `read` adds.
        modules: whose buffers are to stay the same in all processes.
    """

    def __init__(
        self, svi: SVI, elbo: RecordedELBO, history: History, modules: Iterable[nn.Module]
    ) -> None:
        self.svi, self.elbo, self.history = svi, elbo, history
        self.optim: JoinedOptim = svi.optim
        self.processes = self.optim.processes
        self._buffers = list(chain(*(module.buffers() for module in modules)))
        self._taken: list[tuple[list[float], float]] = []

    def take(self, parts: Parts, lr: float) -> None:
        """One step, of this process's parts of the minibatch; there may be none.

        Raises:
            NonFiniteError: the loss or a gradient is not finite, here or elsewhere.
        """
        self.optim.set_lr(lr)
        row = [0.0] * 7
        try:
            row = sums(gradients(self.svi, self.elbo, parts))
        except NonFiniteError as error:
            self.optim.failed = error
        try:
            self.optim(())
        except NonFiniteError as error:
            self.read()
            raise numbered(error, self.history) from None
        self._taken.append((row, lr))

    def read(self) -> None:
        """Adds the steps since the last call to the history; buffers become the first process's."""
        taken, self._taken = self._taken, []
        if taken:
            rows = torch.tensor([row for row, _ in taken], dtype=torch.float64)
            rows = self.processes.all_reduce(rows.to(self.processes.device))
            for row, (_, lr) in zip(rows.tolist(), taken, strict=True):
                self.history.steps.append(mean_parts(row), lr)
        self.processes.align(self._buffers)
