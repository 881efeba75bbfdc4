"""Training steps of which nothing stays where the loss or a gradient is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import pyro
import torch
from torch import Tensor, nn

from pyro_bbb.training.history import History
from pyro_bbb.training.objectives import NonFiniteError, RecordedELBO

_IN_A_ROW = 100  # steps skipped, after which training is over


class NonFiniteRollback:
    """Takes steps; one that is not finite leaves parameters, buffers and objective as they were.

    Args:
        take: takes a step, and raises `NonFiniteError` before it moves a parameter.
        elbo: the objective of the steps.
        modules: those whose parameters get gradients, and whose buffers a step may change.
        history: where skipped steps are counted.
        nonfinite: ``"raise"`` or ``"skip"``.
    """

    def __init__(
        self,
        take: Callable[..., None],
        elbo: RecordedELBO,
        modules: Iterable[Any],
        history: History,
        nonfinite: str,
    ) -> None:
        self.take, self.elbo, self.history, self.nonfinite = take, elbo, history, nonfinite
        self.modules = [module for module in modules if isinstance(module, nn.Module)]
        self._buffers = list(chain(*(module.buffers() for module in self.modules)))
        self._first, self._in_a_row = True, 0

    def __call__(self, args: tuple[Any, ...], lr: float) -> None:
        """One step on ``(x, y, kl_weight)``.

        Raises:
            NonFiniteError: it is not finite and is not to be skipped, or too many were in a row.
        """
        unpruned = [(buffer, buffer.clone()) for buffer in self._buffers]
        try:
            self.take(args, lr)
        except NonFiniteError as error:
            self._undo(unpruned)
            self._count(error)
        else:
            if self._first:  # from now on only what a step does change, such as running averages
                self._buffers = [buffer for buffer, value in unpruned if not buffer.equal(value)]
            self._first, self._in_a_row = False, 0

    @torch.no_grad()
    def _undo(self, unpruned: list[tuple[Tensor, Tensor]]) -> None:
        for buffer, value in unpruned:
            buffer.copy_(value)
        of_functions = pyro.get_param_store()._params.values()
        for parameter in chain(of_functions, *(module.parameters() for module in self.modules)):
            parameter.grad = None  # of the particles before
        self.elbo.particles.clear()

    def _count(self, error: NonFiniteError) -> None:
        self._in_a_row += 1
        if self.nonfinite == "raise":
            raise error
        if self._in_a_row > _IN_A_ROW:
            error.add_note(f"{_IN_A_ROW} steps before it were skipped in a row.")
            raise error
        self.history.skipped.append(error.step or 0)
