# SPDX-License-Identifier: Apache-2.0
"""Networks of `adapters`: a convolutional net of images, and a transformer of characters."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import pyro_bbb as bbb
from _helpers.docstrings import CHARACTERS, CONTEXT
from _helpers.posterior_training import named
from _helpers.run import Data


def convolutional(dropout: float, width: int) -> nn.Sequential:
    """Three convolutions and a hidden layer of 128 units; dropout before the dense layers."""
    layers: dict[str, nn.Module] = {}
    for i, (inputs, outputs) in enumerate(pairwise((1, width, 2 * width, 2 * width)), start=1):
        layers[f"conv{i}"] = nn.Conv2d(inputs, outputs, 3, padding=1)
        layers |= {f"relu{i}": nn.ReLU(), f"pool{i}": nn.MaxPool2d(2)}
    layers |= {"flatten": nn.Flatten(), "drop1": nn.Dropout(dropout)}
    layers |= {"fc": nn.Linear(2 * width * 9, 128), "relu4": nn.ReLU()}
    layers |= {"drop2": nn.Dropout(dropout), "last": nn.Linear(128, 10)}
    return named(layers)


class Characters(nn.Module):
    """A transformer of 64 characters: the logits of the next after each."""

    def __init__(self, dropout: float, width: int) -> None:
        super().__init__()
        self.network = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=len(CHARACTERS),
                n_positions=CONTEXT,
                n_embd=width,
                n_layer=3,
                n_head=4,
                resid_pdrop=dropout,
                embd_pdrop=dropout,
                attn_pdrop=dropout,
                bos_token_id=None,
                eos_token_id=None,
                use_cache=False,
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[n, 64, 96]`` of characters ``[n, 64]``."""
        logits: Tensor = self.network(x).logits
        return logits


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of network, and its layers that are adapted."""

    make: Callable[[float, int], nn.Module]
    """Makes it with random weights, from a rate of dropout and a width."""
    width: int
    """Its width; in smoke tests it is 8."""
    epochs: int
    """Passes of its first training."""
    adapted: str
    """Layers that get adapters."""
    last: str | None = None
    """The last layer, if it is new for each task."""


FAMILIES = {
    "images": Family(make=convolutional, width=32, epochs=4, adapted="conv*|fc", last="last"),
    "characters": Family(make=Characters, width=64, epochs=5, adapted="*.h.*"),
}


def pretrain(network: nn.Module, data: Data, epochs: int) -> None:
    """Train all weights by Adam, without a posterior."""
    batches = bbb.data.Minibatches(*data, batch_size=64)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(batches))
    network.train()
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x).flatten(0, -2), y.flatten()).backward()
            optimizer.step()
            schedule.step()
