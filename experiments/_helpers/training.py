# SPDX-License-Identifier: Apache-2.0
"""Hyper-parameters of trainings: priors, initial means, and the arguments of `pyro_bbb.fit`."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from pyro.distributions import Normal, TorchDistribution
from torch import Tensor, nn

import pyro_bbb as bbb


@dataclass(frozen=True, kw_only=True)
class Training:
    """Hyper-parameters that most recipes share; a recipe adds others, and its own defaults."""

    lr: float = 1e-3  # Adam's learning rate at the start
    lr_schedule: str = "cosine"
    estimator: str = "reparam"
    num_particles: int = 1  # draws of the weights per step

    def fit(self, model: Any, guide: Any, data: Any, **options: Any) -> bbb.History:
        """Call `pyro_bbb.fit` with all fields that are its arguments; ``options`` go before.

        Prints the ELBO of the last epoch, unless ``progress`` is False.
        """
        known = list(inspect.signature(bbb.fit).parameters)[3:]  # without model, guide and data
        own = {name: value for name, value in vars(self).items() if name in known}
        history = bbb.fit(model, guide, data, **own | options)
        if options.get("progress", True):
            print(final_elbo(history))
        return history


def final_elbo(history: bbb.History) -> str:
    """Return a sentence: the negative ELBO of the last epoch, temperature, baseline."""
    if history.baseline_per_example is None:
        return "Point estimate: no ELBO."
    return (
        f"Negative ELBO: {history.neg_elbo_per_example[-1]:.4g} nats per example at temperature "
        f"{history.kl_weight[-1]:.4g}; ignoring the data: {history.baseline_per_example:.4g}."
    )


def he(network: nn.Sequential) -> nn.Sequential:
    """Give a network He's initial weights, and biases of 0."""
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.kaiming_normal_(parameter, nonlinearity="relu")
    return network


def named(layers: dict[str, nn.Module]) -> nn.Sequential:
    """Return a chain of named layers, without dropout of rate 0."""
    network = nn.Sequential()
    for name, layer in layers.items():
        if not (isinstance(layer, nn.Dropout) and layer.p == 0):
            network.add_module(name, layer)
    return network


def mlp(sizes: list[int], dropout: tuple[float, float] = (0.0, 0.0)) -> nn.Sequential:
    """Linear layers with ReLU between, from He's initial weights.

    Dropout of a rate above 0 is before the first layer, and before each other one.
    """
    layers: dict[str, nn.Module] = {}
    for i, (n_in, n_out) in enumerate(pairwise(sizes), start=1):
        if i > 1:
            layers[f"relu{i - 1}"] = nn.ReLU()
        layers[f"drop{i}"] = nn.Dropout(dropout[min(i - 1, 1)])
        layers[f"fc{i}"] = nn.Linear(n_in, n_out)
    return he(named(layers))


def lenet5(dropout: float = 0.0) -> nn.Sequential:
    """LeNet-5; dropout is before the dense layers."""
    layers: dict[str, nn.Module] = {}
    for i, (inputs, outputs) in enumerate([(1, 6), (6, 16), (16, 120)], start=1):
        layers[f"conv{i}"] = nn.Conv2d(inputs, outputs, 5, padding=2)
        layers[f"relu{i}"] = nn.ReLU()
        if i < 3:
            layers[f"pool{i}"] = nn.MaxPool2d(2)
    layers |= {"flatten": nn.Flatten(), "drop1": nn.Dropout(dropout)}
    layers |= {"fc1": nn.Linear(120 * 7 * 7, 84), "relu4": nn.ReLU()}
    layers |= {"drop2": nn.Dropout(dropout), "last": nn.Linear(84, 10)}
    return named(layers)


def train_plain(
    network: nn.Module,
    data: tuple[Tensor, Tensor],
    epochs: int,
    *,
    batch_size: int = 128,
    lr: float = 1e-3,
    lr_schedule: str = "cosine",
    optimizer: type[torch.optim.Optimizer] = torch.optim.Adam,
    loss: Callable[[Any, Tensor], Tensor] = nn.functional.cross_entropy,
    callback: Callable[[int], None] = lambda epoch: None,
) -> Any:
    """Train a network without random weights on shuffled passes over the data, in this loop.

    Adam or another optimiser, whose learning rate is constant or falls along a cosine. The callback
    gets the number of passes done, after each.
    """
    batches = bbb.data.Minibatches(*data, batch_size=batch_size)
    make: Any = optimizer
    descent = make(network.parameters(), lr=lr, fused=True)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(descent, epochs * len(batches))
    for epoch in range(1, epochs + 1):
        network.train()
        for x, y in batches:
            descent.zero_grad()
            loss(network(x), y).backward()
            descent.step()
            if lr_schedule == "cosine":
                cosine.step()
        callback(epoch)
    return network.eval()


def predict_plain(network: nn.Module, x: Tensor) -> bbb.ClassificationPrediction:
    """Class probabilities of a network without random weights, an ensemble of one."""
    with torch.no_grad():
        logits = torch.cat([network(rows) for rows in x.split(250)])
    return bbb.ClassificationPrediction(logits.log_softmax(-1)[None])


def dropout_passes(network: nn.Module, x: Tensor, passes: int, seed: int) -> Tensor:
    """Return outputs ``[passes, n, ...]`` with dropout left on (Gal and Ghahramani 2016)."""
    torch.manual_seed(seed)
    network.train()
    with torch.no_grad():
        return torch.stack(
            [torch.cat([network(rows) for rows in x.split(1024)]) for _ in range(passes)]
        )


def make_prior(parameters: tuple[float, ...]) -> TorchDistribution:
    """Make N(0, scale^2) of one parameter, or the scale mixture of three."""
    return Normal(0.0, *parameters) if len(parameters) == 1 else bbb.ScaleMixtureNormal(*parameters)


def normal_means(scale: float) -> Callable[[dict[str, Any]], Tensor]:
    """Make the ``init_loc`` of a guide whose initial means are samples of N(0, scale^2)."""
    return lambda site: scale * torch.randn(site["value"].shape)


def uniform_means(bound: float) -> Callable[[dict[str, Any]], Tensor]:
    """Make the ``init_loc`` of a guide whose initial means are uniform in [-bound, bound]."""
    return lambda site: torch.empty_like(site["value"]).uniform_(-bound, bound)


def prune_to(guide: bbb.AutoSoftplusNormal, left: float, x: Tensor) -> tuple[Any, Any]:
    """Return a narrower model and its guide: ``left`` weights are left, and no unit without any."""
    weights = sum(guide.loc(name).numel() for name in guide.weight_names)
    pruned = bbb.prune(guide, max(0.0, 1 - left / weights))
    return bbb.prune(pruned, units=True, x=x[:1])
