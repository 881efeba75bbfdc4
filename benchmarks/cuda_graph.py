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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro.distributions as dist
import torch
import tyro
from _parts.methods import BATCH, mlp
from _parts.timing import synchronise
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

    @property
    def on_gpu(self) -> bool:
        """True where steps are captured."""
        return torch.device(self.device).type == "cuda"


def bayesian(width: int, prior: Any, data: tuple[Tensor, Tensor], config: Config) -> float:
    """Measure milliseconds per step of `fit`."""
    network = bbb.BayesianMLP([784, width, width, 10], prior=prior)
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=len(data[0]))
    guide = bbb.AutoSoftplusNormal(model)
    options = {"device": config.device, "cuda_graph": config.on_gpu, "progress": False, "seed": 0}
    history = bbb.fit(model, guide, data, epochs=config.epochs, **options)
    return 1e3 * min(history.seconds[1:]) * config.epochs / len(history.steps)


def ordinary(width: int, data: tuple[Tensor, Tensor], config: Config) -> float:
    """Measure milliseconds per step of a deterministic network, minibatches copied included."""
    network = mlp([784, width, width, 10]).to(config.device)
    optimizer = torch.optim.Adam(network.parameters(), fused=True, capturable=config.on_gpu)
    x, y = (part.to(config.device) for part in data)
    batch = x[:BATCH].clone(), y[:BATCH].clone()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(network(batch[0]), batch[1]).backward()
        optimizer.step()

    take = step
    if config.on_gpu:
        stream = CudaDevice(x.device)
        for _ in range(3):  # warm up
            stream.run(step)
        optimizer.zero_grad(set_to_none=True)
        take = stream.capture(step)
    times = []
    for _ in range(config.epochs):
        synchronise(config.device)
        began = time.perf_counter()
        for rows in torch.randperm(len(x), device=x.device).split(BATCH)[: len(x) // BATCH]:
            for buffer, part in zip(batch, (x, y), strict=True):
                buffer.copy_(part[rows])
            take()
        synchronise(config.device)
        times.append((time.perf_counter() - began) / (len(x) // BATCH))
    return 1e3 * min(times[1:])


def main(config: Config) -> dict[str, Any]:
    """Measure, print and write; returns the content of ``cuda_graph.json``."""
    torch.manual_seed(0)
    data = torch.rand(config.examples, 784), torch.randint(10, (config.examples,))
    rows: dict[str, Any] = {}
    for width in config.widths:
        row = {name: bayesian(width, prior(), data, config) for name, prior in PRIORS.items()}
        row["ordinary"] = ordinary(width, data, config)
        rows[str(width)] = row
        for name, milliseconds in row.items():
            ratio = milliseconds / row["ordinary"]
            print(f"width {width}, {name}: {milliseconds:.3f} ms, {ratio:.2f}")
    content = {
        "milliseconds_per_step": rows,
        "device": torch.cuda.get_device_name(config.device) if config.on_gpu else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    config.output.mkdir(parents=True, exist_ok=True)
    (config.output / "cuda_graph.json").write_text(json.dumps(content, indent=2) + "\n")
    return content


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
