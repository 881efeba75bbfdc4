# SPDX-License-Identifier: Apache-2.0
"""Training steps without host synchronisation: their numbers stay on the device.

Pyro's objectives and our optimiser read every loss and the gradient's norm, to report them and to
stop where one is not finite. Here both are left in tensors, and a step that is not finite, like
every one after it, changes no parameter: fused Adam takes such a flag, as gradient scaling does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW

from pyro_bbb.training._ivon import NaturalGradient
from pyro_bbb.training._runners.flat_adam import FlatAdam
from pyro_bbb.training.optim import JointOptim


class UnsupportedOptimizerError(ValueError):
    """The optimiser cannot skip a step without the host."""


class SyncFreeOptim(JointOptim):
    """`JointOptim` that makes a step without reading a number; its steps are fused.

    ``row`` has the loss, ``kl``, ``log_guide``, ``nll`` and the gradient's norm of the latest step.
    ``failed`` is 1 once a loss or a gradient was not finite, and then no parameter moves.
    """

    def __init__(
        self,
        optim_constructor: Callable[..., torch.optim.Optimizer],
        optim_args: Mapping[str, Any],
        *,
        parameters: Mapping[str, Any],
        elbo: Any,
    ) -> None:
        self.lrs: list[Tensor] = []
        self.flat: FlatAdam | None = None
        super().__init__(optim_constructor, optim_args, parameters=parameters)
        if type(self.optimizer) not in (Adam, AdamW, NaturalGradient):
            raise UnsupportedOptimizerError(
                "cuda_graph=True needs Adam or AdamW, which can skip a step without the host, "
                f"got optimizer {type(self.optimizer).__name__}"
            )
        device = self.parameters[0].device
        self.elbo = elbo
        self.row = torch.zeros(5, dtype=torch.float64, device=device)
        self.failed = torch.zeros((), device=device, dtype=torch.float)
        self.optimizer.found_inf = self.failed  # type: ignore[union-attr]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all parameters, which fused kernels of a GPU read as single."""
        if not 0 <= lr < math.inf:
            raise ValueError(f"lr must be a finite number of at least 0, got {lr}")
        for each, rate in zip(self.lrs, self._lrs(lr), strict=True):
            each.fill_(rate)

    def _add_parameters(self, parameters: list[Any]) -> None:
        super()._add_parameters(parameters)
        groups = self.optimizer.param_groups if self.optimizer else []
        for group in groups[len(self.lrs) :]:
            device = group["params"][0].device
            precision = torch.float if device.type == "cuda" else torch.double
            self.lrs.append(torch.zeros((), device=device, dtype=precision))
            group.update(lr=self.lrs[-1], fused=True, capturable=True, foreach=False)

    def flatten(self) -> None:
        """Make further steps on flat vectors, up to `close`; one was made already."""
        if isinstance(self.optimizer, NaturalGradient):  # it has its own
            return
        self.flat = FlatAdam(self.optimizer)  # type: ignore[arg-type]
        self.flat.optimizer.found_inf = self.failed  # type: ignore[attr-defined]

    def close(self) -> None:
        """Give the parameters their own memory back."""
        super().close()
        if self.flat is not None:
            self.flat.close()
        self.flat = None

    def _step(self) -> None:
        (self.flat or self).optimizer.step()  # type: ignore[union-attr]

    def _gradients(self) -> list[Tensor]:
        return self.flat.gather() if self.flat is not None else super()._gradients()

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that a step may change, once one was made."""
        states = self.optimizer.state.values()  # type: ignore[union-attr]
        moments = [x for state in states for x in state.values() if isinstance(x, Tensor)]
        flat = self.flat.tensors if self.flat is not None else []
        return [*self.parameters, *moments, *flat, self.row, self.failed]

    def set_state(self, state_dict: dict[str, Any]) -> None:
        """Restores a state from `get_state`; the learning rate stays in its own tensor."""
        super().set_state(state_dict)
        for group, lr in zip(self.optimizer.param_groups, self.lrs, strict=True):  # type: ignore[union-attr]
            group["lr"] = lr

    def _checked(self, norm: Tensor, grads: list[Tensor]) -> Tensor:
        """The norm; notes the step's numbers, and whether it failed."""
        torch.cat([self.elbo.take(), norm.double().view(1)], out=self.row)
        nan_or_0 = (self.row[0] + self.row[4]) * 0  # 0 of finite numbers
        torch.logical_or(self.failed, nan_or_0, out=self.failed)
        return norm
