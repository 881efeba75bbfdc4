# SPDX-License-Identifier: Apache-2.0
"""Interleaved timing: methods take turns in every round, in rotating order.

Other load on the machine affects all methods alike; ratios are taken within rounds.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any, TypeAlias

import torch

Rounds: TypeAlias = list[list[float]]  # seconds, of each round
Meter: TypeAlias = Callable[[Callable[[], Any]], Any]  # runs what it is given, and measures it
Take: TypeAlias = Callable[[int, Meter], None]  # does something so many times through a meter
Turn: TypeAlias = Callable[[int], list[float]]  # does it so many times: the seconds of each


def repeated(run: Callable[[], Any]) -> Take:
    """Make an action that repeats a function."""

    def take(count: int, meter: Meter) -> None:
        for _ in range(count):
            meter(run)

    return take


def timed(take: Take, device: str = "cpu", clock: Callable[[], float] = time.perf_counter) -> Turn:
    """Make a timed action in this process; a CUDA device is waited for. The clock gives seconds."""

    def turn(count: int) -> list[float]:
        times = []

        def meter(run: Callable[[], Any]) -> None:
            synchronise(device)
            began = clock()
            run()
            synchronise(device)
            times.append(clock() - began)

        if count:
            take(count, meter)
        return times

    return turn


@dataclass(frozen=True)
class Action:
    """Action to time."""

    turn: Turn
    burst: int = 1
    """Timed runs per turn."""
    unseen: int = 0
    """Untimed runs before them, to warm up the caches."""


@dataclass(frozen=True)
class Comparison:
    """Times of methods that did the same work."""

    suite: str
    title: str
    floor: str
    """The method in the denominator of ratios."""
    rounds: Mapping[str, Rounds]
    """Seconds by method."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Reasons why others are unavailable."""

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
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = quantiles(values, n=4, method="inclusive")
    return first, third


def interleave(
    actions: Mapping[str, Action],
    *,
    seconds: float,
    min_rounds: int,
    warmup: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Rounds]:
    """Time the actions in turns, each after ``warmup`` untimed runs: seconds by action and round.

    Rounds begin until the time ``seconds`` has passed, and there are ``min_rounds`` at least.
    """
    names = list(actions)
    rounds: dict[str, Rounds] = {name: [] for name in names}
    with no_collection():
        for name in names:
            actions[name].turn(warmup)
        began = clock()
        while len(rounds[names[0]]) < min_rounds or clock() - began < seconds:
            start = len(rounds[names[0]]) % len(names)
            for name in names[start:] + names[:start]:
                action = actions[name]
                rounds[name].append(action.turn(action.unseen + action.burst)[action.unseen :])
            gc.collect()
    return rounds


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
