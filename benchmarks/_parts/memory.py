# SPDX-License-Identifier: Apache-2.0
"""Peak memory of training and of prediction, each measured in a process of its own.

Two figures. *Tensors*: the largest sum of memory allocated by torch and not freed,
counted from nothing before the network was built, so that parameters, optimiser state, gradients,
draws and activations are all in it; over the last of three steps, when the state is steady. On a
CPU from the profiler's allocation events, on a GPU (over all three) from `torch.cuda`. *Process*:
growth of the resident set's peak over three steps, from after the imports and a small network's
first step; on Linux and without a GPU only.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import pyro_bbb as bbb
from _parts.budget import Budget
from _parts.methods import METHODS
from _parts.pyro_methods import guided
from _parts.tasks import Method, Work, images
from _parts.timing import Take

STEADY = "steady"
Task: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Peak:
    """Bytes at the worst moment."""

    tensors: int = 0
    process: int | None = None
    returned: int = 0
    """Size of the result, which is part of the tensors."""
    absent: str | None = None

    @property
    def beyond(self) -> int:
        """Tensors at the worst moment that are not part of the result."""
        return self.tensors - self.returned


def memory(
    budget: Budget, device: str, threads: int
) -> tuple[dict[str, Peak], dict[tuple[int, int], Peak]]:
    """Measure peaks of training steps by method, and of `pyro_bbb.predict` by draws and inputs.

    Of predictions the model's own tensors are not counted.
    """
    wide = asdict(Work(hidden=budget.memory_width, device=device))
    first = asdict(Work(hidden=budget.widths[0], device=device))
    tasks: list[Task] = [{"train": name, "work": wide} for name in budget.memory_of]
    for samples, inputs in budget.memory_predictions:
        tasks.append({"samples": samples, "inputs": inputs, "work": first})
    groups = [tasks] if budget.one_process else [[task] for task in tasks]
    peaks = [peak for group in groups for peak in _in_subprocess(group, threads)]
    split = len(budget.memory_of)
    return (
        dict(zip(budget.memory_of, peaks[:split], strict=True)),
        dict(zip(budget.memory_predictions, peaks[split:], strict=True)),
    )


def _in_subprocess(tasks: list[Task], threads: int) -> list[Peak]:
    """Measure the tasks' peaks by this file in a fresh process."""
    return [Peak(**each) for each in in_subprocess(__name__, threads, tasks)]


def in_subprocess(module: str, threads: int, order: Any) -> Any:
    """The last line that a module prints for an order, both JSON, in a fresh process."""
    command = [sys.executable, "-m", module, str(threads), json.dumps(order)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # the same pyro_bbb
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"measuring memory failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _measure(task: Task) -> Peak:
    work = Work(**task["work"])
    if "train" in task:
        return _of_training(METHODS[task["train"]], work)
    return _of_prediction(work, task["samples"], task["inputs"])


def _of_training(method: Method, work: Work) -> Peak:
    small = method.prepare(Work(hidden=8, batch=2, device=work.device))  # loads what is needed
    if isinstance(small, str):
        return Peak(absent=small)
    del small
    return peak_of_three_steps(lambda: method.train(work).take, work.device)


def peak_of_three_steps(start: Callable[[], Take], device: str) -> Peak:
    """Measure what the process takes for three steps, then what torch's tensors do."""
    before = _resident_peak()
    _three_steps(start)
    after = _resident_peak()
    process = None if before is None or after is None else after - before
    gc.collect()
    tensors, _ = tensor_peak(lambda: _three_steps(start), device)
    return Peak(tensors, process)


def _three_steps(start: Callable[[], Take]) -> None:
    """Take three steps from nothing."""
    taken = count(1)

    def meter(step: Callable[[], Any]) -> None:
        with record_function(STEADY) if next(taken) == 3 else nullcontext():
            step()

    start()(3, meter)


def _of_prediction(work: Work, samples: int, inputs: int) -> Peak:
    (x, _), (model, guide) = images(inputs, device=work.device), guided(work)
    allocated: list[Any] = []  # the result outlives the measurement

    def run() -> None:
        with record_function(STEADY):
            allocated.append(bbb.predict(model, guide, x, num_samples=samples))

    peak, left = tensor_peak(run, work.device)
    return Peak(peak, returned=left)


def tensor_peak(run: Callable[[], object], device: str) -> tuple[int, int]:
    """Measure the peak of tensor bytes since ``run`` entered `STEADY`, and the bytes at the end."""
    if device != "cpu":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        at_most = torch.cuda.max_memory_allocated(device)
        return at_most - before, torch.cuda.memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    allocated, peak, steady = 0, 0, False
    for event in events:
        steady |= event.name() == STEADY
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated) if steady else 0
    return peak, allocated


def _resident_peak() -> int | None:
    """Return the largest resident set of this process so far, in bytes.

    `resource.getrusage` would count the parent's as well, which a child inherits on Linux.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return 1024 * int(lines["VmHWM"].split()[0])


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    print(json.dumps([asdict(_measure(task)) for task in json.loads(sys.argv[2])]))
