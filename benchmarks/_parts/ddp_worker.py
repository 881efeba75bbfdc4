# SPDX-License-Identifier: Apache-2.0
"""Process of `scaling.py`: times training steps, alone or distributed; rank 0 prints JSON."""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pyro
import torch
from pyro.distributions import Normal

import pyro_bbb as bbb
from pyro_bbb._utils.distributed import Processes, processes

COUNTERS = Path("/proc/net/dev")  # bytes that went through each network interface, on Linux


@dataclass(frozen=True)
class Task:
    """Measurements of a process."""

    batch_sizes: list[int]  # examples per step, in all processes together
    width: int  # units of each of two hidden layers
    steps: int  # steps of an epoch
    epochs: int  # timed epochs; their median counts
    threads: int


def main(task: Task) -> dict[str, Any]:
    """Measure seconds per step by minibatch size, and the communication between processes."""
    torch.set_num_threads(task.threads)
    found: dict[str, Any] = {"steps": {}}
    for batch_size in task.batch_sizes:  # the median epoch, after one to warm up
        seconds = train(task, batch_size, task.epochs + 1).seconds[1:]
        found["steps"][str(batch_size)] = median(seconds) / task.steps
    team = processes()
    if team.size > 1:
        found["floats"] = floats = sum(p.numel() for p in make(task.width, 1)[1].parameters())
        found["sum_seconds"] = summing(team, floats)
        found["smallest_sum_seconds"] = summing(team, 1)
        found["bytes_per_step"] = traffic(task, team)
    return found


def make(width: int, num_data: int) -> tuple[bbb.BayesianModel, bbb.AutoSoftplusNormal]:
    """Return a 784-H-H-10 classifier and its guide."""
    pyro.set_rng_seed(0)
    network = bbb.BayesianMLP([784, width, width, 10], prior=Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=num_data)
    return model, bbb.AutoSoftplusNormal(model)


def train(task: Task, batch_size: int, epochs: int) -> bbb.History:
    """So many epochs of steps on noise."""
    torch.manual_seed(0)
    count = task.steps * batch_size
    data = torch.rand(count, 784), torch.randint(10, (count,))
    parts = make(task.width, count)
    return bbb.fit(*parts, data, epochs=epochs, batch_size=batch_size, progress=False)


def summing(team: Processes, floats: int, times: int = 20) -> float:
    """Median seconds of a sum over the processes."""
    x, seconds = torch.zeros(floats), []
    for _ in range(times):
        team.sums(0.0)  # all begin together
        began = time.perf_counter()
        team.all_reduce(x)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def traffic(task: Task, team: Processes) -> float | None:
    """Measure the bytes sent in a step; None where the system does not count them."""
    if not COUNTERS.exists():
        return None
    sent = []
    for epochs in (1, 2):  # what goes before and after the steps is in both
        team.sums(0.0)
        before = sent_bytes()
        train(task, min(task.batch_sizes), epochs)
        team.sums(0.0)
        sent.append(sent_bytes() - before)
    return (sent[1] - sent[0]) / task.steps


def sent_bytes() -> int:
    """Bytes that this machine has sent to itself."""
    lines = COUNTERS.read_text().splitlines()
    loopback = next(line for line in lines if line.strip().startswith("lo:"))
    return int(loopback.split(":")[1].split()[8])


if __name__ == "__main__":
    task = Task(**json.loads(sys.argv[1]))
    result = main(task)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(result | {"task": asdict(task)}))
