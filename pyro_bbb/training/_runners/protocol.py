# SPDX-License-Identifier: Apache-2.0
"""The protocol of step runners, and what a training step computes whichever of them runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from pyro.infer import SVI
from torch import Tensor

from pyro_bbb._utils.inputs import Rows
from pyro_bbb.training.history import History
from pyro_bbb.training.objectives import LossParts, NonFiniteError
from pyro_bbb.training.optim import JointOptim, Optimizer, make_optim

Parts: TypeAlias = Sequence[tuple[Rows, Tensor, float]]  # x, y, and the weight of the KL


class StepRunner(Protocol):
    """Runs the steps of `fit` and records them."""

    @property
    def optim(self) -> Any:
        """The optimiser that moves the parameters."""

    def step(self, parts: Parts, lr: float) -> None:
        """Run one step on the parts of a minibatch; no parameter moves on a NonFiniteError."""

    def flush(self) -> None:
        """Add to the history what steps since the last call have not yet recorded."""


@dataclass(frozen=True)
class StepProgram:
    """Objective, optimiser and record of the steps of one run."""

    model: Any  # a function of (x, y, kl_weight)
    guide: Any  # likewise
    elbo: Any  # a recorded ELBO, or IVON's
    modules: tuple[Any, Any]  # guide and model as the user gave them, whose parameters are trained
    optimizer: Optimizer | None  # None for the default
    lr: float  # at the start
    max_lr_of_locs: float | None  # of the default optimiser
    history: History
    scope: Callable[[], AbstractContextManager[None]]  # of each step

    def svi(self, joint: Callable[..., JointOptim] = JointOptim, elbo: Any = None) -> SVI:
        """Pyro's `SVI` with an optimiser made by ``joint``, and another objective if given."""
        optim = make_optim(self.modules, self.optimizer, self.lr, joint, self.max_lr_of_locs)
        return SVI(self.model, self.guide, optim, elbo or self.elbo)


def gradients(svi: SVI, elbo: Any, parts: Parts) -> list[LossParts]:
    r"""Add the parts' gradients to those of the parameters.

    Part $j$ of $J$ has a draw of the weights of its own, and the objective
    $\pi\,\mathrm{KL}_j / J - \log p(D_j|w_j)$: the sum over parts holds every example once, and
    the KL once as the mean of $J$ estimates.
    """
    found = []
    for part in parts:
        svi.loss_and_grads(svi.model, svi.guide, *part)
        found.append(elbo.take_parts())
    return found


def sums(found: Iterable[LossParts]) -> list[float]:
    """Sum the losses of several parts by column; the last column is their number."""
    rows = [(*vars(each).values(), 1.0) for each in found]
    return [sum(column) for column in zip(*rows, strict=True)] if rows else [0.0] * 7


def mean_parts(row: Sequence[float]) -> LossParts:
    """Make of such sums the record of a step: sums over examples, means over draws."""
    loss, kl, log_prior, log_guide, nll, kl_weight, count = row
    return LossParts(loss, kl / count, log_prior / count, log_guide / count, nll, kl_weight)


def numbered(error: NonFiniteError, history: History) -> NonFiniteError:
    """The error with the number of its step and the history before it."""
    step = len(history.steps) + len(history.skipped) + 1
    failed = NonFiniteError(error.what, error.names, step)
    failed.history = history
    return failed
