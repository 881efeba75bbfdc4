# SPDX-License-Identifier: Apache-2.0
"""Speed and memory of pyro_bbb, plain PyTorch, stock Pyro and other libraries.

    python benchmarks/run.py [--only small tables] [--threads 2]

All methods do the same work in one run: a 784-H-H-10 ReLU classifier on inputs of MNIST's shape.
Methods, each in a process of its own, take turns in every round, in rotating order; ratios are
taken within rounds and relate to a deterministic network with fused Adam. Suites:

- ``small``: a step of small networks in runs of ``fit``, beside NumPyro, and of networks of 115
  to ten million weights (``sizes.png``);
- ``tables``: whole fits of estimators to tables of 353 to 100,000 rows;
- ``steps``: single training steps over widths, draws per step and estimators (``benchmarks.png``);
- ``epoch``: an epoch of `fit`, and the sum of its steps;
- ``predict``: 100 posterior draws for one input, for a hundred, for ten thousand;
- ``memory``: the peak of a training step, in a process of its own.

``pip install -e ".[cli]" --group benchmarks`` brings the other libraries; one that is missing, or
broken by the versions here, is listed with the reason. With ``PYRO_BBB_DATA`` the epoch is one of
MNIST.
Printed tables end with the aims; ``benchmarks.json`` and the pictures go to ``--output``.
Nothing else should run on the machine meanwhile. The GPU's path synchronises around every timing.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import tyro
from _parts.budget import SMOKE, Budget
from _parts.memory import memory
from _parts.report import (
    Results,
    aims_table,
    draw_sizes,
    draw_widths,
    memory_table,
    record,
    times_table,
)
from _parts.small import small
from _parts.suites import epoch, predict, steps, tables
from _parts.timing import Comparison
from tqdm import tqdm

Suite: TypeAlias = Literal["small", "tables", "steps", "epoch", "predict", "memory"]
TIMED: dict[str, Callable[[Budget, str], Iterator[Comparison]]] = {
    "small": small,
    "tables": tables,
    "steps": steps,
    "epoch": epoch,
    "predict": predict,
}


@dataclass(frozen=True)
class Config:
    """Settings of one run."""

    only: tuple[Suite, ...] = ("small", "tables", "steps", "epoch", "predict", "memory")
    """Suites to run."""
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
    results = Results(SMOKE if config.smoke else Budget())
    results.load_before = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    for suite in tqdm(config.only, desc="suites", disable=None):
        began = time.perf_counter()
        if suite == "memory":
            results.memory = memory(results.budget, config.device, config.threads)
            tqdm.write(f"\n{memory_table(results)}")
        else:
            for comparison in TIMED[suite](results.budget, config.device):
                results.comparisons.append(comparison)
                tqdm.write(f"\n{times_table(comparison)}")
        results.seconds[suite] = round(time.perf_counter() - began, 1)
    print(f"\n{aims_table(results)}")
    content = record(results, asdict(config))
    path = config.output / "benchmarks.json"
    path.write_text(json.dumps(content, indent=2, default=str, allow_nan=False) + "\n", "utf-8")
    draw_widths(results.widths(), path.with_suffix(".png"))
    draw_sizes(results.of("small"), path.with_name("sizes.png"))
    print(f"\n{path}")
    return content


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
