# SPDX-License-Identifier: Apache-2.0
"""Peak memory of training steps, each method's measured in a process of its own.

Two figures. *Tensors*: the largest sum of memory allocated by torch and not freed,
counted from nothing before the network was built, so that parameters, optimiser state, gradients,
draws and activations are all in it; over the last of three steps, when the state is steady. On a
CPU from the profiler's allocation events, on a GPU (over all three) from `torch.cuda`. *Process*:
growth of the resident set's peak over three steps, from after the imports and a small network's
first step; on Linux and without a GPU only.
"""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from _parts.budget import Budget
from _parts.methods import METHODS, Work, started
from _parts.timing import Take, fresh_process

STEADY = "steady"


@dataclass(frozen=True)
class Peak:
    """Bytes at the worst moment."""

    tensors: int = 0
    process: int | None = None
    absent: str | None = None


def memory(budget: Budget, device: str, threads: int) -> dict[str, Peak]:
    """Measure peaks of training steps by method."""
    work = Work(hidden=budget.memory_width, device=device)
    measure = _measure if budget.one_process else in_fresh_process(threads, _measure)
    return {name: measure(name, work) for name in budget.memory_of}


def in_fresh_process(threads: int, function: Callable[..., Peak]) -> Callable[..., Peak]:
    """Make a function that runs each call in a process of its own."""

    def call(*arguments: Any) -> Peak:
        with fresh_process(threads) as process:
            return process.submit(function, *arguments).result()

    return call


def _measure(name: str, work: Work) -> Peak:
    small = started(name, Work(hidden=8, batch=2, device=work.device))  # loads what is needed
    if isinstance(small, str):
        return Peak(absent=small)
    del small
    return peak_of_three_steps(lambda: METHODS[name][0](work).take, work.device)


def peak_of_three_steps(start: Callable[[], Take], device: str) -> Peak:
    """Measure what the process takes for three steps, then what torch's tensors do."""
    gc.enable()  # which a timed process leaves off
    before = _resident_peak()
    _three_steps(start)
    after = _resident_peak()
    process = None if before is None or after is None else after - before
    gc.collect()
    return Peak(tensor_peak(lambda: _three_steps(start), device), process)


def _three_steps(start: Callable[[], Take]) -> None:
    """Take three steps from nothing."""
    taken = count(1)

    def meter(step: Callable[[], Any]) -> None:
        with record_function(STEADY) if next(taken) == 3 else nullcontext():
            step()

    start()(3, meter)


def tensor_peak(run: Callable[[], object], device: str) -> int:
    """Measure the peak of tensor bytes since ``run`` entered `STEADY`."""
    if device != "cpu":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    allocated, peak, steady = 0, 0, False
    for event in events:
        steady |= event.name() == STEADY
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated) if steady else 0
    return peak


def _resident_peak() -> int | None:
    """Return the largest resident set of this process so far, in bytes.

    `resource.getrusage` would count the parent's as well, which a child inherits on Linux.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return 1024 * int(lines["VmHWM"].split()[0])
