# SPDX-License-Identifier: Apache-2.0
"""Minibatches for training from tensors, a dataset or a loader, and their shards per process."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from pyro_bbb._utils.distributed import Processes
from pyro_bbb._utils.inputs import Rows, parts_of, to_precision, weight_of, weighted
from pyro_bbb._utils.locking import cached_property
from pyro_bbb._utils.pages import read_on
from pyro_bbb.data import Minibatches, as_tensors
from pyro_bbb.models import BayesianModel
from pyro_bbb.persistence.state import digest

Data: TypeAlias = tuple[Any, Any] | Dataset[Any] | DataLoader[Any]
Batch: TypeAlias = tuple[Rows, Tensor]
_EXAMPLES = 256


@dataclass(frozen=True)
class Shard:
    """The data of one step in one process: parts of minibatches, each with its own draw."""

    parts: list[Batch]
    size: int  # examples of the step in all processes
    draws: int  # parts of the step in all processes


class Batches:
    """Checked minibatches on the device, of which a step takes ``accumulate``.

    Several processes split each minibatch, except for a loader with a `DistributedSampler` or of a
    stream, which yields each its own shard.
    """

    def __init__(
        self,
        data: Data,
        batch_size: int,
        model: BayesianModel,
        device: torch.device,
        accumulate: int = 1,
        processes: Processes | None = None,
        guide: Any = None,
        sample_weight: Any = None,
    ) -> None:
        self.source: Minibatches | DataLoader[Any]
        self.model, self.device, self.accumulate = model, device, accumulate
        self.processes = processes or Processes()
        self._missing = model.likelihood.ignored is not None
        self._precise = (guide, model)  # whose precision inputs get
        self.epoch = 0
        self._generator = torch.Generator()  # of the order, or of a loader that all processes read
        self._start: list[Tensor] | None = None  # its states at the start of the epoch under way
        self._begun: Iterator[Batch] | None = None  # minibatches left of that epoch
        several = self.processes.size > 1
        self.own = several and is_sharded(data)
        # whether a loader draws from torch's generator, of this process alone
        self._draws_alone = isinstance(data, DataLoader) and (self.own or not several)
        if isinstance(data, DataLoader):
            self.source, self._weighted = data, sample_weight is not None
            if self._weighted and sample_weight is not True:
                raise ValueError(
                    "sample_weight must be True for a DataLoader, whose batches are then "
                    f"(x, y, weight), got {type(sample_weight).__name__}"
                )
        else:
            x, y = as_tensors(data, device=device, missing=self._missing)
            x = to_precision(weighted(x, sample_weight), *self._precise)
            if (weight := weight_of(x)) is not None and not weight.any():
                raise ValueError("sample_weight must be positive for at least one row, all are 0")
            self.source = Minibatches(x, y, batch_size, generator=self._generator)
            if any(isinstance(m, _BatchNorm) and m.training for m in model.modules()):
                self.source.least = 2 * self.processes.size  # one row has no variance
        self.num_seen = self._count()
        if several or not isinstance(data, DataLoader):
            number = self.processes.gather(int(torch.randint(2**62, ())))[0]
            self._generator.manual_seed(number)
        size = self.source.batch_size
        # examples of a minibatch in all processes, where that is known
        self.batch_size = size * self.processes.size if self.own and size else size
        self._streams = isinstance(getattr(self.source, "dataset", None), IterableDataset)
        length = None if self.own and self._streams else _length(self.source)
        if length is None:
            length = math.ceil(model.num_data / (self.batch_size or 1))
        else:
            length = max(self.processes.gather(length))
        self._length = math.ceil(length / accumulate)

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        """Yield the minibatches of all processes."""
        yield from self._begin()
        self._start = None

    def shards(self) -> Iterator[Shard]:
        """Yield this process's data of each step; go on with an epoch that is under way."""
        begun, self._begun = self._begun, None
        batches = begun or self._begin()
        while (shard := self._shard(list(islice(batches, self.accumulate)))).draws:
            yield shard
        self._start = None
        self.epoch += 1

    @cached_property
    def examples(self) -> Batch:
        """Return checked examples: at most a minibatch of tensors, or a loader's first batch."""
        if isinstance(self.source, Minibatches):
            self.model.check(self.source.x, self.source.y)
            return self.spread(self.source.batch_size)
        batches = self._begin()
        first = self._compared(next(batches, None))
        self._begun = chain([first], batches)  # a stream cannot be read twice
        return first

    def spread(self, most: int = _EXAMPLES) -> Batch:
        """Return at most 256, and ``most``, examples evenly spread over data in memory.

        Of a loader over its first batch.
        """
        source = self.source
        x, y = (source.x, source.y) if isinstance(source, Minibatches) else self.examples
        step = math.ceil(len(y) / min(most, _EXAMPLES))
        return x[::step], y[::step]

    @property
    def begun(self) -> bool:
        """Return whether an epoch is under way."""
        return self._start is not None

    def order(self) -> list[Tensor]:
        """Random states that determine the order of the epoch under way, or else of the next."""
        return self._start or [generator.get_state() for generator in self._generators()]

    def resume(self, order: list[Tensor], *, begun: bool, steps: int, epoch: int) -> None:
        """Go on in an epoch, from 0, where a run was with this `order`.

        Minibatches of the steps done are read again, which moves torch's random state for a loader.
        """
        for generator, state in zip(self._generators(), order, strict=True):
            generator.set_state(state)
        self._start = self._begun = None
        self.epoch = epoch
        if begun:
            batches, read = self._begin(), steps * self.accumulate
            ahead = deque(islice(batches, read), maxlen=0) if read else [next(batches)]
            self._begun = chain(ahead, batches)

    def _count(self) -> int | None:
        """Return the examples of an epoch where they are known, once num_data agrees with them."""
        if isinstance(self.source, Minibatches):
            self._require_num_data({len(self.source.x)}, f"has {len(self.source.x)} examples")
            return len(self.source.x)
        loader, dataset = self.source, self.source.dataset
        batches: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        sampler = batches.sampler if type(batches) is BatchSampler else None
        size, name = _length(dataset), type(sampler).__name__ if sampler else "batch_sampler"
        if isinstance(dataset, IterableDataset):
            seen, name = None if self.own else size, type(dataset).__name__
        else:
            fixed = isinstance(batches, list | tuple)
            seen = sum(map(len, batches)) if fixed else _length(sampler)
        if seen is None:
            return None
        processes = self.processes.size if self.own else 1
        total = seen * processes
        right = {total, *_drawn_from(sampler)} | ({size} if size and total > size else set())
        self._require_num_data(right, f"yields {total} examples per epoch by its {name}")
        dropped = seen % batches.batch_size if getattr(batches, "drop_last", False) else 0
        return (seen - dropped) * processes

    def _require_num_data(self, right: set[int], examples: str) -> None:
        if self.model.num_data not in right:
            expected = " or ".join(map(str, sorted(right)))
            raise ValueError(
                f"num_data of the model is {self.model.num_data}, but data {examples}: num_data "
                f"must be {expected}"
            )

    def warn_if_contradicted(self, seen: int, steps: int) -> None:
        """Warn where a first epoch's examples contradict ``num_data`` by a step or more."""
        expected, size = self.model.num_data, _length(getattr(self.source, "dataset", None))
        repeats = seen > expected and size in (None, expected)
        if self.num_seen is None and not repeats and abs(seen - expected) * steps >= seen:
            warnings.warn(
                f"num_data of the model is {expected}, but the first epoch of data has {seen} "
                f"examples: if every epoch has the same ones, num_data must be {seen}, or the KL "
                f"has a wrong weight. {read_on('questions/kl_weight')}",
                stacklevel=6,
            )

    def _begin(self) -> Iterator[Batch]:
        """Yield the minibatches of an epoch, in an order drawn with the first."""
        self._start = [generator.get_state() for generator in self._generators()]
        if isinstance(self.source, Minibatches):
            return iter(self.source)
        if sampler := _distributed(self.source):
            sampler.set_epoch(self.epoch)
        return map(self._read, self.source if self._draws_alone else self._in_step())

    def _shard(self, minibatches: list[Batch]) -> Shard:
        """Return this process's part of some minibatches."""
        rank, number = self.processes.rank, self.processes.size
        if self.own or number == 1:
            parts = minibatches
            counts = self.processes.sums(sum(len(x) for x, _ in parts), len(parts))
            return Shard(parts, *map(int, counts))
        shares = [(x.tensor_split(number), y.tensor_split(number)) for x, y in minibatches]
        parts = [(x[rank], y[rank]) for x, y in shares if len(y[rank])]
        sizes = [len(y) for _, y in minibatches]
        return Shard(parts, sum(sizes), sum(min(size, number) for size in sizes))

    def _in_step(self) -> Iterator[Any]:
        """Yield the batches of the loader, random in the same way in all processes."""
        with self._common_generator():
            batches = iter(self.source)
        end = object()
        while True:
            with self._common_generator():
                batch = next(batches, end)
            if batch is end:
                return
            yield batch

    @contextmanager
    def _common_generator(self) -> Iterator[None]:
        """Inside, torch draws from the generator that all processes have in common."""
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(self._generator.get_state())
        try:
            yield
        finally:
            self._generator.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(before)

    def _generators(self) -> list[torch.Generator]:
        """Return the generators that determine the order; a loader may have its own."""
        if isinstance(self.source, Minibatches):
            return [self._generator]
        inner = self.source.batch_sampler
        holders = self.source, self.source.sampler, inner, getattr(inner, "sampler", None)
        own = [getattr(holder, "generator", None) for holder in holders]
        common = torch.default_generator if self._draws_alone else self._generator
        return list(dict.fromkeys([common, *filter(None, own)]))

    def _read(self, batch: Any) -> Batch:
        weight = None
        if self._weighted:
            if not isinstance(batch, tuple | list) or len(batch) != 3:
                raise ValueError("data must give batches (x, y, weight) with sample_weight=True")
            *batch, weight = batch
        x, y = as_tensors(batch, device=self.device, missing=self._missing)
        x = to_precision(weighted(x, weight), *self._precise)
        self.model.check(x, y)
        return x, y

    def _compared(self, first: Batch | None) -> Batch:
        """Return the first batch of the loader, compared with those of the other processes."""
        own = None if first is None else digest([*parts_of(first[0]).values(), first[1]])
        digests = self.processes.gather(own)
        if first is None or None in digests:
            raise ValueError("data must give every process a minibatch, one gets none")
        if self._streams and len(set(digests)) < len(digests):
            raise ValueError(
                "data must yield each process its own shard of a stream, two get the same: let the "
                "dataset yield the shard of torch.distributed.get_rank()"
            )
        if not self.own and len(set(digests)) > 1:
            raise ValueError(
                "data must yield all processes the same minibatches, which they split, or have a "
                "DistributedSampler; seed its generators alike"
            )
        return first


def check_sampler(data: Any, processes: Processes) -> None:
    """Raise ValueError if a loader's `DistributedSampler` is for other processes than these."""
    sampler = _distributed(data) if isinstance(data, DataLoader) else None
    if sampler is None:
        return
    got, here = (sampler.rank, sampler.num_replicas), (processes.rank, processes.size)
    if got != here:
        raise ValueError(
            "data must have a DistributedSampler of this process, rank {} of {}, got one of rank "
            "{} of {}".format(*here, *got)
        )


def _distributed(loader: DataLoader[Any]) -> DistributedSampler[Any] | None:
    inner = getattr(loader.batch_sampler, "sampler", None)
    samplers = (s for s in (loader.sampler, inner) if isinstance(s, DistributedSampler))
    return next(samplers, None)


def is_sharded(source: Any) -> bool:
    """Return whether a loader yields each of several processes its own shard."""
    if not isinstance(source, DataLoader):
        return False
    return isinstance(source.dataset, IterableDataset) or _distributed(source) is not None


def _drawn_from(sampler: Any) -> set[int]:
    """Return the number of examples of which a sampler draws others in each epoch, if it does."""
    if isinstance(sampler, WeightedRandomSampler):
        return {int(sampler.weights.count_nonzero())}
    source: Any = getattr(sampler, "data_source", None)
    if isinstance(sampler, DistributedSampler):
        source = sampler.dataset
    return {len(source)} if isinstance(sampler, RandomSampler | DistributedSampler) else set()


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:  # a stream of unknown length
        return None
