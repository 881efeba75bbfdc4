"""Networks whose weights are random: Pyro modules that declare every weight as a `PyroSample`.

Any `PyroModule` with `PyroSample` attributes serves as well; these are the usual building blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_bbb.priors import PriorLike, as_prior, declare

PaddingMode: TypeAlias = Literal["zeros", "reflect", "replicate", "circular"]


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
        ValueError: a number is no integer of its range, channels cannot be split into the groups,
            an unknown name, or the prior does not fit.
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
        padding_mode: PaddingMode = "zeros",
        *,
        prior: PriorLike | None = None,
    ) -> None:
        _require_size("in_channels", in_channels)
        _require_size("out_channels", out_channels)
        _require_pair("kernel_size", kernel_size)
        _require_pair("stride", stride)
        if padding not in ("same", "valid"):
            _require_pair("padding", padding, least=0)
        _require_pair("dilation", dilation)
        _require_size("groups", groups)
        if in_channels % groups or out_channels % groups:
            found = f"{in_channels} and {out_channels} with groups={groups}"
            raise ValueError(
                f"in_channels and out_channels must be divisible by groups, got {found}"
            )
        if padding_mode not in get_args(PaddingMode):
            names = list(get_args(PaddingMode))
            raise ValueError(f"padding_mode must be one of {names}, got {padding_mode!r}")
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
        if not isinstance(sizes, Sequence) or isinstance(sizes, (str, bytes)):
            raise TypeError(f"sizes must be a list of positive integers, got {sizes!r}")
        if len(sizes) < 2:
            raise ValueError(f"sizes must list inputs and outputs at least, got {list(sizes)}")
        if not all(map(_is_size, sizes)):
            raise ValueError(f"sizes must hold positive integers, got {list(sizes)}")
        if isinstance(activation, nn.Module) or not callable(activation):
            raise TypeError(f"activation must make a module, as nn.ReLU does, got {activation!r}")
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
        _require_tensor(x)
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
        _require_tensor(x)
        if x.dim() != 4 or x.shape[1:] != (1, 28, 28):
            raise ValueError(f"expected x of shape [batch, 1, 28, 28], got {list(x.shape)}")
        outputs: Tensor = super().forward(x)
        return outputs


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _require_size(name: str, value: Any) -> None:
    if not _is_size(value):
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _require_pair(name: str, value: Any, least: int = 1) -> None:
    """Height and width, or one number for both."""
    pair = value if isinstance(value, tuple) and len(value) == 2 else (value, value)
    if not all(isinstance(x, int) and not isinstance(x, bool) and x >= least for x in pair):
        raise ValueError(f"{name} must be one or two integers of at least {least}, got {value!r}")


def _require_tensor(x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
