# SPDX-License-Identifier: Apache-2.0
"""Bayesian layers: Pyro modules whose weights and biases are `PyroSample` sites.

A network may use them together with any other `PyroModule`.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, Literal, TypeAlias, get_args

from pyro.nn import PyroModule
from torch import nn

from pyro_bbb._handlers.sites import repr_unseen
from pyro_bbb._utils.saving import Modules, attributes, saveable
from pyro_bbb._utils.validation import count
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

    plain_class, __repr__ = nn.Linear, repr_unseen

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

    plain_class, __repr__ = nn.Conv2d, repr_unseen

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
        _require_pair("kernel_size", kernel_size)
        _require_pair("stride", stride)
        if padding not in ("same", "valid"):
            _require_pair("padding", padding, least=0)
        _require_pair("dilation", dilation)
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


def _require_pair(name: str, value: Any, least: int = 1) -> None:
    """Height and width, or one number for both."""
    pair = value if isinstance(value, tuple) and len(value) == 2 else (value, value)
    if not all(
        isinstance(x, Integral) and not isinstance(x, bool) and int(x) >= least for x in pair
    ):
        raise ValueError(f"{name} must be one or two integers of at least {least}, got {value!r}")
