# SPDX-License-Identifier: Apache-2.0
"""Workers in separate processes, which isolate the state of the allocator.

In one process blocks freed by one method would serve the others: the costs of allocation would
depend on the set of methods.
"""

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeAlias

import torch

from _parts.timing import Action, Rounds, Take, Turn, interleave, no_collection, timed

SETTLE = 0.02  # seconds, in which the threads of the turn before stop to wait for work


class Job(Protocol):
    """Work of a method; hashable and picklable."""

    @property
    def device(self) -> str:
        """Device."""


# from a job to its action, or the reason why it is unavailable
Make: TypeAlias = Callable[[Any], Take | str]


class Worker:
    """Worker of one method."""

    def __init__(self, make: Make) -> None:
        self._make = make
        self._turns: dict[Job, Turn] = {}

    def prepare(self, jobs: Iterable[Job]) -> str | None:
        """Prepare for jobs in place of earlier ones; return the reason if that fails."""
        self._turns.clear()
        for job in jobs:
            take = self._make(job)
            if isinstance(take, str):
                return take
            self._turns[job] = timed(take, job.device)
        return None

    def take(self, job: Job, count: int) -> list[float]:
        """Run a job several times and return the seconds of each."""
        return self._turns[job](count)


class RemoteWorker:
    """`Worker` in another process."""

    def __init__(self, make: Make, threads: int | None = None) -> None:
        context = get_context("spawn")
        self._pipe, other = context.Pipe()
        arguments = make, threads or torch.get_num_threads(), other
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        other.close()

    def prepare(self, jobs: Iterable[Job]) -> str | None:
        """As `Worker` does."""
        absent: str | None = self._call("prepare", list(jobs))
        return absent

    def take(self, job: Job, count: int) -> list[float]:
        """As `Worker` does."""
        time.sleep(SETTLE)
        times: list[float] = self._call("take", job, count)
        return times

    def leave(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()

    def _call(self, *order: Any) -> Any:
        self._pipe.send(order)
        try:
            return self._pipe.recv()
        except EOFError:
            raise RuntimeError("the process of a method failed; its error is above") from None


def _serve(make: Make, threads: int, pipe: Connection) -> None:
    """Serve calls until the pipe is closed, on so many cores and threads of torch."""
    torch.set_num_threads(threads)
    if hasattr(os, "sched_setaffinity"):  # other libraries have threads of their own
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    worker = Worker(make)
    with no_collection():
        while True:
            try:
                what, *arguments = pipe.recv()
            except EOFError:
                return
            answer = getattr(worker, what)(*arguments)
            gc.collect()
            pipe.send(answer)


Workers: TypeAlias = Mapping[str, Worker | RemoteWorker]


@contextmanager
def start_workers(
    makes: Mapping[str, Make], *, one_process: bool, threads: int | None = None
) -> Iterator[Workers]:
    """Start a worker for each method, by its name; by default of as many threads as torch has."""
    if one_process:
        yield {name: Worker(make) for name, make in makes.items()}
        return
    others = {name: RemoteWorker(make, threads) for name, make in makes.items()}
    try:
        yield others
    finally:
        for other in others.values():
            other.leave()


@dataclass(frozen=True)
class Entry:
    """Job of one method in a comparison."""

    method: str
    job: Job
    burst: int = 1
    """Timed runs per turn."""
    unseen: int = 0
    """Untimed runs before them, to warm up the caches."""


def compare(
    entries: Mapping[str, Entry], workers: Workers, **limits: Any
) -> tuple[dict[str, Rounds], dict[str, str]]:
    """Time entries in turns by `interleave`: seconds by the name shown, and why others are missing.

    The workers have the names of methods.
    """
    jobs: dict[str, list[Job]] = {}
    for entry in entries.values():
        jobs.setdefault(entry.method, []).append(entry.job)
    reasons = {name: workers[name].prepare(its) for name, its in jobs.items()}
    absent, actions = {}, {}
    for shown, entry in entries.items():
        if (reason := reasons[entry.method]) is not None:
            absent[shown] = reason
        else:
            turn = partial(workers[entry.method].take, entry.job)
            actions[shown] = Action(turn, burst=entry.burst, unseen=entry.unseen)
    return interleave(actions, **limits), absent
