"""torch's layers that a saved model may name, with the arguments that their constructors take.

Every argument is read from the attribute of that name. Nothing outside this table is ever built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from pyro_bbb.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Poisson,
    StudentT,
)
from pyro_bbb.networks import BayesianConv2d, BayesianLeNet5, BayesianLinear, BayesianMLP
from pyro_bbb.priors import (
    ByName,
    FanInNormal,
    FromGuide,
    HierarchicalNormal,
    Independent,
    LearnedNormal,
    LearnedScaleMixture,
    Marginal,
    SitePrior,
)

_CONV = "in_channels out_channels kernel_size stride padding {}dilation groups bias padding_mode"


_BATCH = "num_features eps momentum affine track_running_stats"


_RNN = "input_size hidden_size num_layers bias batch_first dropout bidirectional"


_EMBEDDING = "num_embeddings embedding_dim {}max_norm norm_type scale_grad_by_freq {}sparse{}"


_MAX_POOL = "kernel_size stride padding dilation return_indices ceil_mode"


_AVG_POOL = "kernel_size stride padding ceil_mode count_include_pad"


_DIMS = (1, 2, 3)


def _each(pattern: str, arguments: str, dims: tuple[int, ...] = _DIMS) -> dict[str, str]:
    return {pattern.format(d): arguments for d in dims}


_ARGUMENTS: dict[str, str] = {
    # containers
    **dict.fromkeys(("Sequential", "ModuleList", "ModuleDict"), ""),
    # linear, convolution, embedding, recurrent
    "Linear": "in_features out_features bias",
    **_each("Conv{}d", _CONV.format("")),
    **_each("ConvTranspose{}d", _CONV.format("output_padding ")),
    "Embedding": _EMBEDDING.format("padding_idx ", "", ""),
    "EmbeddingBag": _EMBEDDING.format("", "mode ", " include_last_offset padding_idx"),
    "RNN": f"{_RNN} nonlinearity",
    "GRU": _RNN,
    "LSTM": f"{_RNN} proj_size",
    # normalisation
    **_each("BatchNorm{}d", _BATCH),
    **_each("InstanceNorm{}d", _BATCH),
    "LayerNorm": "normalized_shape eps elementwise_affine bias",
    "GroupNorm": "num_groups num_channels eps affine",
    "RMSNorm": "normalized_shape eps elementwise_affine",
    "LocalResponseNorm": "size alpha beta k",
    # pooling, shapes, padding
    **_each("MaxPool{}d", _MAX_POOL),
    "AvgPool1d": _AVG_POOL,
    **_each("AvgPool{}d", f"{_AVG_POOL} divisor_override", (2, 3)),
    **_each("AdaptiveAvgPool{}d", "output_size"),
    **_each("AdaptiveMaxPool{}d", "output_size return_indices"),
    **_each("ZeroPad{}d", "padding"),
    **_each("ReflectionPad{}d", "padding"),
    **_each("ReplicationPad{}d", "padding"),
    **_each("CircularPad{}d", "padding"),
    "Flatten": "start_dim end_dim",
    "Unflatten": "dim unflattened_size",
    "Upsample": "size scale_factor mode align_corners recompute_scale_factor",
    "PixelShuffle": "upscale_factor",
    "PixelUnshuffle": "downscale_factor",
    # noise
    **dict.fromkeys(("Dropout", "Dropout1d", "Dropout2d", "Dropout3d"), "p inplace"),
    **dict.fromkeys(("AlphaDropout", "FeatureAlphaDropout"), "p inplace"),
    # activations
    **dict.fromkeys(("ReLU", "ReLU6", "SELU", "SiLU", "Mish", "Hardswish"), "inplace"),
    **dict.fromkeys(("Hardsigmoid",), "inplace"),
    **dict.fromkeys(("Identity", "Tanh", "Sigmoid", "LogSigmoid", "Softsign", "Tanhshrink"), ""),
    **dict.fromkeys(("ELU", "CELU"), "alpha inplace"),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Softmin", "GLU"), "dim"),
    **dict.fromkeys(("Hardshrink", "Softshrink"), "lambd"),
    "GELU": "approximate",
    "LeakyReLU": "negative_slope inplace",
    "RReLU": "lower upper inplace",
    "PReLU": "num_parameters init",
    "Softplus": "beta threshold",
    "Hardtanh": "min_val max_val inplace",
    "Threshold": "threshold value inplace",
}


LAYERS: dict[str, type[nn.Module]] = {name: getattr(nn, name) for name in _ARGUMENTS}


_OPTIONAL = ("bias",)  # arguments that say whether there is a parameter of that name


def layer_arguments(name: str, module: nn.Module, random: Iterable[str]) -> dict[str, Any]:
    """Arguments that make the layer once more.

    Args:
        name: name of its class in `LAYERS`.
        module: the layer.
        random: names of parameters that it had and are now random, or another layer's.

    Raises:
        KeyError: an argument is not an attribute.
    """
    own = vars(module)
    present = {*random, *(key for key, value in module._parameters.items() if value is not None)}
    return {
        key: key in present if key in _OPTIONAL and key not in own else own[key]
        for key in _ARGUMENTS[name].split()
    }


def require_arguments(name: str, arguments: dict[str, Any]) -> None:
    """Raises ValueError if a layer of that name is to be made from others than its arguments."""
    if arguments.keys() != set(_ARGUMENTS[name].split()):
        raise ValueError(f"{name} has the arguments {_ARGUMENTS[name]}, got {list(arguments)}")


Arguments: TypeAlias = dict[str, Any]


Modules: TypeAlias = dict[str, nn.Module]


def _none(module: nn.Module) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Kind:
    """One class.

    Args:
        make: a module from the constructor's arguments and the modules inside.
        arguments: reads the arguments off a module.
        inside: those modules in it that it does not make by itself.
    """

    make: Callable[[Arguments, Modules], nn.Module]
    arguments: Callable[[Any], Arguments] = _none
    inside: Callable[[Any], Modules] = _none


def random_shapes(module: nn.Module) -> dict[str, list[int]]:
    """Shapes of the weights that `pyro_bbb.priors.declare` has made random, by name."""
    samples = vars(module).get("_pyro_samples", {})
    return {k: list(site.shape) for k, site in samples.items() if isinstance(site, SitePrior)}


# --- layers and networks ---


def _layer(cls: Any, plain: str) -> Kind:
    return Kind(
        lambda arguments, parts: cls(**arguments, prior=parts["prior"]),
        lambda layer: layer_arguments(plain, layer, random_shapes(layer)),
        lambda layer: {"prior": layer._modules["prior"]},
    )


def _network(cls: Any, arguments: Callable[[Any], Arguments]) -> Kind:
    def make(arguments: Arguments, parts: Modules) -> nn.Module:
        network: nn.Module = cls(**arguments)
        network._modules.clear()
        network._modules.update(parts)  # which may have been exchanged
        return network

    return Kind(make, arguments, lambda network: dict(network._modules))


# --- priors ---


def _learned_normal(arguments: Arguments, parts: Modules) -> nn.Module:
    prior = LearnedNormal()
    prior.scale = arguments["scale"]  # in its dtype
    return prior


def _fan_in(arguments: Arguments, parts: Modules) -> nn.Module:
    prior = FanInNormal(**arguments)
    prior.by_fan_in.update(parts)
    return prior


def _hierarchical(arguments: Arguments, parts: Any) -> nn.Module:
    scale, kind = parts["hyperprior"].distribution, arguments["kind"]
    known = {"scale": None, "variance": None} | {kind: scale}
    return HierarchicalNormal(**known, per=arguments["per"])


def _by_name(arguments: Arguments, parts: Any) -> nn.Module:
    patterns = dict(zip(arguments["patterns"], parts.values(), strict=True))
    return ByName(patterns, _prefix=arguments["prefix"])


def _from_guide(arguments: Arguments, parts: Any) -> nn.Module:
    default = parts.pop("default", None)
    marginals = dict(zip(arguments["names"], parts.values(), strict=True))
    return FromGuide(marginals, default, _prefix=arguments["prefix"])


def _inside_from_guide(prior: FromGuide) -> Modules:
    default: Modules = {} if prior.default is None else {"default": prior.default}
    return {**_numbered(prior.marginals), **default}


def _numbered(modules: Iterable[Any]) -> Modules:
    return {str(i): module for i, module in enumerate(modules)}


# --- likelihoods ---


def _quantities(*names: str) -> Callable[[Any], Arguments]:
    """Reads known and latent quantities off a likelihood; of a learned one its shape."""

    def arguments(likelihood: Any) -> Arguments:
        found = {}
        for name in names:
            if name in likelihood._pyro_params:
                parameter = likelihood._parameters[f"{name}_unconstrained"]
                found[f"learned_{name}"] = tuple(parameter.shape)
            elif name in likelihood._pyro_samples:
                found[name] = likelihood._modules["prior"].for_weight(name).distribution
            else:
                found[name] = getattr(likelihood, name)
        return found

    return arguments


def _gaussian(arguments: Arguments, parts: Modules) -> nn.Module:
    if "learned_scale" in arguments:
        return Gaussian.learned(torch.ones(arguments["learned_scale"]))
    return Gaussian(**arguments)


KINDS: dict[type[nn.Module], Kind] = {
    BayesianLinear: _layer(BayesianLinear, "Linear"),
    BayesianConv2d: _layer(BayesianConv2d, "Conv2d"),
    BayesianMLP: _network(BayesianMLP, lambda network: {"sizes": network.sizes}),
    BayesianLeNet5: _network(
        BayesianLeNet5, lambda network: {"num_classes": network.fc2.out_features}
    ),
    Independent: Kind(
        lambda arguments, parts: Independent(**arguments),
        lambda prior: {"distribution": prior.distribution},
    ),
    Marginal: Kind(
        lambda arguments, parts: Marginal(**arguments),
        lambda prior: {"loc": prior.distribution.loc, "scale": prior.distribution.scale},
    ),
    FanInNormal: Kind(_fan_in, lambda prior: {"gain": prior.gain}, lambda x: dict(x.by_fan_in)),
    LearnedScaleMixture: Kind(lambda arguments, parts: LearnedScaleMixture()),
    LearnedNormal: Kind(_learned_normal, lambda prior: {"scale": prior.scale}),
    HierarchicalNormal: Kind(
        _hierarchical,
        lambda prior: {"kind": prior.kind, "per": prior.per},
        lambda prior: {"hyperprior": prior.hyperprior},
    ),
    ByName: Kind(
        _by_name,
        lambda prior: {"patterns": prior._patterns, "prefix": prior._prefix},
        lambda prior: _numbered(prior.priors),
    ),
    FromGuide: Kind(
        _from_guide,
        lambda prior: {"names": prior._names, "prefix": prior._prefix},
        _inside_from_guide,
    ),
    Categorical: Kind(lambda arguments, parts: Categorical()),
    Bernoulli: Kind(lambda arguments, parts: Bernoulli()),
    HeteroscedasticGaussian: Kind(lambda arguments, parts: HeteroscedasticGaussian()),
    Poisson: Kind(lambda arguments, parts: Poisson()),
    Gaussian: Kind(_gaussian, _quantities("scale")),
    StudentT: Kind(lambda arguments, parts: StudentT(**arguments), _quantities("df", "scale")),
}
