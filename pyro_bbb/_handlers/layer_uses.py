# SPDX-License-Identifier: Apache-2.0
"""Uses of tensors as the weights of linear and two-dimensional convolution layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


@dataclass(frozen=True)
class LayerUse:
    """One call of a layer.

    Args:
        function: ``F.linear`` or ``F.conv2d``.
        arguments: by name, as they were given.
        weight: name of the weight.
        bias: name of the bias; none if it is not among the watched.
        output: of the call.
    """

    function: Callable[..., Tensor]
    arguments: Mapping[str, Any]
    weight: str
    bias: str | None
    output: Tensor


class LayerUses(TorchFunctionMode):
    """Collects the `uses` of watched tensors, in the order of the calls.

    Args:
        tensors: the watched ones by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.tensors = {id(value): name for name, value in tensors.items()}
        self.uses: list[LayerUse] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.tensors and func in (F.linear, F.conv2d):
            given = dict(zip(_ARGUMENTS, args, strict=False)) | (kwargs or {})
            weight, bias = (self.tensors.get(id(given.get(name))) for name in ("weight", "bias"))
            if weight is not None:
                self.uses.append(LayerUse(func, given, weight, bias, output))
        return output
