# SPDX-License-Identifier: Apache-2.0
"""Training steps in a CUDA graph: Bayes by Backprop and an ordinary network.

    python benchmarks/cuda_graph.py [--device cuda]

784-H-H-10 ReLU classifiers, minibatches of 128 out of 50,000 inputs that lie on the GPU, one draw
of the weights. Bayes by Backprop is `fit(cuda_graph=True)`, data, schedules and record included; a
step's time is that of a whole epoch, the fastest after the first, divided by its steps. The
ordinary network is trained by fused Adam in a graph of its own, minibatches copied likewise.
Without a GPU nothing is captured; the run then tests only that the program works.
"""

import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro.distributions as dist
import torch
import tyro
from torch import Tensor, nn

import pyro_bbb as bbb
from pyro_bbb.training._captured import CudaDevice

PRIORS = {
    "scale mixture": lambda: bbb.ScaleMixtureNormal(0.25, 1.0, math.exp(-6)),
    "Gaussian": lambda: dist.Normal(0.0, 1.0),
}


@dataclass(frozen=True)
class Config:
    """Settings of one run."""

    widths: tuple[int, ...] = (400, 1200)
    """Units of each of the two hidden layers."""
    examples: int = 50_000
    """Inputs in the data."""
    epochs: int = 3
    """Epochs of each training; the first, which captures, does not count."""
    device: str = "cuda"
    """Device, cpu or cuda."""
    output: Path = Path("results/cuda_graph")
    """Folder for ``cuda_graph.json``."""


def synchronised(device: str) -> float:
    """Synchronize the device and return the time."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def bayesian(width: int, prior: Any, data: tuple[Tensor, Tensor], config: Config) -> float:
    """Measure milliseconds per step of `fit`."""
    network = bbb.BayesianMLP([784, width, width, 10], prior=prior)
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=len(data[0]))
    guide = bbb.AutoSoftplusNormal(model)
    on_gpu = torch.device(config.device).type == "cuda"
    options = {"device": config.device, "cuda_graph": on_gpu, "progress": False, "seed": 0}
    history = bbb.fit(model, guide, data, epochs=config.epochs, **options)
    return 1e3 * min(history.seconds[1:]) * config.epochs / len(history.steps)


def ordinary(width: int, data: tuple[Tensor, Tensor], config: Config) -> float:
    """Measure milliseconds per step of a deterministic network, minibatches copied included."""
    shape = (784, width), (width, width), (width, 10)
    layers = [module for a, b in shape for module in (nn.Linear(a, b), nn.ReLU())]
    network = nn.Sequential(*layers[:-1]).to(config.device)
    on_gpu = torch.device(config.device).type == "cuda"
    optimizer = torch.optim.Adam(network.parameters(), fused=True, capturable=on_gpu)
    x, y = (part.to(config.device) for part in data)
    batch = x[:128].clone(), y[:128].clone()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(network(batch[0]), batch[1]).backward()
        optimizer.step()

    take = captured(step, optimizer, x.device) if on_gpu else step
    times = []
    for _ in range(config.epochs):
        began = synchronised(config.device)
        parts = torch.randperm(len(x), device=x.device).split(128)
        for rows in parts[: len(x) // 128]:
            for buffer, part in zip(batch, (x, y), strict=True):
                buffer.copy_(part[rows])
            take()
        times.append((synchronised(config.device) - began) / (len(x) // 128))
    return 1e3 * min(times[1:])


def captured(
    step: Callable[[], None], optimizer: torch.optim.Optimizer, device: torch.device
) -> Callable[[], None]:
    """Capture the step as a CUDA graph, after three that warm up."""
    stream = CudaDevice(device)
    for _ in range(3):
        stream.run(step)
    optimizer.zero_grad(set_to_none=True)
    return stream.capture(step)


def main(config: Config) -> dict[str, Any]:
    """Measure, print and write; returns the content of ``cuda_graph.json``."""
    torch.manual_seed(0)
    data = torch.rand(config.examples, 784), torch.randint(10, (config.examples,))
    rows: dict[str, Any] = {}
    for width in config.widths:
        row = {name: bayesian(width, prior(), data, config) for name, prior in PRIORS.items()}
        row["ordinary"] = ordinary(width, data, config)
        rows[str(width)] = row
        for name in PRIORS:
            print(f"width {width}, {name}: {row[name]:.3f} ms, {row[name] / row['ordinary']:.2f}")
        print(f"width {width}, ordinary network: {row['ordinary']:.3f} ms")
    on_gpu = torch.device(config.device).type == "cuda"
    content = {
        "milliseconds_per_step": rows,
        "device": torch.cuda.get_device_name(config.device) if on_gpu else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    config.output.mkdir(parents=True, exist_ok=True)
    (config.output / "cuda_graph.json").write_text(json.dumps(content, indent=2) + "\n")
    return content


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
