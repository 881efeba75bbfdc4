# SPDX-License-Identifier: Apache-2.0
"""State of one training step, for the guide, the objective and the kernels alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyro_bbb._ops.buffers import Memory
    from pyro_bbb._ops.multi_sample import Shared


@dataclass(frozen=True)
class StepOptions:
    """Options of a step; by default each weight tensor is made by itself."""

    flat: bool = False
    """Whether guides may sample their weights into one vector."""
    several: bool = False
    """Whether samples of one posterior share its scales and their gradient."""
    unpruned: Any = None
    """The entries that pruning has left of the guide's weights, if that is known."""
    memory: Memory | None = None
    """The pool of large tensors."""


@dataclass
class StepContext:
    """Options of a step, and the guide's sample once it is made."""

    options: StepOptions = StepOptions()
    sample: Any = None
    """The guide's latest `FlatSample`: value, noise and log q, with its parts by site name."""
    scales: dict[tuple[str | int, ...], Shared] = field(default_factory=dict)
    """Scales and their gradient by sites and parameters, of several samples."""


_STEP: ContextVar[StepContext | None] = ContextVar("step", default=None)


def current_step() -> StepContext:
    """The context of the step around the call; outside of steps a new one without options."""
    return _STEP.get() or StepContext()


@contextmanager
def step_context(options: StepOptions) -> Iterator[StepContext]:
    r"""Opens the context of a step.

    Parameters stay as they are inside. With ``several``, only `torch.Tensor.backward` may ask for
    gradients: each $\rho$ gets the sum over all samples at the end.
    """
    context = StepContext(options)
    token = _STEP.set(context)
    try:
        yield context
        for shared in context.scales.values():
            shared.flush()
    finally:
        _STEP.reset(token)
