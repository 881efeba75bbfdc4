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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
import tyro
from _parts.memory import Peak, in_fresh_process, peak_of_three_steps
from _parts.methods import fused_adam, metered_steps
from _parts.timing import Comparison, Meter, Methods, Take, repeated
from torch import Tensor, nn

import pyro_bbb as bbb
from pyro_bbb._utils.tables import as_markdown

Data: TypeAlias = tuple[Tensor, Tensor]
TARGETS = {"vit": "*.q_proj|*.v_proj", "gpt2": "*.c_attn"}
LAST = {"vit": "vit.layers.1[01].*", "gpt2": "transformer.h.1[01].*"}  # the last two blocks
DRAWS = 10  # of a prediction
FLOORS = {  # what each is compared with
    "adapt": "LoRA by peft",
    "all weights, bayesianize": "all weights, Adam",
    "all weights, IVON": "all weights, Adam",
    "10 draws": "one pass",
}


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


@dataclass(frozen=True)
class Job:
    """A network and a minibatch."""

    network: str  # ``"vit"`` or ``"gpt2"``
    batch: int = 2  # images, or sequences of 128 words, per step
    tiny: bool = False  # a network of two narrow layers, to test that the program works
    device: str = "cpu"

    def make(self) -> tuple[nn.Module, Data]:
        """Return the network with random weights, and the minibatch."""
        torch.manual_seed(0)
        network, data = {"vit": _vit, "gpt2": _gpt2}[self.network](self.batch, self.tiny)
        return network.to(self.device), (data[0].to(self.device), data[1].to(self.device))


def _vit(batch: int, tiny: bool) -> tuple[nn.Module, Data]:
    from transformers import ViTConfig, ViTForImageClassification

    small: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    config = ViTConfig(num_labels=10, **(small if tiny else {}))
    x = torch.randn(batch, 3, config.image_size, config.image_size)
    return ViTForImageClassification(config), (x, torch.randint(10, (batch,)))


def _gpt2(batch: int, tiny: bool) -> tuple[nn.Module, Data]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(**({"n_embd": 8, "n_head": 2, "vocab_size": 50} if tiny else {}))
    words = torch.randint(config.vocab_size, (batch, 9 if tiny else 129))
    if tiny:
        config.bos_token_id = config.eos_token_id = None
    return GPT2LMHeadModel(config), (words[:, :-1], words[:, 1:])


# --- methods ---


def deterministic(network: nn.Module, data: Data) -> Take:
    """Adam on the parameters of a network that are not frozen."""
    network.train()
    trained = [p for p in network.parameters() if p.requires_grad]
    optimizer, (x, y) = fused_adam(trained, 1e-3), data

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(network(x).logits.flatten(0, -2), y.flatten()).backward()
        optimizer.step()

    return repeated(step)


def peft(job: Job) -> Take:
    """LoRA by the library of that name: adapters without a posterior."""
    from peft import LoraConfig, get_peft_model

    network, data = job.make()
    targets = [each.removeprefix("*.") for each in TARGETS[job.network].split("|")]
    transposed = job.network == "gpt2"
    config = LoraConfig(r=8, lora_alpha=8, target_modules=targets, fan_in_fan_out=transposed)
    return deterministic(get_peft_model(network, config), data)


def by_fit(job: Job, convert: Callable[[nn.Module], nn.Module], **options: Any) -> Take:
    """Return the steps of `fit` on a converted network."""
    network, data = job.make()
    model = bbb.BayesianModel(convert(network), bbb.likelihoods.Categorical(), len(data[0]))
    guide = bbb.AutoSoftplusNormal(model).to(job.device)
    del network
    fixed: dict[str, Any] = {"batch_size": job.batch, "lr": 1e-6, "progress": False}

    def take(number: int, meter: Meter) -> None:
        with metered_steps(meter):
            bbb.fit(model, guide, data, epochs=number, engine="eager", **fixed, **options)

    return take


def one_pass(job: Job) -> Take:
    """Return the outputs of the frozen network."""
    network, (x, _) = job.make()
    network.eval()
    return repeated(torch.no_grad()(lambda: network(x)))


def ten_draws(job: Job) -> Take:
    """Return a prediction by ten draws of adapters in the last two blocks."""
    network, (x, y) = job.make()
    adapted = bbb.adapt(network, 8, where=LAST[job.network])
    model = bbb.BayesianModel(adapted, bbb.likelihoods.Categorical(), len(y))
    guide = bbb.AutoSoftplusNormal(model)
    return repeated(lambda: bbb.predict(model, guide, x, num_samples=DRAWS))


def start(method: str, job: Job) -> Take:
    """Return the steps of a method."""
    return METHODS[method](job)


METHODS: dict[str, Callable[[Job], Take]] = {
    "LoRA by peft": peft,
    "adapt": lambda job: by_fit(job, partial(bbb.adapt, rank=8, where=TARGETS[job.network])),
    "all weights, Adam": lambda job: deterministic(*job.make()),
    "all weights, bayesianize": partial(by_fit, convert=bbb.bayesianize),
    "all weights, IVON": partial(by_fit, convert=bbb.bayesianize, optimizer="ivon"),
    "one pass": one_pass,
    "10 draws": ten_draws,
}
TRAINED = [name for name in METHODS if name not in ("one pass", "10 draws")]


# --- memory and time ---


def measure(method: str, job: Job) -> Peak:
    """Memory of three steps of a method, after one of a tiny network, which loads all code."""
    start(method, Job(job.network, 1, tiny=True, device=job.device))(1, lambda step: step())
    return peak_of_three_steps(partial(start, method, job), job.device)


def run(config: Config, network: str) -> dict[str, Any]:
    """Memory and time of all methods on one network."""
    job = Job(network, config.batch, config.smoke, config.device)
    peak = measure if config.smoke else in_fresh_process(config.threads, measure)
    memory = {name: asdict(peak(name, job)) for name in TRAINED}
    times, ratios = {}, {}
    for name, floor in FLOORS.items():
        makes = {each: partial(start, each) for each in (name, floor)}
        options = {"threads": config.threads, "device": config.device}
        with Methods(makes, one_process=config.smoke, **options) as methods:
            rounds, _ = methods.compare({k: (k, job) for k in makes}, min_rounds=config.rounds)
        times[f"{name} / {floor}"] = [rounds[name], rounds[floor]]
        ratios[name] = {
            "time": Comparison("large", network, floor, rounds).ratio(name),
            "memory": _ratio(memory, name, floor, "tensors"),
            "process": _ratio(memory, name, floor, "process"),
        }
    return {"memory": memory, "seconds": times, "ratios": ratios}


def _ratio(memory: dict[str, Any], name: str, floor: str, of: str) -> float | None:
    """Return a ratio of peaks; none where an earlier method set the peak, as in ``--smoke``."""
    if name not in memory or not memory[floor][of]:
        return None
    return float(memory[name][of] / memory[floor][of])


def table(results: dict[str, Any]) -> str:
    """Return the ratios as Markdown."""
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
