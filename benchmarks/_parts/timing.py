# SPDX-License-Identifier: Apache-2.0
"""Paired timing: in every round each method takes its turn, in rotating order.

Other load on the machine affects all methods alike, and ratios are taken within rounds. Each method
has a process of its own: in one process blocks freed by one method would serve the others, and the
costs of allocation would depend on the set of methods.
"""

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeAlias

import numpy as np
import torch

Rounds: TypeAlias = list[list[float]]  # seconds, of each round
Meter: TypeAlias = Callable[[Callable[[], Any]], Any]  # runs what it is given, and measures it
Take: TypeAlias = Callable[[int, Meter], None]  # does something so many times through a meter
Make: TypeAlias = Callable[[Any], Take | str]  # from a job to its action, or why there is none
SETTLE = 0.02  # seconds, in which the threads of the turn before stop to wait for work


@dataclass(frozen=True)
class Comparison:
    """Times of methods that did the same work."""

    suite: str
    title: str
    floor: str  # the method in the denominator of ratios
    rounds: Mapping[str, Rounds]  # seconds by method
    absent: Mapping[str, str] = field(default_factory=dict)  # reasons why others are unavailable

    def times(self, name: str) -> list[float]:
        """Every time measured, in milliseconds."""
        return [1e3 * seconds for turn in self.rounds[name] for seconds in turn]

    def ratio(self, name: str, to: str | None = None) -> float:
        """Return the median over rounds of the ratio of two methods' times."""
        return median(self.ratios(name, to))

    def ratios(self, name: str, to: str | None = None) -> list[float]:
        """Ratio of the two medians of each round."""
        pairs = zip(self.rounds[name], self.rounds[to or self.floor], strict=True)
        return [median(mine) / median(others) for mine, others in pairs]


def interquartile(values: list[float]) -> tuple[float, float]:
    """First and third quartile; of a single value itself."""
    first, third = np.quantile(values, [0.25, 0.75]).tolist()
    return first, third


def repeated(run: Callable[[], Any]) -> Take:
    """Make an action that repeats a function."""

    def take(count: int, meter: Meter) -> None:
        for _ in range(count):
            meter(run)

    return take


def interleave(
    turns: Mapping[str, Callable[[int], list[float]]],
    *,
    seconds: float = 0.0,
    min_rounds: int = 1,
    warmup: int = 1,
    burst: int = 1,
    unseen: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Rounds]:
    """Time actions in turns, after ``warmup`` untimed runs; returns seconds by action and round.

    A turn does an action so many times and returns the seconds of each: ``unseen`` runs that do not
    count, as the first ones take longer, and ``burst`` that do. Rounds begin until so many seconds
    have passed, and there are ``min_rounds`` at least.
    """
    names = list(turns)
    rounds: dict[str, Rounds] = {name: [] for name in names}
    with no_collection():
        for name in names:
            turns[name](warmup)
        began = clock()
        while len(rounds[names[0]]) < min_rounds or clock() - began < seconds:
            start = len(rounds[names[0]]) % len(names)
            for name in names[start:] + names[:start]:
                rounds[name].append(turns[name](unseen + burst)[unseen:])
            gc.collect()
    return rounds


class Methods:
    """Methods by name, each in a process of its own, or all in this one, which is quicker.

    They make actions from jobs. A process has as many threads as torch has here, unless told
    otherwise; a CUDA device is waited for around each run.
    """

    def __init__(
        self,
        makes: Mapping[str, Make],
        *,
        one_process: bool = False,
        threads: int | None = None,
        device: str = "cpu",
    ) -> None:
        self.makes, self.device = makes, device
        self._threads = threads or torch.get_num_threads()
        self._processes: dict[str, ProcessPoolExecutor] | None = None if one_process else {}

    def __enter__(self) -> "Methods":
        """Start no process yet; each starts at its first call."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes."""
        for process in (self._processes or {}).values():
            process.shutdown()

    def compare(
        self, jobs: Mapping[str, tuple[str, Any]], **limits: Any
    ) -> tuple[dict[str, Rounds], dict[str, str]]:
        """Time ``(method, job)`` by the name shown; returns seconds, and why others are absent.

        Jobs are hashable. The limits are options of `interleave`.
        """
        of_method: dict[str, list[Any]] = {}
        for method, job in jobs.values():
            of_method.setdefault(method, []).append(job)
        reasons = {
            method: self._call(method, _prepare, method, self.makes[method], own)
            for method, own in of_method.items()
        }
        turns = {}
        for shown, key in jobs.items():
            if reasons[key[0]] is None:
                turns[shown] = lambda count, key=key: self._turn(key, count)
        absent = {k: why for k, (method, _) in jobs.items() if (why := reasons[method]) is not None}
        return interleave(turns, **limits), absent

    def _turn(self, key: tuple[str, Any], count: int) -> list[float]:
        if self._processes is not None:
            time.sleep(SETTLE)
        found: list[float] = self._call(key[0], _timed, key, count, self.device)
        return found

    def _call(self, method: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._processes is None:
            return function(*arguments)
        if method not in self._processes:
            self._processes[method] = fresh_process(self._threads)
        return self._processes[method].submit(function, *arguments).result()


def fresh_process(threads: int) -> ProcessPoolExecutor:
    """One new process, of so many threads and cores, that collects garbage between calls only."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, spawn, initializer=_start, initargs=(threads,))


def _start(threads: int) -> None:
    torch.set_num_threads(threads)
    if hasattr(os, "sched_setaffinity"):  # other libraries have threads of their own
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    gc.disable()


_takes: dict[tuple[str, Any], Take] = {}  # of this process, by method and job


def _prepare(method: str, make: Make, jobs: list[Any]) -> str | None:
    """Prepare a method's jobs in place of its earlier ones; return the reason if that fails."""
    for key in [key for key in _takes if key[0] == method]:
        del _takes[key]
    for job in jobs:
        take = make(job)
        if isinstance(take, str):
            return take
        _takes[method, job] = take
    return None


def _timed(key: tuple[str, Any], count: int, device: str) -> list[float]:
    times = timed(_takes[key], count, device)
    gc.collect()
    return times


def timed(
    take: Take, count: int, device: str = "cpu", clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Seconds of each of ``count`` runs; a CUDA device is waited for."""
    times: list[float] = []

    def meter(run: Callable[[], Any]) -> None:
        synchronise(device)
        began = clock()
        run()
        synchronise(device)
        times.append(clock() - began)

    if count:
        take(count, meter)
    return times


def synchronise(device: str) -> None:
    """Wait for the GPU's queue."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage once, then disable its collection."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
