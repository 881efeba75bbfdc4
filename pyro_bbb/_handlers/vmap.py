# SPDX-License-Identifier: Apache-2.0
"""One function over many draws of the weights, at once or one by one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def over_draws(
    run: Callable[[dict[str, Tensor]], dict[str, Tensor]], draws: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Runs a function of one draw for S draws: as one batched pass where its operations allow it.

    Draws and results are tensors ``[S, ...]`` by name.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # of what torch batches badly
            # a loop over the draws for attention alone, which takes long by itself
            warnings.filterwarnings("ignore", ".*scaled_dot_product", UserWarning)
            return torch.vmap(run, randomness="different")(dict(draws))
    except (RuntimeError, UserWarning):  # the loop does it, or raises what is wrong
        return one_by_one(run, draws)


def one_by_one(
    run: Callable[[dict[str, Tensor]], dict[str, Tensor]], draws: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """As `over_draws`, in a loop."""
    columns = (values.unbind() for values in draws.values())  # gradients are stacked, not added up
    return stack([run(dict(zip(draws, one, strict=True))) for one in zip(*columns, strict=True)])


def stack(records: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Records of tensors by name as one record, stacked along a new first dimension."""
    return {name: torch.stack([record[name] for record in records]) for name in records[0]}
