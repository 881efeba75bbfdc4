# SPDX-License-Identifier: Apache-2.0
"""Groups of processes, as `torchrun` starts them, by `torch.distributed`.

All that goes between them goes through `torch.distributed`: gloo carries tensors on the CPU, nccl
those on GPUs. Alone, everything here returns what it was given.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets
_ALONE: ContextVar[bool] = ContextVar("alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Inside, `fit` and `predict` are of this process only, though it was started with others.

    For what one process does by itself, such as a prediction by the first of them, and for runs
    that have nothing to do with each other. Where a process is the only one, nothing changes.
    """
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


@dataclass(frozen=True)
class Processes:
    """A group of processes; each of them must call every method, in the same order."""

    rank: int = 0  # of this process
    size: int = 1
    device: torch.device = torch.device("cpu")  # of tensors on their way

    @property
    def first(self) -> bool:
        """Return whether this is the one that writes and prints."""
        return self.rank == 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all processes' tensors, the same to the bit on each; ``x`` itself has it."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def sums(self, *numbers: float) -> list[float]:
        """The sums of all processes' numbers."""
        if self.size == 1:
            return list(numbers)
        return self.all_reduce(self._tensor(numbers)).tolist()

    def largest(self, number: float) -> float:
        """The largest of all processes' numbers."""
        if self.size == 1:
            return number
        found = self._tensor([number])
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return float(found)

    def broadcast_int(self, number: int) -> int:
        """Broadcast the number of the first process."""
        if self.size == 1:
            return number
        found = torch.tensor([number], device=self.device)
        dist.broadcast(found, 0)
        return int(found)

    def align(self, tensors: Iterable[Tensor]) -> None:
        """Gives tensors the values that they have in the first process, but for sharded ones."""
        for x in tensors if self.size > 1 else ():
            if hasattr(x, "device_mesh"):  # a DTensor, of which each process has a shard
                continue
            value = x.detach().contiguous()
            dist.broadcast(value, 0)
            if value.data_ptr() != x.data_ptr():
                x.detach().copy_(value)

    def broadcast_bytes(self, text: bytes = b"") -> bytes:
        """Broadcast the text of the first process."""
        if self.size == 1:
            return text
        received = torch.empty(self.broadcast_int(len(text)), dtype=torch.uint8, device=self.device)
        if self.first and text:
            received.copy_(_bytes(text))
        dist.broadcast(received, 0)
        return _text(received)

    def all_gather_bytes(self, text: bytes) -> list[bytes]:
        """Gather the texts of all processes, by rank."""
        if self.size == 1:
            return [text]
        longest = int(self.largest(len(text)))
        mine = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        if text:
            mine[: len(text)] = _bytes(text).to(self.device)
        lengths = self._all_gather(torch.tensor([len(text)], device=self.device))
        return [
            _text(x[: int(length)])
            for x, length in zip(self._all_gather(mine), lengths, strict=True)
        ]

    def split_counts(self, count: int, unit: int = 1) -> list[int]:
        """Split a count among the processes, in complete units but for the last."""
        units = -(-count // unit)
        ends = [min(count, unit * (units * (r + 1) // self.size)) for r in range(self.size)]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def at_least_one(self, counts: list[int]) -> int:
        """The count of this process, at least 1, so that a result has its shape."""
        return max(1, counts[self.rank])

    def join(self, x: Tensor, counts: list[int]) -> Tensor:
        """All processes' rows one after the other.

        Of ``x`` the first ``counts[rank]`` rows count; that number may be 0.
        """
        if self.size == 1:
            return x
        mine = x.new_zeros(max(counts), *x.shape[1:])
        mine[: counts[self.rank]] = x[: counts[self.rank]]
        parts = zip(self._all_gather(mine), counts, strict=True)
        return torch.cat([part[:count] for part, count in parts])

    @contextmanager
    def own_stream(self) -> Iterator[Callable[[], None]]:
        """Random numbers that no other process has, from the call of the yielded function on.

        Afterwards they go on as if but one was drawn. For a process alone it is nothing.
        """
        if self.size == 1:
            yield lambda: None
            return
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            yield self.begin_stream
        torch.randint(2**62, ())

    def begin_stream(self) -> None:
        """Begins a stream that follows from the first process's random state and the rank."""
        seed = self.broadcast_int(int(torch.randint(2**62, ()))) + self.rank
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed)

    def _tensor(self, numbers: Iterable[float]) -> Tensor:
        return torch.tensor(list(numbers), dtype=torch.float64, device=self.device)

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return parts


def processes(device: torch.device | None = None) -> Processes:
    """The processes that this one was started with; it joins them if it has not done so yet."""
    if _ALONE.get() or not dist.is_available():
        return Processes()
    if not dist.is_initialized() and _launched_with_others():
        _join()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Processes()
    return Processes(dist.get_rank(), dist.get_world_size(), device or torch.device("cpu"))


def _launched_with_others() -> bool:
    return all(os.environ.get(name) for name in _LAUNCHED) and os.environ["WORLD_SIZE"] != "1"


def _join() -> None:
    """Each process of a machine has a GPU of its own, where there are any."""
    from torch.distributed.distributed_c10d import PrefixStore  # where torch was built with these
    from torch.distributed.rendezvous import rendezvous

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store, rank, size = next(rendezvous("env://"))
    # a group that torchrun has started anew must not find the addresses of the one before
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group(store=store, rank=rank, world_size=size)
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _text(x: Tensor) -> bytes:
    return x.cpu().numpy().tobytes()
