# SPDX-License-Identifier: Apache-2.0
"""Large networks: a ViT-B/16 and a GPT-2 with random weights, and ways to train them.

`python -m _parts.large THREADS ORDER` measures the memory of steps in a process of its own.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyro_bbb as bbb
from _parts.memory import Peak, in_subprocess, peak_of_three_steps
from _parts.pyro_methods import metered_steps
from _parts.timing import Meter, Take, repeated

Data: TypeAlias = tuple[Tensor, Tensor]
TARGETS = {"vit": "*.q_proj|*.v_proj", "gpt2": "*.c_attn"}
LAST = {"vit": "vit.layers.1[01].*", "gpt2": "transformer.h.1[01].*"}  # the last two blocks
DRAWS = 10  # of a prediction


@dataclass(frozen=True)
class Job:
    """A network and a minibatch."""

    network: str
    """``"vit"`` or ``"gpt2"``."""
    batch: int = 2
    """Images, or sequences of 128 words, per step."""
    tiny: bool = False
    """A network of two narrow layers, to test that the program works."""
    device: str = "cpu"
    """Device."""

    def make(self) -> tuple[nn.Module, Data]:
        """The network with random weights, and the minibatch."""
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


def deterministic(network: nn.Module, data: Data) -> Take:
    """Adam on the parameters of a network that are not frozen."""
    network.train()
    trained = [p for p in network.parameters() if p.requires_grad]
    optimizer, (x, y) = torch.optim.Adam(trained, fused=True), data

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


def adam(job: Job) -> Take:
    """All weights without a posterior."""
    return deterministic(*job.make())


def by_fit(convert: Callable[[Job, nn.Module], nn.Module], **options: Any) -> Callable[[Job], Take]:
    """The steps of `fit` on a converted network."""

    def make(job: Job) -> Take:
        network, data = job.make()
        model = bbb.BayesianModel(
            convert(job, network), bbb.likelihoods.Categorical(), len(data[0])
        )
        guide = bbb.AutoSoftplusNormal(model).to(job.device)
        del network
        fixed: dict[str, Any] = {"batch_size": job.batch, "lr": 1e-6, "progress": False}

        def take(number: int, meter: Meter) -> None:
            with metered_steps(meter):
                bbb.fit(model, guide, data, epochs=number, engine="eager", **fixed, **options)

        return take

    return make


def one_pass(job: Job) -> Take:
    """The outputs of the frozen network."""
    network, (x, _) = job.make()
    network.eval()

    def run() -> None:
        with torch.no_grad():
            network(x)

    return repeated(run)


def ten_draws(job: Job) -> Take:
    """A prediction by ten draws of adapters in the last two blocks."""
    network, (x, y) = job.make()
    adapted = bbb.adapt(network, 8, where=LAST[job.network])
    model = bbb.BayesianModel(adapted, bbb.likelihoods.Categorical(), len(y))
    guide = bbb.AutoSoftplusNormal(model)
    return repeated(lambda: bbb.predict(model, guide, x, num_samples=DRAWS))


METHODS: dict[str, Callable[[Job], Take]] = {
    "LoRA by peft": peft,
    "adapt": by_fit(lambda job, network: bbb.adapt(network, 8, where=TARGETS[job.network])),
    "all weights, Adam": adam,
    "all weights, bayesianize": by_fit(lambda _, network: bbb.bayesianize(network)),
    "all weights, IVON": by_fit(lambda _, network: bbb.bayesianize(network), optimizer="ivon"),
    "one pass": one_pass,
    "10 draws": ten_draws,
}


def start(method: str, job: Job) -> Take:
    """The steps of a method."""
    return METHODS[method](job)


def peaks(methods: list[str], job: Job, threads: int) -> dict[str, Peak]:
    """Memory of three steps of each method, in one process of their own."""
    order = {"methods": methods, "job": asdict(job)}
    found = in_subprocess(__name__, threads, order)
    return {name: Peak(**peak) for name, peak in found.items()}


def measure(method: str, job: Job) -> Peak:
    """Memory of three steps of a method, after one of a tiny network, which loads all code."""
    start(method, Job(job.network, 1, tiny=True, device=job.device))(1, lambda step: step())
    return peak_of_three_steps(partial(start, method, job), job.device)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    order = json.loads(sys.argv[2])
    found = {name: asdict(measure(name, Job(**order["job"]))) for name in order["methods"]}
    print(json.dumps(found))
