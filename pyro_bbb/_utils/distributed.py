# SPDX-License-Identifier: Apache-2.0
"""Groups of processes, as `torchrun` starts them, by `torch.distributed`.

Gloo carries tensors on the CPU, nccl those on GPUs. A single process gets back its arguments.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyro_bbb._utils.context import set_inside

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets
_ALONE: ContextVar[bool] = ContextVar("alone", default=False)


def alone() -> AbstractContextManager[None]:
    """Run `fit` and `predict` inside on this process only, though it was started with others."""
    return set_inside(_ALONE, True)


@dataclass(frozen=True)
class Processes:
    """A group of processes; each of them must call every method, in the same order."""

    rank: int = 0  # of this process
    size: int = 1
    device: torch.device = torch.device("cpu")  # of the tensors that are sent

    @property
    def first(self) -> bool:
        """Return whether this is the one that writes and prints."""
        return self.rank == 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add up all processes' tensors in place, to the same bits on each."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def sums(self, *numbers: float) -> list[float]:
        """Return the sums of all processes' numbers."""
        x = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        return self.all_reduce(x).tolist()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def on_first(self, action: Callable[[], Any]) -> Any:
        """Run an action on the first process; return its result, or raise its error, on all."""
        if self.size == 1:
            return action()
        outcome: list[Any] = [None, None]  # result and error
        if self.first:
            try:
                outcome[0] = action()
            except (OSError, ValueError) as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, 0, device=self.device)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def align(self, tensors: Iterable[Tensor]) -> None:
        """Give tensors the values that they have in the first process, but for sharded ones."""
        for x in tensors if self.size > 1 else ():
            if hasattr(x, "device_mesh"):  # a DTensor, of which each process has a shard
                continue
            value = x.detach().contiguous()
            dist.broadcast(value, 0)
            if value.data_ptr() != x.data_ptr():
                x.detach().copy_(value)

    def split_counts(self, count: int, unit: int = 1) -> list[int]:
        """Split a count among the processes, in complete units but for the last."""
        units = -(-count // unit)
        ends = [min(count, unit * (units * (r + 1) // self.size)) for r in range(self.size)]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def at_least_one(self, counts: list[int]) -> int:
        """Return the count of this process, at least 1, so that a result has its shape."""
        return max(1, counts[self.rank])

    def join(self, x: Tensor, counts: list[int]) -> Tensor:
        """Concatenate the first ``counts[rank]`` rows of each process, which may be 0."""
        if self.size == 1:
            return x
        mine = x.new_zeros(max(counts), *x.shape[1:])
        mine[: counts[self.rank]] = x[: counts[self.rank]]
        gathered = [torch.empty_like(mine) for _ in counts]
        dist.all_gather(gathered, mine)
        return torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)])

    @contextmanager
    def own_stream(self) -> Iterator[Callable[[], None]]:
        """Draw random numbers of this process alone from the call of the yielded function on.

        Afterwards the common stream continues as after one draw.
        """
        if self.size == 1:
            yield lambda: None
            return
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            yield self.begin_stream
        torch.randint(2**62, ())

    def begin_stream(self) -> None:
        """Begin a stream that follows from the first process's random state and the rank."""
        seed = self.gather(int(torch.randint(2**62, ())))[0] + self.rank
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed)


def processes(device: torch.device | None = None) -> Processes:
    """Return the processes that this one was started with; it joins them if it has not yet."""
    if _ALONE.get() or not dist.is_available():
        return Processes()
    launched = all(os.environ.get(name) for name in _LAUNCHED) and os.environ["WORLD_SIZE"] != "1"
    if launched and not dist.is_initialized():
        _join()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Processes()
    return Processes(dist.get_rank(), dist.get_world_size(), device or torch.device("cpu"))


def _join() -> None:
    """Join the group, each process of a machine with its own GPU if there are any."""
    from torch.distributed.distributed_c10d import PrefixStore  # where torch was built with these
    from torch.distributed.rendezvous import rendezvous

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store, rank, size = next(rendezvous("env://"))
    # a group that torchrun restarts must not find the addresses of the one before
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group(store=store, rank=rank, world_size=size)
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
