# SPDX-License-Identifier: Apache-2.0
r"""Layers with a low-rank adapter: $W + \frac{\alpha}{r} B A$ stands for the weight W.

Hu et al. (2021), "LoRA: Low-Rank Adaptation of Large Language Models", equation 3. A layer that is
called adds the adapter's output to its own, and never makes the sum of the weights; where another
module reads the weight, as attention does, the sum is what it reads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from pyro_bbb._utils.validation import kind

_PROJECTIONS = tuple(f"{name}_proj_weight" for name in ("in", "q", "k", "v"))  # of attention


class Adapted(nn.Module):
    """A layer with adapters: mixed in by `attach`."""

    lora_scale: float
    lora_A: Tensor
    lora_B: Tensor

    @classmethod
    def adapted(cls, layer: nn.Module) -> list[str]:
        """Names of the weights of a layer that get an adapter."""
        return ["weight"]

    @staticmethod
    def shapes(weight: Tensor, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of A and B for a weight ``[out, in]``."""
        return (rank, weight.shape[1]), (weight.shape[0], rank)

    @staticmethod
    def product(a: Tensor, b: Tensor) -> Tensor:
        """BA in the weight's shape."""
        return b @ a

    def merge(self) -> None:
        """Change the layer to one of its plain class, the adapters added to its weights."""
        for name in self.adapted(self):
            a, b = (self._parameters.pop(each) for each in names_of(name))
            assert a is not None and b is not None
            weight: Any = self._parameters[name]
            delta = self.lora_scale * self.product(a.detach(), b.detach())
            self._parameters[name] = nn.Parameter(weight.detach() + delta.to(weight))
        del self.lora_scale
        plain: Any = next(c for c in type(self).__mro__ if not issubclass(c, Adapted))
        self.__class__ = plain

    def extra_repr(self) -> str:
        """The layer's own, and the rank."""
        ranks = {getattr(self, names_of(name)[1]).shape[1] for name in self.adapted(self)}
        found = [super().extra_repr(), *(f"rank={rank}" for rank in ranks)]
        return ", ".join(filter(None, found))


class _OfVectors(Adapted):
    """A layer of vectors: of the last dimension of its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs, and the adapter's."""
        inner = self.lora_scale * F.linear(x, self.lora_A)
        outputs: Tensor = super().forward(x) + F.linear(inner, self.lora_B)
        return outputs


class AdaptedLinear(_OfVectors, nn.Linear):
    """Linear layer with an adapter."""


class AdaptedTransposed(_OfVectors):
    """As `AdaptedLinear`, of a layer whose weight is ``[in, out]``: Hugging Face's ``Conv1D``."""

    @staticmethod
    def shapes(weight: Tensor, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """As for `Adapted`."""
        return Adapted.shapes(weight.T, rank)

    @staticmethod
    def product(a: Tensor, b: Tensor) -> Tensor:
        """As for `Adapted`."""
        return (b @ a).T


class AdaptedConv2d(Adapted, nn.Conv2d):
    """Convolution with an adapter: A is a kernel of r channels, B of 1 x 1."""

    @staticmethod
    def shapes(weight: Tensor, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of A and B for a kernel ``[out, in, height, width]``."""
        return (rank, *weight.shape[1:]), (weight.shape[0], rank, 1, 1)

    @staticmethod
    def product(a: Tensor, b: Tensor) -> Tensor:
        """As for `Adapted`."""
        return torch.einsum("or,rihw->oihw", b[:, :, 0, 0], a)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs, and the adapter's."""
        inner = self.lora_scale * self._conv_forward(x, self.lora_A, None)
        outputs: Tensor = super().forward(x) + F.conv2d(inner, self.lora_B)
        return outputs


class AdaptedEmbedding(Adapted, nn.Embedding):
    """Embedding with an adapter, ``A`` ``[num_embeddings, r]``; a padding row stays as it is."""

    @staticmethod
    def shapes(weight: Tensor, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of A and B for a table ``[num_embeddings, embedding_dim]``."""
        return (weight.shape[0], rank), (weight.shape[1], rank)

    @staticmethod
    def product(a: Tensor, b: Tensor) -> Tensor:
        """As for `Adapted`."""
        return a @ b.T

    def merge(self) -> None:
        """As for `Adapted`."""
        if self.padding_idx is not None:
            with torch.no_grad():
                self.lora_A[self.padding_idx] = 0
        super().merge()

    def forward(self, input: Tensor) -> Tensor:
        """The layer's outputs, and the adapter's."""
        inner = self.lora_scale * F.embedding(input, self.lora_A)
        if self.padding_idx is not None:
            inner = inner.masked_fill((input == self.padding_idx).unsqueeze(-1), 0)
        outputs: Tensor = super().forward(input) + F.linear(inner, self.lora_B)
        return outputs


class AdaptedProjection(Adapted, NonDynamicallyQuantizableLinear):
    """The last layer of an attention, which reads its weight and never calls it."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The sum that stands for the weight."""
        return _sum(self, "weight")


class AdaptedAttention(Adapted, nn.MultiheadAttention):
    """Attention with adapters on the weights that project its inputs, packed or not."""

    @classmethod
    def adapted(cls, layer: nn.Module) -> list[str]:
        """As for `Adapted`."""
        return [name for name in _PROJECTIONS if layer._parameters[name] is not None]


def _projection(name: str) -> property:
    def read(layer: Adapted) -> Tensor | None:
        return None if layer._parameters[name] is None else _sum(layer, name)

    return property(read, doc="The sum that stands for the weight.")


for _name in _PROJECTIONS:
    setattr(AdaptedAttention, _name, _projection(_name))


def _sum(layer: Adapted, name: str) -> Tensor:
    """The weight with its adapter; one in shards as it is, which FSDP reads between passes."""
    weight = layer._parameters[name]
    assert weight is not None
    if hasattr(weight, "device_mesh"):
        return weight
    a, b = (getattr(layer, each) for each in names_of(name))
    return torch.addmm(weight, b, a, alpha=layer.lora_scale)


def names_of(weight: str) -> tuple[str, str]:
    """Names of the factors A and B for a weight's name."""
    prefix = weight.removesuffix("weight")
    return f"{prefix}lora_A", f"{prefix}lora_B"


_KINDS: dict[type[nn.Module], type[Adapted]] = {
    NonDynamicallyQuantizableLinear: AdaptedProjection,
    nn.Linear: AdaptedLinear,
    nn.Conv2d: AdaptedConv2d,
    nn.Embedding: AdaptedEmbedding,
    nn.MultiheadAttention: AdaptedAttention,
}
_CONV1D = "transformers.pytorch_utils.Conv1D"
SUPPORTED = "Linear, Conv2d (without groups), Embedding, MultiheadAttention and transformers.Conv1D"


def kind_of(layer: type[nn.Module]) -> type[Adapted] | None:
    """The class that adapts layers of a class, if there is one."""
    if issubclass(layer, Adapted):
        return layer
    if any(f"{c.__module__}.{c.__name__}" == _CONV1D for c in layer.__mro__):
        return AdaptedTransposed
    return next((found for base, found in _KINDS.items() if issubclass(layer, base)), None)


@cache
def with_adapters(layer: Any) -> Any:
    """The class of layers of a class with adapters."""
    adapted: Any = kind_of(layer)
    if layer in _KINDS:
        return adapted
    body = {"__module__": layer.__module__, "__doc__": layer.__doc__}
    return type(f"Adapted{layer.__name__}", (adapted, layer), body)


def attach(layer: nn.Module, plain: Any, rank: int, scale: float) -> None:
    """Give a layer adapters that add nothing at first: B is 0, A as in Hu et al. (2021).

    Args:
        layer: the layer, changed in place.
        plain: its class without Pyro.
        rank: r of the adapters.
        scale: their factor.
    """
    new = with_adapters(plain)
    for name in new.adapted(layer):
        weight: Any = layer._parameters[name]
        of_a, of_b = new.shapes(weight, rank)
        a, b = weight.new_empty(of_a), weight.new_zeros(of_b)
        nn.init.kaiming_uniform_(a, a=5**0.5)
        for key, value in zip(names_of(name), (a, b), strict=True):
            layer.register_parameter(key, nn.Parameter(value))
    layer.__class__ = new
    layer.lora_scale = scale  # type: ignore[assignment]


def merge_adapters(network: nn.Module) -> nn.Module:
    """Add the adapters of a plain network to the weights of their layers, in place.

    Args:
        network: without Pyro, as those inside of `to_ensemble` or `to_module` are.

    Returns:
        The network, its layers those of before `adapt`.

    Raises:
        TypeError: it is no module.
    """
    kind("network", network, nn.Module)
    for layer in list(network.modules()):
        if isinstance(layer, Adapted):
            layer.merge()
    return network
