# SPDX-License-Identifier: Apache-2.0
"""One torch optimiser for all parameters, behind Pyro's `SVI`.

Pyro makes an optimiser per parameter tensor, which rules out fused and foreach steps and global
clipping. `JointOptim` is a `PyroOptim` all the same, so `SVI` stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from numbers import Real
from typing import Any, TypeAlias

import torch
from pyro.optim import PyroOptim
from torch import Tensor, nn

from pyro_bbb._utils.validation import function, kind, positive
from pyro_bbb.elbo import NonFiniteError
from pyro_bbb.training._ivon import IVON as IVON
from pyro_bbb.training._ivon import NaturalGradient

Optimizer: TypeAlias = Callable[..., torch.optim.Optimizer] | PyroOptim | IVON | str


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
        frozen: parameters that it leaves alone, though SVI passes them.

    Raises:
        ValueError: ``clip_args`` holds anything else, or no positive number.
        TypeError: an argument is of another kind.
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
        if "clip_norm" in (clip_args or {}):
            positive("clip_norm", (clip_args or {})["clip_norm"])
        function("optim_constructor", optim_constructor, "(parameters, **optim_args)")
        kind("optim_args", optim_args, Mapping)
        super().__init__(optim_constructor, dict(optim_args), dict(clip_args or {}))
        self.optimizer: torch.optim.Optimizer | None = None
        self._names: dict[Tensor, str] = {}
        self._removed: list[tuple[Tensor, Tensor]] = []
        self.frozen: Set[Tensor] = frozenset()
        if parameters:
            self._names = {parameter: name for name, parameter in parameters.items()}
            self._add_parameters(list(parameters.values()))

    def __call__(self, params: Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
        """Step all parameters that have a gradient; their gradients are dropped after it.

        Entries of minus infinity, as pruning leaves in the guide's ``rho``, are 0 for the
        optimiser and stay what they are: weight decay of an infinity would be NaN.

        Raises:
            NonFiniteError: a gradient is infinite or not a number; no parameter has moved.
        """
        for parameter in self.frozen:
            parameter.grad = None
        known = set(self.parameters)
        self._add_parameters([p for p in params if p not in known and p not in self.frozen])
        if self.optimizer is None:
            return
        try:
            self._finish_gradients()
            self._fill_removed(0.0)
            try:
                self._step()
            finally:
                self._fill_removed(-math.inf)
        finally:
            self.optimizer.zero_grad(set_to_none=True)

    def flush(self) -> None:
        """Have the optimiser write to the parameters what it keeps elsewhere, as `IVON` does."""
        if isinstance(self.optimizer, NaturalGradient):
            self.optimizer.posterior.write()

    def close(self) -> None:
        """End the training; the optimiser makes no further step."""
        if isinstance(self.optimizer, NaturalGradient):
            self.optimizer.posterior.close()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all parameters, of each group at most its ``max_lr``.

        Raises:
            ValueError: the rate is negative, infinite or not a number.
        """
        if not isinstance(lr, Real) or not 0 <= lr < math.inf:
            raise ValueError(f"lr must be a finite number of at least 0, got {lr!r}")
        groups = self.optimizer.param_groups if self.optimizer else ()
        for group, rate in zip(groups, self._lrs(lr), strict=True):
            group["lr"] = rate

    def get_state(self) -> dict[str, Any]:
        """Return the optimiser's state, for `set_state`."""
        return self.optimizer.state_dict() if self.optimizer else {}

    def set_state(self, state_dict: dict[str, Any]) -> None:
        """Restore a state from `get_state`; the parameters must be known already.

        Raises:
            RuntimeError: no parameter is known yet.
            TypeError: the state is not a dict.
        """
        kind("state_dict", state_dict, Mapping)
        if self.optimizer is None:
            raise RuntimeError("give JointOptim its parameters before its state")
        self.optimizer.load_state_dict(state_dict)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that it holds, in order."""
        groups = self.optimizer.param_groups if self.optimizer else ()
        return [parameter for group in groups for parameter in group["params"]]

    def _lrs(self, lr: float) -> list[float]:
        """Return the learning rate of each group of parameters, at most its ``max_lr``."""
        groups = self.optimizer.param_groups if self.optimizer else ()
        return [min(lr, group.get("max_lr", math.inf)) for group in groups]

    def _add_parameters(self, parameters: list[Any]) -> None:
        if parameters and self.optimizer is None:
            self.optimizer = self.pt_optim_constructor(parameters, **self.pt_optim_args)  # type: ignore[operator,arg-type]
        elif parameters and self.optimizer is not None:
            self.optimizer.add_param_group({"params": parameters})
        masks = ((parameter, parameter.detach() == -math.inf) for parameter in parameters)
        self._removed += [(parameter, mask) for parameter, mask in masks if mask.any()]

    @torch.no_grad()
    def _fill_removed(self, value: float) -> None:
        for parameter, mask in self._removed:
            parameter.masked_fill_(mask, value)

    def _step(self) -> None:
        self.optimizer.step()  # type: ignore[union-attr]

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def _finish_gradients(self) -> None:
        """Check the norm of the final gradients of a step, and clip it if wanted."""
        grads = self._gradients()
        # a single gradient by one operation in place of four
        single = len(grads) == 1
        total_norm = torch.nn.utils.get_total_norm
        norm = torch.linalg.vector_norm(grads[0]) if single else total_norm(grads)
        norm = self._checked(norm, grads)
        clip_norm = self.pt_clip_args.get("clip_norm")  # type: ignore[union-attr]
        if clip_norm is not None:
            torch._foreach_mul_(grads, (clip_norm / norm.clamp(min=clip_norm)))

    def _checked(self, norm: Tensor, grads: list[Tensor]) -> Tensor:
        """Return the gradient's norm; NonFiniteError, with the parameters' names, if infinite."""
        if not norm.isfinite():
            self.require_finite()
            # squares of a huge gradient overflow: m |g / m|, m being its largest entry
            flat = torch.cat([grad.detach().flatten().double() for grad in grads])
            largest = flat.abs().max()
            norm = largest * torch.linalg.vector_norm(flat / largest)
        return norm

    def require_finite(self) -> None:
        """NonFiniteError, with the parameters' names, where a gradient is not finite."""
        bad = [p for p in self.parameters if p.grad is not None and not p.grad.isfinite().all()]
        if bad:
            raise NonFiniteError("gradient", [self._names.get(p, "a parameter") for p in bad])


def make_optim(
    modules: Iterable[Any],
    optimizer: Optimizer | None,
    lr: float,
    joint: Callable[..., JointOptim] = JointOptim,
    max_lr_of_locs: float | None = None,
) -> PyroOptim:
    """Return the optimiser of `SVI` for those parameters of modules that require a gradient.

    The default is fused Adam, with at most ``max_lr_of_locs`` for the guide's means. A `PyroOptim`
    is taken as it is; functions among the modules have no parameters.
    """
    named: dict[nn.Parameter, str] = {}
    for module in modules:
        for name, parameter in module.named_parameters() if isinstance(module, nn.Module) else ():
            parameter.grad = None  # one left over from elsewhere is not of this objective
            if parameter.requires_grad:
                named.setdefault(parameter, name)
    if isinstance(optimizer, PyroOptim):
        return optimizer
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer or torch.optim.Adam):
        got = repr(optimizer) if isinstance(optimizer, str) else type(optimizer).__name__
        raise TypeError(
            "optimizer must be a torch optimiser class, a function (parameters, lr=...) -> "
            f"optimiser, a PyroOptim, 'ivon' or an IVON, got {got}"
        )
    parameters = {name: parameter for parameter, name in named.items()}
    locs = {p for name, p in parameters.items() if {"loc", "locs"} & {*name.split(".")}}
    constructor = optimizer or partial(_adam, locs=locs, max_lr_of_locs=max_lr_of_locs)
    return joint(constructor, {"lr": lr}, parameters=parameters)


def _adam(
    parameters: list[Tensor], lr: float, locs: Set[Tensor], max_lr_of_locs: float | None
) -> torch.optim.Adam:
    """Make fused Adam, with a separate group for means whose learning rate is bounded."""
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if max_lr_of_locs is not None and locs:
        further = [p for p in parameters if p not in locs]
        bounded = [p for p in parameters if p in locs]
        groups = [{"params": bounded, "max_lr": max_lr_of_locs}, {"params": further}]
    return torch.optim.Adam([g for g in groups if g["params"]], lr=lr, fused=True)
