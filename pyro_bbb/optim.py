"""One torch optimiser for all parameters, behind Pyro's `SVI`.

Pyro makes an optimiser per parameter tensor, which rules out fused and foreach steps and global
clipping. `JointOptim` is a `PyroOptim` all the same, so `SVI` stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from pyro.optim import PyroOptim
from torch import Tensor, nn

from pyro_bbb.objectives import NonFiniteError

Optimizer: TypeAlias = Callable[..., torch.optim.Optimizer] | PyroOptim


class JointOptim(PyroOptim):
    """A `PyroOptim` that steps all parameters with a single torch optimiser.

    Args:
        optim_constructor: makes the optimiser from parameters and ``optim_args``, such as
            ``torch.optim.Adam``.
        optim_args: its keyword arguments, such as ``{"lr": 1e-3, "fused": True}``.
        clip_args: ``{"clip_norm": c}`` bounds the norm of the whole gradient.
        parameters: the parameters by name, in the order that the optimiser is to hold them;
            others are added when SVI first meets them.

    Attributes:
        optimizer: the torch optimiser, for schedulers and inspection; ``None`` before the first
            parameter is known.

    Raises:
        ValueError: ``clip_args`` holds anything else.
    """

    def __init__(
        self,
        optim_constructor: Callable[..., torch.optim.Optimizer],
        optim_args: Mapping[str, Any],
        clip_args: Mapping[str, float] | None = None,
        *,
        parameters: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        unknown = set(clip_args or {}) - {"clip_norm"}
        if unknown:
            raise ValueError(f"clip_args may hold clip_norm only, got {sorted(unknown)}")
        super().__init__(optim_constructor, dict(optim_args), dict(clip_args or {}))
        self.optimizer: torch.optim.Optimizer | None = None
        self._names: dict[Tensor, str] = {}
        if parameters:
            self._names = {parameter: name for name, parameter in parameters.items()}
            self._hold(list(parameters.values()))

    def __call__(self, params: Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
        """One step of all parameters that have a gradient; their gradients are dropped after it.

        Args:
            params: the unconstrained parameters that SVI found.
            *args: as for `PyroOptim`; unused.
            **kwargs: as for `PyroOptim`; unused.

        Raises:
            NonFiniteError: a gradient is infinite or not a number; no parameter has moved.
        """
        held = set(self.parameters)
        self._hold([parameter for parameter in params if parameter not in held])
        if self.optimizer is not None:
            try:
                self._finish_gradients()
                self.optimizer.step()
            finally:
                self.optimizer.zero_grad(set_to_none=True)

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of all parameters.

        Raises:
            ValueError: the rate is negative, infinite or NaN.
        """
        if not 0 <= lr < math.inf:
            raise ValueError(f"lr must be a finite number of at least 0, got {lr}")
        for group in self.optimizer.param_groups if self.optimizer else ():
            group["lr"] = lr

    def get_state(self) -> dict[str, Any]:
        """The optimiser's state, for `set_state`."""
        return self.optimizer.state_dict() if self.optimizer else {}

    def set_state(self, state_dict: dict[str, Any]) -> None:
        """Restores a state from `get_state`; the parameters must be known already.

        Raises:
            RuntimeError: no parameter is known yet.
        """
        if self.optimizer is None:
            raise RuntimeError("give JointOptim its parameters before its state")
        self.optimizer.load_state_dict(state_dict)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that it holds, in order."""
        groups = self.optimizer.param_groups if self.optimizer else ()
        return [parameter for group in groups for parameter in group["params"]]

    def _hold(self, parameters: list[Any]) -> None:
        if parameters and self.optimizer is None:
            self.optimizer = self.pt_optim_constructor(parameters, **self.pt_optim_args)  # type: ignore[operator,arg-type]
        elif parameters and self.optimizer is not None:
            self.optimizer.add_param_group({"params": parameters})

    def _finish_gradients(self) -> None:
        """Where the gradients of a step are final: checks their norm, and bounds it if asked."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        self._check(norm)
        clip_norm = self.pt_clip_args.get("clip_norm")  # type: ignore[union-attr]
        if clip_norm is not None:
            torch._foreach_mul_(grads, (clip_norm / norm.clamp(min=clip_norm)))

    def _check(self, norm: Tensor) -> None:
        """Raises NonFiniteError if the norm of the gradient is not finite."""
        if not norm.isfinite():
            bad = [p for p in self.parameters if p.grad is not None and not p.grad.isfinite().all()]
            raise NonFiniteError("gradient", [self._names.get(p, "a parameter") for p in bad])


def make_optim(
    modules: Iterable[Any],
    optimizer: Optimizer | None,
    lr: float,
    joint: Callable[..., JointOptim] = JointOptim,
) -> PyroOptim:
    """What `SVI` is to step the parameters of some modules with.

    Args:
        modules: their parameters that require a gradient are held; others than modules have none.
        optimizer: a torch optimiser class or function of ``(parameters, lr=...)``; by default fused
            Adam. A `PyroOptim` is taken as it is.
        lr: learning rate at the start.
        joint: makes the `JointOptim`.

    Raises:
        TypeError: ``optimizer`` is of another kind.
    """
    named: dict[nn.Parameter, str] = {}
    for module in modules:
        if isinstance(module, nn.Module):
            for name, parameter in module.named_parameters():
                parameter.grad = None  # one left over from elsewhere is not of this objective
                if parameter.requires_grad:
                    named.setdefault(parameter, name)
    if isinstance(optimizer, PyroOptim):
        return optimizer
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer or torch.optim.Adam):
        raise TypeError(
            "optimizer must be a torch optimiser class, a function (parameters, lr=...) -> "
            f"optimiser, or a PyroOptim, got {type(optimizer).__name__}"
        )
    parameters = {name: parameter for parameter, name in named.items()}
    constructor = optimizer or partial(torch.optim.Adam, fused=True)
    return joint(constructor, {"lr": lr}, parameters=parameters)
