# SPDX-License-Identifier: Apache-2.0
"""Contexts for a seed, for evaluation mode and for the network's precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import nn

from pyro_bbb._utils.locking import GLOBAL_LOCK
from pyro_bbb._utils.validation import as_seed

Value = TypeVar("Value")
_PRECISION: ContextVar[torch.dtype | None] = ContextVar("network's precision", default=None)
_ONLY_SHAPES: ContextVar[bool] = ContextVar("draws are used for their shapes", default=False)


@contextmanager
def set_inside(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Give a context variable a value inside."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def for_shapes() -> AbstractContextManager[None]:
    """Inside, a draw serves for its shape alone: a prior without draws gives other numbers."""
    return set_inside(_ONLY_SHAPES, True)


def only_shapes() -> bool:
    """Return whether draws serve for their shapes alone."""
    return _ONLY_SHAPES.get()


def network_precision(dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """Inside, `autocast_network` runs the network in this precision; ``None`` changes nothing."""
    return set_inside(_PRECISION, dtype)


def autocast_network(device: torch.device) -> AbstractContextManager[None]:
    """Return the context of a run of the network, in the precision of `network_precision`."""
    dtype = _PRECISION.get()
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside; every submodule's own mode comes back."""
    modes = {m: m.training for m in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for submodule, mode in modes.items():
            submodule.training = mode


@contextmanager
def seeded(seed: int | None, *, cpu_only: bool = False) -> Iterator[None]:
    """Torch's random state set from ``seed``, and given back afterwards; ``None`` changes nothing.

    Other threads that ask for one wait. ``cpu_only`` leaves other devices alone; to look for them
    takes longer than a small network.
    """
    if seed is None:
        yield
        return
    seed = as_seed("seed", seed)
    with GLOBAL_LOCK, torch.random.fork_rng(devices=[] if cpu_only else None):
        (torch.default_generator if cpu_only else torch).manual_seed(seed)
        yield


@contextmanager
def explained_batchnorm() -> Iterator[None]:
    """Explain torch's error about batch normalisation of a minibatch of one row."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise ValueError(
            "data must give minibatches of two rows or more to a network with batch normalisation, "
            "got one of 1 row: take a batch_size of at least 2, for a DataLoader drop_last=True or "
            "another batch_size, or put the normalisation into evaluation mode (.eval())"
        ) from error
