"""Networks whose weights are random: Pyro modules that declare every weight as a `PyroSample`.

Any `PyroModule` with `PyroSample` attributes serves as well; these are the usual building blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal

from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_bbb.priors import PriorLike, as_prior, declare


class BayesianLinear(nn.Linear, PyroModule):
    r"""A linear layer $y = xW^\top + b$ with random $W$ and $b$.

    Args:
        in_features: size of each input.
        out_features: size of each output.
        bias: whether there is a $b$.
        prior: prior of ``weight`` ``[out_features, in_features]`` and ``bias``
            ``[out_features]``; ``None`` is `pyro_bbb.priors.default_prior`.

    Raises:
        ValueError: a size is not a positive integer, or the prior does not fit.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        prior: PriorLike | None = None,
    ) -> None:
        _require_size("in_features", in_features)
        _require_size("out_features", out_features)
        super().__init__(in_features, out_features, bias, device="meta")
        shapes = {"weight": (out_features, in_features)}
        declare(self, as_prior(prior), **shapes, **({"bias": (out_features,)} if bias else {}))


class BayesianConv2d(nn.Conv2d, PyroModule):
    """A convolution over images with a random kernel and bias.

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
        ValueError: a number of channels is not a positive integer, or the prior does not fit.
    """

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
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        *,
        prior: PriorLike | None = None,
    ) -> None:
        _require_size("in_channels", in_channels)
        _require_size("out_channels", out_channels)
        geometry = (kernel_size, stride, padding, dilation, groups, bias, padding_mode)
        super().__init__(in_channels, out_channels, *geometry, device="meta")
        shapes = {name: parameter.shape for name, parameter in self.named_parameters()}
        declare(self, as_prior(prior), **shapes)


class BayesianMLP(nn.Sequential, PyroModule):
    """A fully connected network: layers ``fc1``, ``fc2``, ... with activations between them.

    Args:
        sizes: numbers of inputs, of each hidden layer's units, and of outputs.
        activation: makes the module that stands between two layers, such as ``nn.ReLU``.
        prior: prior of all weights; patterns of a dict match names such as ``"fc1.weight"``.

    Raises:
        ValueError: fewer than two sizes, one that is not a positive integer, or a prior that
            does not fit.
    """

    plain_class = nn.Sequential

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        activation: Callable[[], nn.Module] = nn.ReLU,
        prior: PriorLike | None = None,
    ) -> None:
        if len(sizes) < 2:
            raise ValueError(f"sizes must list inputs and outputs at least, got {list(sizes)}")
        whole, layers = as_prior(prior), OrderedDict[str, nn.Module]()
        for i, (n_in, n_out) in enumerate(zip(sizes[:-1], sizes[1:], strict=True), start=1):
            if i > 1:
                layers[f"activation{i - 1}"] = activation()
            layers[f"fc{i}"] = BayesianLinear(n_in, n_out, prior=whole.scoped(f"fc{i}"))
        super().__init__(layers)
        self.sizes = tuple(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs ``[batch, sizes[-1]]`` for inputs ``[batch, sizes[0]]``.

        Raises:
            ValueError: the inputs have another shape.
        """
        if x.dim() < 2 or x.shape[-1] != self.sizes[0]:
            raise ValueError(f"expected x of shape [batch, {self.sizes[0]}], got {list(x.shape)}")
        outputs: Tensor = super().forward(x)
        return outputs


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
        _require_size("num_classes", num_classes)
        whole, layers = as_prior(prior), OrderedDict[str, nn.Module]()
        for i, (n_in, n_out) in enumerate([(1, 6), (6, 16), (16, 120)], start=1):
            scoped = whole.scoped(f"conv{i}")
            layers[f"conv{i}"] = BayesianConv2d(n_in, n_out, 5, padding="same", prior=scoped)
            layers[f"activation{i}"] = nn.ReLU()
            if i < 3:
                layers[f"pool{i}"] = nn.MaxPool2d(2)
        layers["flatten"] = nn.Flatten()
        layers["fc1"] = BayesianLinear(120 * 7 * 7, 84, prior=whole.scoped("fc1"))
        layers["activation4"] = nn.ReLU()
        layers["fc2"] = BayesianLinear(84, num_classes, prior=whole.scoped("fc2"))
        super().__init__(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs ``[batch, num_classes]`` for images ``[batch, 1, 28, 28]``.

        Raises:
            ValueError: the images have another shape.
        """
        if x.dim() != 4 or x.shape[1:] != (1, 28, 28):
            raise ValueError(f"expected x of shape [batch, 1, 28, 28], got {list(x.shape)}")
        outputs: Tensor = super().forward(x)
        return outputs


def _require_size(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
