# SPDX-License-Identifier: Apache-2.0
"""Speed and memory of pyro_bbb, plain PyTorch, stock Pyro and other libraries.

    python benchmarks/run.py [--quick] [--only small tables] [--threads 2]

All methods do the same work in one run: a 784-H-H-10 ReLU classifier (and LeNet-5) on inputs of
MNIST's shape. Methods, each in a process of its own, take turns in every round, in rotating
order; ratios are taken within rounds and relate to a deterministic network with fused Adam. Suites:

- ``steps``: single training steps over widths, minibatch sizes, draws per step and estimators;
- ``epoch``: an epoch of `fit`, and the sum of its steps;
- ``predict``: 100 posterior draws for one input, for a hundred, for ten thousand;
- ``small``: a step of small networks in runs of ``fit``, beside NumPyro, and of networks of 115
  to ten million weights (``sizes.png``);
- ``guides``: a step of natural gradients and of a variational last layer, and predictions of it and
  of Laplace's approximation;
- ``tables``: whole fits of estimators to tables of 353 to 100,000 rows;
- ``memory``: the peak of a training step, and of predictions, each in a process of its own.

``pip install "pyro-bbb[benchmarks]"`` brings the other libraries; one that is missing, or broken by
the versions here, is listed with the reason. With ``PYRO_BBB_DATA`` the epoch is one of MNIST.
Printed tables end with the aims; ``benchmarks.json`` and ``benchmarks.png`` go to ``--output``.
Nothing else should run on the machine meanwhile. The GPU's path synchronises around every timing.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import tyro
from _parts.budget import DEFAULT, QUICK, SMOKE
from _parts.figure import draw, draw_sizes
from _parts.guides import guides
from _parts.memory import memory
from _parts.predict import predict
from _parts.report import of_aims, of_prediction_memory, of_times, of_training_memory, record
from _parts.results import Results
from _parts.small import small
from _parts.suites import epoch, steps
from _parts.tables import tables
from tqdm import tqdm

Suite: TypeAlias = Literal["small", "guides", "tables", "steps", "epoch", "predict", "memory"]
TIMED: dict[str, Callable[..., Any]] = {
    "small": small,
    "guides": guides,
    "tables": tables,
    "steps": steps,
    "epoch": epoch,
    "predict": predict,
}


@dataclass(frozen=True)
class Config:
    """Settings of one run."""

    only: tuple[Suite, ...] = ("small", "guides", "tables", "steps", "epoch", "predict", "memory")
    """Suites to run."""
    quick: bool = False
    """Fewer sizes and repetitions: some minutes instead of more than an hour."""
    device: str = "cpu"
    """Device, cpu or cuda."""
    threads: int = 2
    """Processor threads."""
    output: Path = Path("results/benchmarks")
    """Folder for results."""
    smoke: bool = False
    """Run everything on tiny sizes, to test that the program works."""


def main(config: Config) -> dict[str, Any]:
    """Measure, print the tables, write the results; returns the content of ``benchmarks.json``."""
    torch.set_num_threads(config.threads)
    config.output.mkdir(parents=True, exist_ok=True)
    results = Results(SMOKE if config.smoke else QUICK if config.quick else DEFAULT)
    results.load_before = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    for suite in tqdm(config.only, desc="suites", disable=None):
        began = time.perf_counter()
        for text in _measure(suite, results, config):
            tqdm.write(f"\n{text}")
        results.seconds[suite] = round(time.perf_counter() - began, 1)
    print(f"\n{of_aims(results)}")
    content = record(results, asdict(config))
    path = config.output / "benchmarks.json"
    path.write_text(json.dumps(content, indent=2, default=str, allow_nan=False) + "\n", "utf-8")
    draw(results, path.with_suffix(".png"))
    draw_sizes(results.of("small"), path.with_name("sizes.png"))
    print(f"\n{path}")
    return content


def _measure(suite: str, results: Results, config: Config) -> list[str]:
    """Run one suite and return its tables."""
    budget, device = results.budget, config.device
    if suite in TIMED:
        comparisons = TIMED[suite](budget, device)
        results.comparisons += comparisons
        return [of_times(each) for each in comparisons]
    peaks = memory(budget, device, config.threads)
    results.training_memory, results.prediction_memory = peaks
    return [of_training_memory(results), of_prediction_memory(results)]


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
