"""Timing side by side: every contender takes its turn in every round, in rotating order.

Whatever else the machine does meets all of them alike; ratios are taken within rounds.
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
    """Calls one function again and again."""

    def take(count: int, meter: Meter) -> None:
        for _ in range(count):
            meter(run)

    return take


def timed(take: Take, device: str = "cpu", clock: Callable[[], float] = time.perf_counter) -> Turn:
    """Times something that is done here.

    Args:
        take: does it.
        device: where the work is done; a CUDA device is waited for.
        clock: where the time comes from, in seconds.
    """

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
    """Something to time."""

    turn: Turn
    burst: int = 1
    """How often it is timed per turn."""
    unseen: int = 0
    """How often it runs before that, to have its data in the caches again."""


@dataclass(frozen=True)
class Comparison:
    """What was measured of contenders that did the same work."""

    suite: str
    title: str
    floor: str
    """The contender to which ratios relate."""
    rounds: Mapping[str, Rounds]
    """Seconds by contender."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Why others are missing."""

    def times(self, name: str) -> list[float]:
        """Every time measured, in milliseconds."""
        return [1e3 * seconds for turn in self.rounds[name] for seconds in turn]

    def ratio(self, name: str, to: str | None = None) -> float:
        """Of one contender's time to another's (the floor's), the median over rounds."""
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
    """Times the actions in turns.

    Args:
        actions: what to time, by name.
        seconds: rounds begin until this time has passed.
        min_rounds: but no fewer than these are taken.
        warmup: untimed runs of each action before the first round.
        clock: where the time comes from, in seconds.

    Returns:
        For each action the times of each round, in seconds.
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
    """Waits until a GPU has done what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection in between, but once before."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
