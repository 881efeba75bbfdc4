# SPDX-License-Identifier: Apache-2.0
"""Data sets as pairs of tensors, their minibatches and splits."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from pyro_bbb._utils.inputs import Rows, as_inputs, each, parts_of
from pyro_bbb._utils.locking import GLOBAL_LOCK
from pyro_bbb._utils.validation import (
    all_finite,
    as_device,
    as_seed,
    count,
    probability,
    tensor,
)


def as_tensors(
    data: tuple[Any, Any] | Dataset[Any],
    *,
    device: torch.device | str | None = None,
    missing: bool = False,
) -> tuple[Any, Tensor]:
    """Return inputs and targets as a checked pair of tensors on one device; dtypes do not change.

    Args:
        data: a pair ``(x, y)`` of tensors or numpy arrays whose rows are examples, or a map-style
            ``Dataset`` of such pairs (a ``TensorDataset`` is taken as it is, any other one is read
            once from end to end). For a network of several inputs ``x`` is a tuple or list of
            them, its arguments by position, or a dict, its arguments by name.
        device: where to put both; by default where ``x`` is.
        missing: whether ``y`` may have NaN, for entries that are missing.

    Returns:
        ``x`` and ``y``, each ``[n, ...]``; several inputs as one object that minibatches, models
        and `predict` take. Rows that are not finite, and lengths that differ, are a ValueError.
    """
    pair = _read_dataset(data) if isinstance(data, Dataset) else data
    if not isinstance(pair, tuple | list):
        forms = "a pair (x, y) of tensors or arrays, or a map-style Dataset of pairs"
        hint = "; a DataLoader's collate_fn can make pairs" if isinstance(data, Mapping) else ""
        raise TypeError(f"data must be {forms}, got {type(data).__name__}{hint}")
    if len(pair) != 2:
        hint = "; weights of the examples go into sample_weight" if len(pair) == 3 else ""
        raise ValueError(f"data must be a pair (x, y), got {len(pair)} parts{hint}")
    x, y = as_inputs(pair[0]), tensor("y", pair[1])
    _check_lengths(x, y)
    for name, part in parts_of(x).items():
        _check_finite(name, part)
    if not missing:
        _check_finite("y", y)
    target = x.device if device is None else as_device(device)
    return each(x, _data_only).to(target), _data_only(y).to(target)


class Minibatches:
    """Batches of ``(x, y)``, reshuffled at each iteration; the last may be short.

    An epoch costs one ``randperm`` on the CPU, so that the order is the same on every device, and
    one ``index_select`` per batch on the data's device.

    Args:
        x: inputs, ``[n, ...]``.
        y: targets, ``[n, ...]``, on the same device.
        batch_size: examples per batch, at least 1; more than n makes one batch of n.
        shuffle: whether each epoch has a new random order.
        generator: CPU generator of the orders; torch's global one by default.
    """

    def __init__(
        self,
        x: Any,
        y: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        x, y = as_inputs(x), tensor("y", y)
        _check_lengths(x, y)
        if x.device != y.device:
            raise ValueError(f"x and y must be on one device, got {x.device} and {y.device}")
        if not isinstance(generator, torch.Generator | None):
            raise TypeError(f"generator must be a torch.Generator, got {generator!r}")
        if generator is not None and generator.device.type != "cpu":
            raise ValueError(f"generator must be on the CPU, got one on {generator.device}")
        self.x: Any = x
        self.y: Tensor = y
        self.batch_size: int = count("batch_size", batch_size)
        self.least = 1  # rows of a last batch; fewer join the batch before
        self.shuffle = shuffle
        self.generator = generator

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """Numbers of rows of the batches."""
        batches, remainder = divmod(len(self.x), self.batch_size)
        if batches and 0 < remainder < self.least:
            return [self.batch_size] * (batches - 1) + [self.batch_size + remainder]
        return [self.batch_size] * batches + [remainder] * (remainder > 0)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if not self.shuffle:
            yield from zip(self.x.split(self.sizes), self.y.split(self.sizes), strict=True)
            return
        with GLOBAL_LOCK:
            order = torch.randperm(len(self.x), generator=self.generator).to(self.x.device)
        for rows in order.split(self.sizes):
            yield self.x.index_select(0, rows), self.y.index_select(0, rows)


def split(
    x: Any, y: Any, *, fraction: float, seed: int
) -> tuple[tuple[Any, Tensor], tuple[Any, Tensor]]:
    """Split at random into two disjoint parts, as for training and validation.

    Args:
        x: inputs, ``[n, ...]``; a tensor, an array, or several of them as for `fit`.
        y: targets, ``[n, ...]``.
        fraction: fraction of the second part, in (0, 1); its size is ``round(fraction * n)``.
        seed: of the random order; torch's global generator is not touched.

    Returns:
        ``(x, y)`` of the first and of the second part, neither of them empty.
    """
    x, y = as_inputs(x), tensor("y", y)
    _check_lengths(x, y)
    fraction, seed = probability("fraction", fraction), as_seed("seed", seed)
    holdout = round(fraction * len(x))
    if not 0 < holdout < len(x):
        raise ValueError(f"fraction={fraction} of {len(x)} examples leaves one part empty")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    parts = order[holdout:], order[:holdout]
    first, second = ((x[rows.to(x.device)], y[rows.to(y.device)]) for rows in parts)
    return first, second


def _read_dataset(data: Dataset[Any]) -> list[Any]:
    """Read and collate every item of a map-style dataset of pairs."""
    if isinstance(data, IterableDataset):
        raise TypeError(f"data must be a map-style Dataset, got {type(data).__name__}")
    if isinstance(data, TensorDataset):
        return list(data.tensors)
    if (size := len(data)) == 0:  # type: ignore[arg-type]
        raise ValueError("data must not be empty, got a Dataset of length 0")
    pair = next(iter(DataLoader(data, batch_size=size, generator=torch.Generator())))
    if not isinstance(pair, list) or not all(isinstance(x, Tensor) for x in tree_leaves(pair)):
        got = f"{type(data).__name__} of others"
        raise TypeError(f"data must have pairs (x, y) as items, got {got}")
    return pair


def _data_only(value: Tensor) -> Tensor:
    """Detach a tensor, so that training leaves no gradient in the user's."""
    return value.detach() if value.requires_grad else value


def _check_lengths(x: Rows, y: Tensor) -> None:
    for name, value in (*parts_of(x).items(), ("y", y)):
        if value.ndim == 0 or len(value) == 0:
            shape = list(value.shape)
            raise ValueError(f"{name} must have at least one example (row), got shape {shape}")
    if len(x) != len(y):
        raise ValueError(f"x and y must have equally many rows, got {len(x)} and {len(y)}")


def _check_finite(name: str, value: Tensor) -> None:
    if value.is_meta:
        raise ValueError(f"{name} must have values, got a tensor on the device meta")
    if not all_finite(value):
        row = int((~value.isfinite()).nonzero()[0, 0])
        raise ValueError(f"{name} must be finite, got NaN or infinity first in row {row}")
