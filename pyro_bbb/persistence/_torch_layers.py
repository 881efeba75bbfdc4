# SPDX-License-Identifier: Apache-2.0
"""torch's layers that a saved model may name, with their constructors' arguments."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from pyro_bbb._utils.saving import Arguments, Modules, SavedClass, attributes, children

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


def _build(names: list[str], cls: Any, arguments: Arguments, modules: Modules) -> nn.Module:
    """Return a layer without memory for its parameters."""
    if arguments.keys() != set(names):
        raise ValueError(f"{cls.__name__} must have the arguments {names}, got {list(arguments)}")
    with torch.device("meta"):
        layer: nn.Module = cls([]) if issubclass(cls, nn.ModuleList) else cls(**arguments)
    layer._modules.update(modules)
    return layer


def _saved_layer(cls: type[nn.Module], names: list[str]) -> SavedClass:
    return SavedClass(cls, attributes(*names), children, partial(_build, names))


LAYERS = {name: _saved_layer(getattr(nn, name), x.split()) for name, x in _ARGUMENTS.items()}
