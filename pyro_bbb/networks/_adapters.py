# SPDX-License-Identifier: Apache-2.0
r"""Low-rank adapters with a posterior: $W + \frac{\alpha}{r} B A$ replaces the frozen weight W.

Hu et al. (2021), "LoRA: Low-Rank Adaptation of Large Language Models", equation 3; A is random, B a
parameter that is trained with the guide (Wang et al. 2024, arXiv:2406.11675), or random too. A
layer that is called adds the adapter's output $\frac{\alpha}{r} B (A x)$ to its own, and never
makes the sum of the weights. Where another module reads the weight, as attention does, it reads the
sum.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cache
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.validation import count, kind, one_of, positive
from pyro_bbb.networks._bayesianize import Converted, make_random, without_wrappers
from pyro_bbb.networks._select import (
    Where,
    modules_of,
    obstacle,
    select,
    select_among,
    without_parameters_inside,
)
from pyro_bbb.priors import FanInNormal, PriorLike, as_prior

Factors = Literal["A", "both"]
Shapes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
UNIT_GAIN = 0.5**0.5  # of `FanInNormal`: variance 1 / inputs
SUPPORTED = "Linear, Conv2d (without groups), Embedding, MultiheadAttention and transformers.Conv1D"


@locked
def adapt(
    module: nn.Module,
    rank: int = 8,
    *,
    where: Where | None = None,
    prior: PriorLike | None = None,
    alpha: float | None = None,
    random: Factors = "A",
    trainable: Where | None = None,
) -> PyroModule:
    r"""Copy a network, freeze it, and give layers low-rank adapters with a posterior.

    In an adapted layer $W + \frac{\alpha}{r} B A$ replaces the weight W; A is random, B a parameter
    that is trained with the guide, or random too. At first B is 0, and the outputs are the given
    network's. Sites have names such as ``"network.layers.0.q_proj.lora_A"``.

    The copy shares the memory of its frozen weights with ``module``: thaw none of them, which
    would train both; name layers that are to be trained as ``trainable``. Layers may be random as
    well: ``adapt(bayesianize(module, where="head"), ...)``.

    Args:
        module: a trained network of torch's or Hugging Face's layers; not changed.
        rank: r, rows of A.
        where: the layers that are adapted, as for `bayesianize`: a shell pattern that matches a
            module's path (with all layers inside), or several separated by ``|``, as in
            ``"*.q_proj|*.v_proj"``; a module type; a function of path and module; or a list.
            ``None`` adapts all layers that can be: linear, attention (the packed projections too),
            embeddings, and 2-D convolutions.
        prior: prior of the random factors; patterns of a dict match names such as
            ``"layers.0.q_proj.lora_A"``. ``None`` is `priors.FanInNormal` of variance 1 / inputs.
        alpha: strength $\alpha$ of the adapters; by default ``rank``.
        random: ``"A"``, or ``"both"`` factors.
        trainable: layers that have no adapter but stay ordinary parameters, trained with the guide,
            such as a new last layer; a selection as for `bayesianize`.

    Returns:
        The network as a `PyroModule`, for `BayesianModel` or for Pyro alone.

    Raises:
        ValueError: a number out of range; a criterion that selects no layer, or one that cannot be
            adapted; or a prior that does not fit.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    module = without_wrappers(module)
    rank = count("rank", rank)
    one_of("random", random, get_args(Factors))
    scale = (rank if alpha is None else positive("alpha", alpha)) / rank
    trained = [] if trainable is None else select(module, trainable, "trainable")
    chosen = _adaptable(module, where, {path for path, _ in trained})
    modules = dict(module.named_modules())
    excluded = {id(modules[path]._parameters[name]) for path, name in trained}
    network = copy_sharing(module, (x for x in module.parameters() if id(x) not in excluded))
    factors = []
    for path in chosen:
        for names in _attach(network.get_submodule(path), rank, scale):
            factors += [(path, name) for name in names[: 1 if random == "A" else 2]]
    _without_fast_path(network)
    return make_random(
        network, factors, as_prior(FanInNormal(UNIT_GAIN) if prior is None else prior)
    )


def merge_adapters(network: nn.Module) -> nn.Module:
    """Add the adapters of a plain network to the weights of their layers, in place.

    Args:
        network: without Pyro, as those inside of `to_ensemble` or `to_module` are.

    Returns:
        The network, its layers those of before `adapt`.
    """
    kind("network", network, nn.Module)
    for layer in list(network.modules()):
        if isinstance(layer, Adapted):
            layer.merge()
    return network


def copy_sharing(module: nn.Module, parameters: Iterable[nn.Parameter]) -> nn.Module:
    """Return a copy in which these parameters are frozen and share the module's memory."""
    shared: dict[int, Any] = {
        id(x): nn.Parameter(x.detach(), requires_grad=False) for x in parameters
    }
    return copy.deepcopy(module, shared)


# --- layers ---


class Adapted(nn.Module):
    """Layer with adapters, mixed in by `adapt`."""

    lora_scale: float  # alpha / r
    lora_A: Tensor
    lora_B: Tensor

    @classmethod
    def adapted(cls, layer: nn.Module) -> list[str]:
        """Return the names of the weights of a layer that get an adapter."""
        return ["weight"]

    @staticmethod
    def _shapes(weight: Tensor, rank: int) -> Shapes:
        """Return the shapes of A and B for a weight ``[out, in, ...]``."""
        return (rank, *weight.shape[1:]), (weight.shape[0], rank, *[1] * (weight.dim() - 2))

    @staticmethod
    def _product(a: Tensor, b: Tensor) -> Tensor:
        """Return BA in the weight's shape."""
        return (b.flatten(1) @ a.flatten(1)).view(len(b), *a.shape[1:])

    def merge(self) -> None:
        """Change the layer to one of its plain class, the adapters added to its weights."""
        for name in self.adapted(self):
            a, b = (self._parameters.pop(factor) for factor in _factors(name))
            assert a is not None and b is not None
            weight: Any = self._parameters[name]
            delta = self.lora_scale * self._product(a.detach(), b.detach())
            self._parameters[name] = nn.Parameter(weight.detach() + delta.to(weight))
        del self.lora_scale
        plain: Any = next(cls for cls in type(self).__mro__ if not issubclass(cls, Adapted))
        self.__class__ = plain

    def extra_repr(self) -> str:
        """Return the layer's own text, and the rank."""
        ranks = {getattr(self, _factors(name)[1]).shape[1] for name in self.adapted(self)}
        texts = [super().extra_repr(), *(f"rank={rank}" for rank in ranks)]
        return ", ".join(filter(None, texts))


class _Vectors(Adapted):
    """Layer that acts on the last dimension of its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        r"""Return $W x + \frac{\alpha}{r} B (A x)$."""
        inner = self.lora_scale * F.linear(x, self.lora_A)
        outputs: Tensor = super().forward(x) + F.linear(inner, self.lora_B)
        return outputs


class AdaptedLinear(_Vectors, nn.Linear):
    """Linear layer with an adapter."""


class AdaptedTransposed(_Vectors):
    """Linear layer whose weight is ``[in, out]``: Hugging Face's ``Conv1D``."""

    @staticmethod
    def _shapes(weight: Tensor, rank: int) -> Shapes:
        return (rank, weight.shape[0]), (weight.shape[1], rank)

    @staticmethod
    def _product(a: Tensor, b: Tensor) -> Tensor:
        return (b @ a).T


class AdaptedConv2d(Adapted, nn.Conv2d):
    """Convolution with an adapter: A is a kernel of r channels, B of 1 x 1."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs plus the adapter's."""
        inner = self.lora_scale * self._conv_forward(x, self.lora_A, None)
        outputs: Tensor = super().forward(x) + F.conv2d(inner, self.lora_B)
        return outputs


class AdaptedEmbedding(Adapted, nn.Embedding):
    """Embedding with an adapter, ``A`` ``[num_embeddings, r]``; a padding row stays as it is."""

    @staticmethod
    def _shapes(weight: Tensor, rank: int) -> Shapes:
        return (weight.shape[0], rank), (weight.shape[1], rank)

    @staticmethod
    def _product(a: Tensor, b: Tensor) -> Tensor:
        return a @ b.T

    def merge(self) -> None:
        """Add the adapter to the table, but for the padding row."""
        if self.padding_idx is not None:
            with torch.no_grad():
                self.lora_A[self.padding_idx] = 0
        super().merge()

    def forward(self, input: Tensor) -> Tensor:
        """Return the outputs plus the adapter's."""
        inner = self.lora_scale * F.embedding(input, self.lora_A)
        if self.padding_idx is not None:
            inner = inner.masked_fill((input == self.padding_idx).unsqueeze(-1), 0)
        outputs: Tensor = super().forward(input) + F.linear(inner, self.lora_B)
        return outputs


def _sum_of(name: str) -> property:
    r"""Return a property that reads a weight of a layer as $W + \frac{\alpha}{r} B A$."""

    def read(layer: Adapted) -> Tensor | None:
        weight = layer._parameters[name]
        if weight is None or hasattr(weight, "device_mesh"):  # a shard, read by FSDP between passes
            return weight
        a, b = (getattr(layer, factor) for factor in _factors(name))
        return torch.addmm(weight, b, a, alpha=layer.lora_scale)

    return property(read, doc="The sum that replaces the weight.")


class AdaptedProjection(Adapted, NonDynamicallyQuantizableLinear):
    """Last layer of an attention, whose weight is read and which is never called."""

    weight = _sum_of("weight")


class AdaptedAttention(Adapted, nn.MultiheadAttention):
    """Attention with adapters on the weights that project its inputs, packed or not."""

    in_proj_weight = _sum_of("in_proj_weight")
    q_proj_weight = _sum_of("q_proj_weight")
    k_proj_weight = _sum_of("k_proj_weight")
    v_proj_weight = _sum_of("v_proj_weight")

    @classmethod
    def adapted(cls, layer: nn.Module) -> list[str]:
        """Return the names of the projections that the layer has."""
        names = (f"{inputs}_proj_weight" for inputs in ("in", "q", "k", "v"))
        return [name for name in names if layer._parameters[name] is not None]


_ADAPTED: dict[type[nn.Module], type[Adapted]] = {
    NonDynamicallyQuantizableLinear: AdaptedProjection,
    nn.Linear: AdaptedLinear,
    nn.Conv2d: AdaptedConv2d,
    nn.Embedding: AdaptedEmbedding,
    nn.MultiheadAttention: AdaptedAttention,
}


# --- which layers have adapters ---


def _adaptable(module: nn.Module, where: Where | None, trained: set[str]) -> list[str]:
    """Return the paths of the chosen layers, all of which can have an adapter."""
    modules = dict(modules_of(module))
    reasons = {
        path: "trainable has it" if path in trained else _reason(layer)
        for path, layer in modules.items()
    }
    able = {path for path, reason in reasons.items() if reason is None}
    for path in without_parameters_inside(modules, able, where):
        raise ValueError(f"{path!r} cannot be adapted: {reasons[path]}; where must leave it out")
    weights = [(path, name) for path in able for name in _weights(modules[path])]
    chosen = {path for path, _ in select_among(modules, weights, where, "layers to adapt")}
    return [path for path in modules if path in chosen]


def _reason(layer: nn.Module) -> str | None:
    """Return the reason why a layer cannot have an adapter, if any."""
    cls = _plain(layer)
    if issubclass(cls, Adapted):
        return "it has an adapter already"
    if _mixin(cls) is None or getattr(layer, "groups", 1) != 1:
        return f"it is a {cls.__name__}, not one of {SUPPORTED}"
    if any(vars(layer).get(key) for key in ("_pyro_samples", "_pyro_bbb_tied")):
        return "some of its weights are random or tied"
    reasons = (obstacle(layer, name) for name in _weights(layer))
    return next(filter(None, reasons), None)


def _weights(layer: nn.Module) -> list[str]:
    """Return the names of a layer's weights that can have an adapter."""
    mixin = _mixin(_plain(layer))
    return mixin.adapted(layer) if mixin else []


def _plain(layer: nn.Module) -> type[nn.Module]:
    """Return a layer's class without Pyro."""
    return type(layer).plain_class if isinstance(layer, Converted) else type(layer)


def _mixin(cls: type[nn.Module]) -> type[Adapted] | None:
    """Return the class that adapts layers of a class."""
    if issubclass(cls, Adapted):
        return cls
    if any(
        f"{c.__module__}.{c.__name__}" == "transformers.pytorch_utils.Conv1D" for c in cls.mro()
    ):
        return AdaptedTransposed
    return next((adapted for base, adapted in _ADAPTED.items() if issubclass(cls, base)), None)


@cache
def _with_adapters(cls: Any) -> Any:
    """Return the class of layers of a class with adapters."""
    mixin: Any = _mixin(cls)
    if cls in _ADAPTED:
        return mixin
    body = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(f"Adapted{cls.__name__}", (mixin, cls), body)


def _attach(layer: nn.Module, rank: int, scale: float) -> list[tuple[str, str]]:
    """Give a layer adapters, as in Hu et al. (2021); return the names of their factors."""
    plain: Any = _plain(layer)
    cls = _with_adapters(plain)
    factors = [(name, _factors(name)) for name in cls.adapted(layer)]
    for name, (name_a, name_b) in factors:
        weight: Any = layer._parameters[name]
        shape_a, shape_b = cls._shapes(weight, rank)
        a = nn.init.kaiming_uniform_(weight.new_empty(shape_a), a=5**0.5)
        layer.register_parameter(name_a, nn.Parameter(a))
        layer.register_parameter(name_b, nn.Parameter(weight.new_zeros(shape_b)))
    layer.__class__ = cls
    layer.lora_scale = scale  # type: ignore[assignment]
    return [names for _, names in factors]


def _factors(weight: str) -> tuple[str, str]:
    """Return the names of A and B for a weight's name."""
    prefix = weight.removesuffix("weight")
    return f"{prefix}lora_A", f"{prefix}lora_B"


def _without_fast_path(network: nn.Module) -> None:
    """Turn off what torch's encoders compute from their layers' weights, without the layers."""
    encoders = (nn.TransformerEncoderLayer, nn.TransformerEncoder)
    for encoder in [module for module in network.modules() if isinstance(module, encoders)]:
        if any(isinstance(layer, Adapted) for layer in encoder.modules()):
            if isinstance(encoder, nn.TransformerEncoderLayer):
                encoder.activation_relu_or_gelu = 0
            else:
                encoder.use_nested_tensor = False
