# SPDX-License-Identifier: Apache-2.0
"""Training task of all methods: architecture, minibatch and trainer."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from _parts.timing import Take, repeated

NUM_DATA = 60_000  # examples of the training set that the minibatches pretend to come from
CLASSES = 10
T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """One training step: 784-H-H-10 ReLU or LeNet-5, on inputs of MNIST's shape."""

    hidden: int = 400
    """Units of each hidden layer; unused by LeNet-5."""
    batch: int = 128
    """Examples per step."""
    draws: int = 1
    """Draws of the weights per step."""
    architecture: str = "mlp"
    """``"mlp"`` or ``"lenet5"``."""
    lr: float = 1e-6
    """Adam's, so small that thousands of steps on one minibatch stay far from a loss of 0: the
    denormal numbers there are slow, and slower for some methods than for others."""
    device: str = "cpu"
    """Device of the training."""

    @property
    def sizes(self) -> list[int]:
        """Units of every layer of the fully connected network."""
        return [784, self.hidden, self.hidden, CLASSES]

    def data(self) -> tuple[Tensor, Tensor]:
        """The minibatch: pixels in [0, 1] and labels, always the same."""
        return images(self.batch, self.architecture, self.device)

    def network(self) -> nn.Sequential:
        """The network with ordinary weights."""
        layers = _lenet5() if self.architecture == "lenet5" else mlp(self.sizes)
        return nn.Sequential(layers).to(self.device)


def images(count: int, architecture: str = "mlp", device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Random pixels ``[count, 784]`` or ``[count, 1, 28, 28]``, and labels ``[count]``."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 28, 28) if architecture == "lenet5" else (784,)
    x = torch.rand(count, *shape, generator=generator)
    y = torch.randint(CLASSES, (count,), generator=generator)
    return x.to(device), y.to(device)


def mlp(sizes: Sequence[int]) -> OrderedDict[str, nn.Module]:
    """Linear layers with ReLU between them, by name."""
    layers = OrderedDict[str, nn.Module]()
    for i, (n_in, n_out) in enumerate(zip(sizes[:-1], sizes[1:], strict=True), start=1):
        layers[f"fc{i}"] = nn.Linear(n_in, n_out)
        if i < len(sizes) - 1:
            layers[f"activation{i}"] = nn.ReLU()
    return layers


def _lenet5() -> OrderedDict[str, nn.Module]:
    return OrderedDict(
        conv1=nn.Conv2d(1, 6, 5, padding="same"), relu1=nn.ReLU(), pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 16, 5, padding="same"), relu2=nn.ReLU(), pool2=nn.MaxPool2d(2),
        conv3=nn.Conv2d(16, 120, 5, padding="same"), relu3=nn.ReLU(), flatten=nn.Flatten(),
        fc1=nn.Linear(120 * 7 * 7, 84), relu4=nn.ReLU(), fc2=nn.Linear(84, CLASSES),
    )  # fmt: skip


@dataclass(frozen=True)
class Trainer:
    """Method ready to train."""

    take: Take
    """Take training steps."""
    module: nn.Module
    """Module of the trained parameters."""

    @property
    def num_parameters(self) -> int:
        """Trained numbers; a tensor that is registered twice counts once."""
        trained = [p for p in self.module.parameters() if p.requires_grad]
        return sum({p.data_ptr(): p.numel() for p in trained}.values())


@dataclass(frozen=True)
class Method:
    """Method to train the work's network."""

    name: str
    train: Callable[[Work], Trainer]
    package: str | None = None
    """Distribution that must be installed; what it raises is reported and ends no run."""

    def prepare(self, work: Work) -> Trainer | str:
        """Return a trainer after its first step, or the reason why it is unavailable."""
        return prepare(self.package, lambda: self._started(work))

    def _started(self, work: Work) -> Trainer:
        torch.manual_seed(0)
        trainer = self.train(work)
        trainer.take(1, lambda step: step())
        return trainer


def prepare(package: str | None, make: Callable[[], T]) -> T | str:
    """Call ``make``; of a missing or broken package return the reason instead."""
    if package is None:
        return make()
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
    try:
        return make()
    except Exception as error:  # of somebody else's code, on versions it may not know
        return f"does not run: {type(error).__name__}: {error}"


def trainer(
    module: nn.Module,
    loss: Callable[[], Tensor],
    lr: float,
    *,
    optimiser: Callable[..., torch.optim.Optimizer] | None = None,
) -> Trainer:
    """The usual loop's body: zero, forward, backward, step; fused Adam unless another is given."""
    parameters = module.parameters()
    adam = optimiser(parameters, lr=lr) if optimiser else fused_adam(parameters, lr)

    def step() -> Tensor:
        adam.zero_grad()
        value = loss()
        value.backward()
        adam.step()
        return value

    return Trainer(repeated(step), module)


def fused_adam(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Adam whose step is one kernel, for all methods that accept an optimiser."""
    return torch.optim.Adam(parameters, lr=lr, fused=True)
