"""Minibatches for training, from whatever holds the data."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
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
        self._generator = torch.Generator()
        self._start: list[Tensor] | None = None
        self._begun: Iterator[tuple[Tensor, Tensor]] | None = None
        if isinstance(data, DataLoader):
            self.source = data
            found = _length(data.dataset)
        else:
            x, y = as_tensors(data, device=device)
            self._generator.manual_seed(int(torch.randint(2**62, ())))
            self.source = Minibatches(x, y, batch_size, generator=self._generator)
            found = len(x)
        expected = model.num_data
        if found not in (None, expected):
            raise ValueError(f"num_data of the model is {expected}, but data has {found} examples")
        per_batch = self.source.batch_size or 1
        self._length = _length(self.source) or math.ceil(expected / per_batch)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        begun, self._begun = self._begun, None
        yield from begun or self._begin()
        self._start = None

    def examples(self) -> tuple[Tensor, Tensor]:
        """Checked examples: all of the data in memory, or the batch that a loader begins with."""
        if isinstance(self.source, Minibatches):
            self.model.check(self.source.x, self.source.y)
            return self.source.x, self.source.y
        batches = self._begin()
        first = next(batches)
        self._begun = chain([first], batches)  # a stream cannot be read twice
        return first

    @property
    def begun(self) -> bool:
        """Whether an epoch is under way."""
        return self._start is not None

    def order(self) -> list[Tensor]:
        """The random states that the order of the epoch under way, or else of the next, is of."""
        return self._start or [generator.get_state() for generator in self._generators()]

    def resume(self, order: list[Tensor], *, begun: bool, taken: int) -> None:
        """Goes on where a run was; for a loader, this moves torch's random state.

        Args:
            order: what `order` gave there.
            begun: whether an epoch was under way.
            taken: minibatches that were taken of it; they are read again.
        """
        for generator, state in zip(self._generators(), order, strict=True):
            generator.set_state(state)
        self._start = self._begun = None
        if begun:
            batches = self._begin()
            ahead = deque(islice(batches, taken), maxlen=0) if taken else [next(batches)]
            self._begun = chain(ahead, batches)

    def _begin(self) -> Iterator[tuple[Tensor, Tensor]]:
        """An epoch's minibatches, in an order that is drawn with the first."""
        self._start = [generator.get_state() for generator in self._generators()]
        if isinstance(self.source, Minibatches):
            return iter(self.source)
        return map(self._read, self.source)

    def _generators(self) -> list[torch.Generator]:
        """Of what random state the order is a function; a loader may have its own."""
        if isinstance(self.source, Minibatches):
            return [self._generator]
        inner = self.source.batch_sampler
        holders = self.source, self.source.sampler, inner, getattr(inner, "sampler", None)
        own = [getattr(holder, "generator", None) for holder in holders]
        return list(dict.fromkeys([torch.default_generator, *filter(None, own)]))

    def _read(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = as_tensors(batch, device=self.device)
        self.model.check(x, y)
        return x, y


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:  # a stream of unknown length
        return None
