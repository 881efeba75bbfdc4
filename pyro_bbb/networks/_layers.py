# SPDX-License-Identifier: Apache-2.0
"""Bayesian layers and neural networks of them, whose weights and biases are `PyroSample` sites.

`BayesianLinear` and `BayesianConv2d` serve in any other `PyroModule` too; `BayesianMLP` and
`BayesianLeNet5` are networks of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_bbb._utils.saving import Arguments, Modules, attributes, children, saveable
from pyro_bbb._utils.validation import count, one_of, tensor
from pyro_bbb.latents import repr_unseen
from pyro_bbb.priors import PriorLike, as_prior, declare

PaddingMode: TypeAlias = Literal["zeros", "reflect", "replicate", "circular"]


def _prior(layer: nn.Module) -> Modules:
    return {"prior": layer.get_submodule("prior")}


@saveable(attributes("in_features", "out_features", "bias"), modules=_prior)
class BayesianLinear(nn.Linear, PyroModule):
    r"""Linear layer $y = xW^\top + b$ with random $W$ and $b$.

    Args:
        in_features: size of each input.
        out_features: size of each output.
        bias: whether there is a $b$.
        prior: prior of ``weight`` ``[out_features, in_features]`` and ``bias``
            ``[out_features]``; ``None`` is `pyro_bbb.priors.default_prior`.

    Raises:
        ValueError: a size is not a positive integer, or the prior does not fit.
    """

    plain_class: type[nn.Module] = nn.Linear
    __repr__ = repr_unseen

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        prior: PriorLike | None = None,
    ) -> None:
        in_features = count("in_features", in_features)
        out_features = count("out_features", out_features)
        super().__init__(in_features, out_features, bias, device="meta")
        shapes = {"weight": (out_features, in_features)}
        declare(self, as_prior(prior), **shapes, **({"bias": (out_features,)} if bias else {}))


_CONV2D = "in_channels out_channels kernel_size stride padding dilation groups bias padding_mode"


@saveable(attributes(*_CONV2D.split()), modules=_prior)
class BayesianConv2d(nn.Conv2d, PyroModule):
    """Convolution over images with a random kernel and bias.

    Args:
        in_channels: channels of the input, C.
        out_channels: channels of the output.
        kernel_size: height and width of the kernel, or one number for both.
        stride: as for `torch.nn.Conv2d`, like the arguments after it.
        padding: zeros around the input, or ``"same"`` or ``"valid"``.
        dilation: spacing of the kernel's elements.
        groups: number of groups that channels are split into, g.
        bias: whether there is a bias.
        padding_mode: what the padding is filled with.
        prior: prior of ``weight`` ``[out_channels, C / g, height, width]`` and ``bias``
            ``[out_channels]``; ``None`` is `pyro_bbb.priors.default_prior`.

    Raises:
        ValueError: a number is not an integer of its range, channels cannot be split into the
            groups, an unknown name, or the prior does not fit.
    """

    plain_class: type[nn.Module] = nn.Conv2d
    __repr__ = repr_unseen

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        *,
        prior: PriorLike | None = None,
    ) -> None:
        in_channels = count("in_channels", in_channels)
        out_channels = count("out_channels", out_channels)
        groups = count("groups", groups)
        kernel_size = _pair("kernel_size", kernel_size)
        stride = _pair("stride", stride)
        if padding not in ("same", "valid"):
            padding = _pair("padding", padding, least=0)
        dilation = _pair("dilation", dilation)
        if in_channels % groups or out_channels % groups:
            numbers = f"{in_channels} and {out_channels} by {groups}"
            raise ValueError(f"groups must divide in_channels and out_channels, got {numbers}")
        one_of("padding_mode", padding_mode, get_args(PaddingMode))
        geometry = (kernel_size, stride, padding, dilation, groups, bias, padding_mode)
        super().__init__(in_channels, out_channels, *geometry, device="meta")
        shapes = {name: parameter.shape for name, parameter in self.named_parameters()}
        declare(self, as_prior(prior), **shapes)


def _pair(name: str, value: Any, least: int = 1) -> tuple[int, int]:
    """Return height and width, or one number for both."""
    height, width = value if isinstance(value, tuple) and len(value) == 2 else (value, value)
    return count(name, height, least), count(name, width, least)


# --- networks ---


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
    """

    plain_class: type[nn.Module] = nn.Sequential

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

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of inputs, of each hidden layer's units, and of outputs."""
        layers = [layer for layer in self if isinstance(layer, nn.Linear)]
        return layers[0].in_features, *(layer.out_features for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs ``[batch, sizes[-1]]`` for inputs ``[batch, sizes[0]]``.

        Raises:
            ValueError: the inputs have another shape.
        """
        x = tensor("x", x)
        inputs = self.sizes[0]
        if x.dim() < 2 or x.shape[-1] != inputs:
            raise ValueError(f"expected x of shape [batch, {inputs}], got {list(x.shape)}")
        outputs: Tensor = super().forward(x)
        return outputs


@saveable(lambda layer: {"size": len(layer.values)})
class Offset(nn.Module):
    """Constants added to outputs ``[batch, size]``, such as the logarithm of the mean count.

    As a last layer they center the prior of the outputs at the data, which costs no KL.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.values: nn.Parameter = nn.Parameter(torch.zeros(size), requires_grad=False)

    def forward(self, outputs: Tensor) -> Tensor:
        """Return the outputs plus the constants."""
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

    plain_class: type[nn.Module] = nn.Sequential
    input_shape: tuple[int, int, int] = (1, 28, 28)

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
        """Return outputs ``[batch, num_classes]`` for images ``[batch, 1, 28, 28]``.

        Raises:
            ValueError: the images have another shape.
        """
        x = tensor("x", x)
        if x.dim() != 4 or x.shape[1:] != self.input_shape:
            raise ValueError(f"expected x of shape [batch, 1, 28, 28], got {list(x.shape)}")
        outputs: Tensor = super().forward(x)
        return outputs
