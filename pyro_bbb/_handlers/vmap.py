# SPDX-License-Identifier: Apache-2.0
"""One function over many draws of the weights, at once or one by one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor

Record: TypeAlias = dict[str, Tensor]
Run: TypeAlias = Callable[[Record], Record]


def over_draws(run: Run, draws: Mapping[str, Tensor]) -> Record:
    """Run a function of one draw for S draws: as one batched pass if its operations allow it.

    Draws and results are tensors ``[S, ...]`` by name. Needs the global lock, for the filters of
    warnings.
    """
    batched: Record
    try:
        with _errors_for_loops():
            batched = torch.vmap(run, randomness="different")(dict(draws))
    except (RuntimeError, UserWarning):  # the loop does it, or raises what is wrong
        batched = one_by_one(run, draws)
    return batched


def batches(run: Run, draws: Mapping[str, Tensor]) -> bool:
    """Return whether `over_draws` takes one pass."""
    try:
        with _errors_for_loops():
            torch.vmap(run, randomness="different")(dict(draws))
    except (RuntimeError, UserWarning):
        return False
    return True


@contextmanager
def _errors_for_loops() -> Iterator[None]:
    """Turn torch's warning that it loops over the draws into an error, but for attention."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", ".*scaled_dot_product", UserWarning)  # slow by itself
        yield


def one_by_one(run: Run, draws: Mapping[str, Tensor]) -> Record:
    """Run the function in a loop."""
    columns = (values.unbind() for values in draws.values())  # gradients are stacked, not added up
    return stack([run(dict(zip(draws, one, strict=True))) for one in zip(*columns, strict=True)])


def stack(records: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack records of tensors by name along a new first dimension."""
    return {name: torch.stack([record[name] for record in records]) for name in records[0]}
