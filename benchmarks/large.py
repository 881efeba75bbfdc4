# SPDX-License-Identifier: Apache-2.0
"""Training and prediction of large networks, beside LoRA and beside deterministic training.

    python benchmarks/large.py [--networks vit gpt2] [--batch 2]

A ViT-B/16 (86 million weights, images of 224 x 224) and a GPT-2 (124 million, sequences of 128
words), with random weights. Memory is the peak of the third training step, in a process for each
method; time is that of steps in turns, as ratios. Adapters are of rank 8, on queries and values
(GPT-2: on its packed projection), by `pyro_bbb.adapt` and by `peft`, which has no posterior. All
weights are trained by Adam, by `bayesianize`, and so by natural gradients. A prediction of ten
draws has its adapters in the last two blocks.
"""

import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro
from _parts.isolated_workers import Entry, compare, start_workers
from _parts.large import METHODS, Job, peaks, start
from _parts.timing import Rounds

from pyro_bbb._utils.tables import as_markdown

FLOORS = {  # what each is compared with
    "adapt": "LoRA by peft",
    "all weights, bayesianize": "all weights, Adam",
    "all weights, IVON": "all weights, Adam",
    "10 draws": "one pass",
}
TRAINED = [name for name in METHODS if name not in ("one pass", "10 draws")]


@dataclass(frozen=True)
class Config:
    """Settings of one run."""

    networks: tuple[str, ...] = ("vit", "gpt2")
    """Networks: vit, gpt2."""
    batch: int = 2
    """Images or sequences per step."""
    rounds: int = 3
    """Rounds of timing, in each of which every method takes a step."""
    threads: int = 1
    """Threads of torch."""
    device: str = "cpu"
    """Device, cpu or cuda."""
    output: Path = Path("results/large")
    """Folder for ``large.json``."""
    smoke: bool = False
    """Run on tiny networks, to test that the program works."""


def run(config: Config, network: str) -> dict[str, Any]:
    """Memory and time of all methods on one network."""
    job = Job(network, config.batch, config.smoke, config.device)
    groups = [TRAINED] if config.smoke else [[name] for name in TRAINED]
    memory = {}
    for names in groups:
        memory |= {name: asdict(found) for name, found in peaks(names, job, config.threads).items()}
    times: dict[str, Rounds] = {}
    for floors in [FLOORS] if config.smoke else [{name: FLOORS[name]} for name in FLOORS]:
        found = seconds(config, job, {*floors, *floors.values()})
        times |= {f"{name} / {by}": [found[name], found[by]] for name, by in floors.items()}
    ratios = {
        name: {
            "time": time_ratio(*times[f"{name} / {floor}"]),
            "memory": _ratio(memory, name, floor, "tensors"),
            "process": _ratio(memory, name, floor, "process"),
        }
        for name, floor in FLOORS.items()
    }
    return {"memory": memory, "seconds": times, "ratios": ratios}


def seconds(config: Config, job: Job, methods: Iterable[str]) -> dict[str, Rounds]:
    """Seconds of methods that take turns."""
    makes = {each: partial(start, each) for each in methods}
    with start_workers(makes, one_process=config.smoke, threads=config.threads) as workers:
        entries = {each: Entry(each, job) for each in makes}
        options = {"seconds": 0.0, "min_rounds": config.rounds, "warmup": 1}
        found, absent = compare(entries, workers, **options)
    if absent:
        raise RuntimeError(f"methods are missing: {absent}")
    return found


def time_ratio(ours: Rounds, floor: Rounds) -> float:
    """The median over rounds of the ratio of the seconds."""
    pairs = zip(ours, floor, strict=True)
    return median(median(mine) / median(theirs) for mine, theirs in pairs)


def _ratio(memory: dict[str, Any], name: str, floor: str, of: str) -> float | None:
    """A ratio of peaks; none in a process whose peak an earlier method set, see ``--smoke``."""
    if name not in memory or not memory[floor][of]:
        return None
    return float(memory[name][of] / memory[floor][of])


def table(results: dict[str, Any]) -> str:
    """The ratios as Markdown."""
    rows = [
        [network, name, FLOORS[name], *("–" if x is None else f"{x:.2f}" for x in ratios.values())]
        for network, found in results.items()
        for name, ratios in found["ratios"].items()
    ]
    head = ["network", "method", "beside", "step", "memory, tensors", "memory, process"]
    return as_markdown(head, rows, labels=3)


def main(config: Config) -> dict[str, Any]:
    """Measure, print, write after each network; returns the content of ``large.json``."""
    results: dict[str, Any] = {}
    content = {
        "networks": results,
        "config": asdict(config) | {"output": None},
        "torch": str(torch.__version__),
        "processor": platform.processor() or platform.machine(),
    }
    config.output.mkdir(parents=True, exist_ok=True)
    for network in config.networks:
        results[network] = run(config, network)
        (config.output / "large.json").write_text(json.dumps(content, indent=2) + "\n")
    print(table(results))
    return content


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
