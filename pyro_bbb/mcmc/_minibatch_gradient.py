# SPDX-License-Identifier: Apache-2.0
"""The potential energy given a minibatch, and its gradient, for several chains in one pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from pyro_bbb._recorder import record
from pyro_bbb._utils.inputs import Rows, input_tensors, with_tensors
from pyro_bbb.mcmc._potential import Potential


class MinibatchGradient:
    """Energies and gradients of chains at their positions, given a minibatch.

    The operations are recorded for a batch's shapes. Where they cannot be batched over chains, the
    chains run one after the other.

    Args:
        potential: the potential of the model.
        z: positions of finite energy, ``[chains, d]``.
        batch: a minibatch of the size of all others.
    """

    def __init__(self, potential: Potential, z: Tensor, batch: tuple[Rows, Tensor]) -> None:
        self._potential, self._inputs = potential, batch[0]
        self._batched = len(z) > 1 and self._can_be_batched(z, *batch)
        self._run = record(self._by_model, z, batch[1], *input_tensors(batch[0]))

    def __call__(self, z: Tensor, x: Rows, y: Tensor) -> tuple[Tensor, Tensor]:
        """Energies in nats, ``[chains]``, and their gradients, ``[chains, d]``."""
        return self._run(z, y, *input_tensors(x))

    def _by_model(self, z: Tensor, y: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            energies = self._energies(z, with_tensors(self._inputs, inputs), y)
            (gradient,) = torch.autograd.grad(energies.sum(), z)
        return energies.detach(), gradient

    def _energies(self, z: Tensor, x: Rows, y: Tensor) -> Tensor:
        if self._batched:
            return torch.vmap(lambda one: self._potential.at(one, x, y))(z)
        return torch.stack([self._potential.at(one, x, y) for one in z])

    def _can_be_batched(self, z: Tensor, x: Rows, y: Tensor) -> bool:
        self._batched = True
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)  # of what torch batches badly
                self._by_model(z, y, *input_tensors(x))
        except (RuntimeError, UserWarning):
            return False
        return True


class Shuffled:
    """Minibatches of equal size without end, in a new random order for each pass.

    Of a pass, what is left over after the last full batch is left out.
    """

    def __init__(self, x: Rows, y: Tensor, batch_size: int) -> None:
        self.x, self.y, self.batch_size = x, y, min(batch_size, len(y))
        self.order = torch.empty(0, dtype=torch.long)  # rows still to come

    def first(self) -> tuple[Rows, Tensor]:
        """The first rows, as many as in a minibatch."""
        return self.x[: self.batch_size], self.y[: self.batch_size]

    def random_state(self, z: Tensor) -> dict[str, Tensor]:
        """Return what later minibatches and draws on the device of ``z`` depend on."""
        state = {"order": self.order.clone(), "random.cpu": torch.get_rng_state()}
        if z.is_cuda:
            state["random.cuda"] = torch.cuda.get_rng_state(z.device)
        return state

    def restore_random_state(self, state: Mapping[str, Tensor]) -> None:
        """Go back to it."""
        self.order = state["order"]
        torch.set_rng_state(state["random.cpu"])
        if "random.cuda" in state:
            torch.cuda.set_rng_state(state["random.cuda"], self.y.device)

    def __iter__(self) -> Iterator[tuple[Rows, Tensor]]:
        while True:
            if self.batch_size == len(self.y):
                yield self.x, self.y
                continue
            if len(self.order) < self.batch_size:
                self.order = torch.randperm(len(self.y))
            rows, self.order = self.order.tensor_split([self.batch_size])
            rows = rows.to(self.y.device)
            yield self.x.index_select(0, rows), self.y.index_select(0, rows)
