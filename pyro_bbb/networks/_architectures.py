# SPDX-License-Identifier: Apache-2.0
"""Bayesian neural networks: the multilayer perceptron and LeNet-5."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_bbb._utils.saving import Arguments, Modules, attributes, children, saveable
from pyro_bbb._utils.validation import count, tensor
from pyro_bbb.networks._layers import BayesianConv2d, BayesianLinear
from pyro_bbb.priors import PriorLike, as_prior


def _with_layers(cls: Any, arguments: Arguments, modules: Modules) -> nn.Module:
    """Build a network whose layers may have been replaced."""
    network: nn.Module = cls(**arguments)
    network._modules.clear()
    network._modules.update(modules)
    return network


@saveable(attributes("sizes"), modules=children, build=_with_layers)
class BayesianMLP(nn.Sequential, PyroModule):
    """Fully connected network: layers ``fc1``, ``fc2``, ... with activations between them.

    Args:
        sizes: numbers of inputs, of each hidden layer's units, and of outputs.
        activation: makes the module between two layers, such as ``nn.ReLU``.
        prior: prior of all weights; patterns of a dict match names such as ``"fc1.weight"``.

    Raises:
        ValueError: fewer than two sizes, one that is not a positive integer, or a prior that
            does not fit.
        TypeError: ``sizes`` or ``activation`` is of another kind.
    """

    plain_class = nn.Sequential

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        activation: Callable[[], nn.Module] = nn.ReLU,
        prior: PriorLike | None = None,
    ) -> None:
        sizes = sizes.tolist() if isinstance(sizes, np.ndarray) else sizes
        if not isinstance(sizes, Sequence) or isinstance(sizes, (str, bytes)):
            raise TypeError(f"sizes must be a list of positive integers, got {sizes!r}")
        if len(sizes) < 2:
            raise ValueError(f"sizes must list inputs and outputs at least, got {list(sizes)}")
        sizes = [count(f"sizes[{i}]", size) for i, size in enumerate(sizes)]
        if isinstance(activation, nn.Module) or not callable(activation):
            raise TypeError(f"activation must make a module, as nn.ReLU does, got {activation!r}")
        full, layers = as_prior(prior), OrderedDict[str, nn.Module]()
        for i, (n_in, n_out) in enumerate(zip(sizes[:-1], sizes[1:], strict=True), start=1):
            if i > 1:
                layers[f"activation{i - 1}"] = activation()
            layers[f"fc{i}"] = BayesianLinear(n_in, n_out, prior=full.scoped(f"fc{i}"))
        super().__init__(layers)
        self.sizes = tuple(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs ``[batch, sizes[-1]]`` for inputs ``[batch, sizes[0]]``.

        Raises:
            ValueError: the inputs have another shape.
        """
        x = tensor("x", x)
        if x.dim() < 2 or x.shape[-1] != self.sizes[0]:
            raise ValueError(f"expected x of shape [batch, {self.sizes[0]}], got {list(x.shape)}")
        outputs: Tensor = super().forward(x)
        return outputs


@saveable(lambda layer: {"size": len(layer.values)})
class Offset(nn.Module):
    """Constants added to outputs ``[batch, size]``, such as the logarithm of the mean count.

    As a last layer they center the prior of the outputs at the data, which costs no KL.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(size), requires_grad=False)

    def forward(self, outputs: Tensor) -> Tensor:
        """Outputs plus the constants."""
        return outputs + self.values


@saveable(
    lambda network: {"num_classes": network.fc2.out_features}, modules=children, build=_with_layers
)
class BayesianLeNet5(nn.Sequential, PyroModule):
    """LeNet-5 for grey images of 28 x 28: ``conv1`` to ``conv3`` of 5 x 5, then ``fc1``, ``fc2``.

    6, 16 and 120 channels of unchanged size with max-pooling by 2 after the first two, and 84
    units, with ReLU between. After LeCun et al. (1998), with the pooling and activations of today.

    Args:
        num_classes: number of outputs.
        prior: prior of all weights; patterns of a dict match names such as ``"conv1.weight"``.

    Raises:
        ValueError: ``num_classes`` is not a positive integer, or the prior does not fit.
    """

    plain_class = nn.Sequential

    def __init__(self, num_classes: int = 10, *, prior: PriorLike | None = None) -> None:
        num_classes = count("num_classes", num_classes)
        full, layers = as_prior(prior), OrderedDict[str, nn.Module]()
        for i, (n_in, n_out) in enumerate([(1, 6), (6, 16), (16, 120)], start=1):
            scoped = full.scoped(f"conv{i}")
            layers[f"conv{i}"] = BayesianConv2d(n_in, n_out, 5, padding="same", prior=scoped)
            layers[f"activation{i}"] = nn.ReLU()
            if i < 3:
                layers[f"pool{i}"] = nn.MaxPool2d(2)
        layers["flatten"] = nn.Flatten()
        layers["fc1"] = BayesianLinear(120 * 7 * 7, 84, prior=full.scoped("fc1"))
        layers["activation4"] = nn.ReLU()
        layers["fc2"] = BayesianLinear(84, num_classes, prior=full.scoped("fc2"))
        super().__init__(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs ``[batch, num_classes]`` for images ``[batch, 1, 28, 28]``.

        Raises:
            ValueError: the images have another shape.
        """
        x = tensor("x", x)
        if x.dim() != 4 or x.shape[1:] != (1, 28, 28):
            raise ValueError(f"expected x of shape [batch, 1, 28, 28], got {list(x.shape)}")
        outputs: Tensor = super().forward(x)
        return outputs
