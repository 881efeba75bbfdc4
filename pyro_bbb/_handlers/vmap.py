# SPDX-License-Identifier: Apache-2.0
"""One function over many draws of the weights, at once or one by one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
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
    return choose(run, draws)[1]


def choose(run: Run, draws: Mapping[str, Tensor]) -> tuple[Callable[..., Record], Record]:
    """Return `in_one_pass` or `one_by_one`, which suits the operations, and its results."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # of what torch batches badly
            # a loop over the draws for attention alone, which takes long by itself
            warnings.filterwarnings("ignore", ".*scaled_dot_product", UserWarning)
            return in_one_pass, torch.vmap(run, randomness="different")(dict(draws))
    except (RuntimeError, UserWarning):  # the loop does it, or raises what is wrong
        return one_by_one, one_by_one(run, draws)


def in_one_pass(run: Run, draws: Mapping[str, Tensor]) -> Record:
    """Run the function in one pass, which has worked before."""
    try:
        batched: Record = torch.vmap(run, randomness="different")(dict(draws))
    except RuntimeError:
        return one_by_one(run, draws)
    return batched


def one_by_one(run: Run, draws: Mapping[str, Tensor]) -> Record:
    """Run the function in a loop."""
    columns = (values.unbind() for values in draws.values())  # gradients are stacked, not added up
    return stack([run(dict(zip(draws, one, strict=True))) for one in zip(*columns, strict=True)])


def stack(records: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack records of tensors by name along a new first dimension."""
    return {name: torch.stack([record[name] for record in records]) for name in records[0]}
