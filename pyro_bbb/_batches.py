"""Minibatches for training, from whatever holds the data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pyro_bbb.data import Minibatches, as_tensors
from pyro_bbb.models import BayesianModel

Data: TypeAlias = tuple[Tensor, Tensor] | Dataset[Any] | DataLoader[Any]


class Batches:
    """Minibatches from whatever ``data`` is, checked and on the device."""

    def __init__(
        self, data: Data, batch_size: int, model: BayesianModel, device: torch.device
    ) -> None:
        self.source: Minibatches | DataLoader[Any]
        self.model, self.device = model, device
        self._begun: Iterator[tuple[Tensor, Tensor]] | None = None
        if isinstance(data, DataLoader):
            self.source = data
            found = _length(data.dataset)
        else:
            x, y = as_tensors(data, device=device)
            generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
            self.source = Minibatches(x, y, batch_size, generator=generator)
            found = len(x)
        expected = model.num_data
        if found not in (None, expected):
            raise ValueError(f"num_data of the model is {expected}, but data has {found} examples")
        per_batch = self.source.batch_size or 1
        self._length = _length(self.source) or math.ceil(expected / per_batch)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if isinstance(self.source, Minibatches):
            return iter(self.source)
        begun, self._begun = self._begun, None
        return begun or map(self._read, self.source)

    def examples(self) -> tuple[Tensor, Tensor]:
        """Checked examples: all of the data in memory, or the batch that a loader begins with."""
        if isinstance(self.source, Minibatches):
            self.model.check(self.source.x, self.source.y)
            return self.source.x, self.source.y
        batches = map(self._read, self.source)
        first = next(batches)
        self._begun = chain([first], batches)  # a stream cannot be read twice
        return first

    def _read(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = as_tensors(batch, device=self.device)
        self.model.check(x, y)
        return x, y


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:  # a stream of unknown length
        return None
