"""Inputs of any form as tensors."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

READ_BATCH = 1024  # items collated at once when a Dataset is read


def as_tensor(name: str, value: Any) -> Tensor:
    """A tensor as it is, or one of a numeric numpy array."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return torch.tensor(value)
    if not isinstance(value, Tensor):
        kind = f"dtype {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise TypeError(f"{name} must be a tensor or a numeric numpy array, got {kind}")
    return value


def input_batches(
    data: Dataset[Any] | DataLoader[Any], batch_size: int | None = None
) -> Iterator[Tensor]:
    """Inputs of a map-style dataset or a loader, batch by batch; targets are left out."""
    if not isinstance(data, DataLoader):
        size = batch_size or READ_BATCH
        data = DataLoader(data, batch_size=size, generator=torch.Generator())
    for batch in data:
        yield as_tensor("x", batch[0] if isinstance(batch, list | tuple) else batch)
