# SPDX-License-Identifier: Apache-2.0
"""Scaling of training over processes: measured on two cores, and modelled for more.

    python benchmarks/scaling.py [--output results/scaling]

Steps of `fit` on a 784-400-400-10 classifier by one process with one thread, one with two, and two
with one each, started by `torchrun`. From these: weak scaling (constant examples per process),
strong scaling (constant examples in all), the time and the bytes of an all-reduce, and a model of
a step at up to 1,024. ``scaling.json`` goes to ``--output``; `docs/scaling.md` shows one. Nothing
else should run on the machine meanwhile.
"""

import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

HERE = Path(__file__).parent
LAYOUTS = {"1 x 1": (1, 1), "1 x 2": (1, 2), "2 x 1": (2, 1)}  # processes, threads of each
WORKERS = (1, 2, 8, 64, 256, 1024)
BYTES = 4  # of a number in single precision


@dataclass(frozen=True)
class Config:
    """Settings of one run."""

    batch_size: int = 128
    """Examples of each process in weak scaling; half the examples of a step in strong scaling."""
    width: int = 400
    """Units of each of two hidden layers."""
    steps: int = 20
    """Steps of an epoch."""
    epochs: int = 7
    """Timed epochs, of which the median counts."""
    latency: float = 50e-6
    """Seconds that a message takes in the network of the model."""
    bandwidth: float = 3e9
    """Bytes per second that it carries from each process; 25 Gbit/s are 3e9."""
    output: Path = Path("results/scaling")
    """Folder for results."""
    smoke: bool = False
    """Run on tiny sizes, to test that the program works."""


def main(config: Config) -> dict[str, Any]:
    """Measure, model, write; returns the content of ``scaling.json``."""
    if config.smoke:
        config = Config(8, 8, 2, 1, config.latency, config.bandwidth, config.output, True)
    b = config.batch_size
    sizes = {"1 x 1": [b // 2, b, 2 * b, 4 * b], "1 x 2": [b, 2 * b], "2 x 1": [b, 2 * b]}
    measured = {name: launch(config, *LAYOUTS[name], sizes[name]) for name in LAYOUTS}
    content = {
        "config": asdict(config) | {"output": str(config.output)},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "measured": measured,
        "model": model(config, measured),
    }
    config.output.mkdir(parents=True, exist_ok=True)
    path = config.output / "scaling.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(path.read_text())
    return content


def launch(config: Config, size: int, threads: int, batch_sizes: list[int]) -> dict[str, Any]:
    """Run `ddp_worker.py` in several processes and return its measurements."""
    task = {"batch_sizes": batch_sizes, "width": config.width, "threads": threads}
    task |= {"steps": config.steps, "epochs": config.epochs}
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(size)] if size > 1 else []
    done = subprocess.run(
        [sys.executable, *torchrun, str(HERE / "_parts" / "ddp_worker.py"), json.dumps(task)],
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def model(config: Config, measured: dict[str, Any]) -> dict[str, Any]:
    """Model the seconds of a step by number of workers: one worker's step, and a ring all-reduce.

    A worker's own time is a line in its examples, fitted to one process with one thread. A ring of
    R workers takes 2 (R - 1) messages one after the other, in which each sends 2 (R - 1) / R of the
    gradient's bytes.
    """
    alone = measured["1 x 1"]["steps"]
    examples, seconds = (np.array(list(map(float, x))) for x in (alone, alone.values()))
    per_example, fixed = np.polyfit(examples, seconds, 1)
    volume = BYTES * measured["2 x 1"]["floats"]
    b, rows = config.batch_size, []
    for workers in WORKERS:
        messages = 2 * (workers - 1)
        ring = messages * (config.latency + volume / workers / config.bandwidth)
        weak, strong = fixed + per_example * b, fixed + per_example * 2 * b / workers
        rows.append(
            {
                "workers": workers,
                "sum": ring,
                "weak": weak + ring,
                "strong": strong + ring,
                "sent_bytes": messages * volume / workers,
            }
        )
    return {"fixed": float(fixed), "per_example": float(per_example), "rows": rows}


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
