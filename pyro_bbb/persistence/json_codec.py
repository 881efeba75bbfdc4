# SPDX-License-Identifier: Apache-2.0
"""Python values as JSON with their tensors apart, and back.

`encode` and `decode` serve constructor arguments, distributions among them, and the states of
optimisers. JSON's lists are tuples; lists, dicts and floats that JSON lacks are marked:

    (1, 2.5)  [1, 2.5]                      {0: "a"}     {"dict": [[0, "a"]]}
    [1, 2.5]  {"list": [1, 2.5]}            math.inf     {"float": "inf"}
    a tensor  {"tensor": its name}          dist.Normal  {"distribution": "Normal", ...}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_bbb.distributions import LogUniform, ScaleMixtureNormal
from pyro_bbb.distributions.scale_mixture import mixture_of
from pyro_bbb.persistence.archive import Json

_PARAMETERS = {
    "Beta": ["concentration1", "concentration0"],
    "Chi2": ["df"],
    "Exponential": ["rate"],
    **dict.fromkeys(("Gamma", "InverseGamma"), ["concentration", "rate"]),
    **dict.fromkeys(("Cauchy", "Gumbel", "Laplace", "LogNormal", "Normal"), ["loc", "scale"]),
    **dict.fromkeys(("HalfCauchy", "HalfNormal"), ["scale"]),
    "LogUniform": ["loc"],
    "ScaleMixtureNormal": ["pi", "sigma1", "sigma2"],
    "StudentT": ["df", "loc", "scale"],
    "Uniform": ["low", "high"],
}
_OURS = {"LogUniform": LogUniform, "ScaleMixtureNormal": ScaleMixtureNormal}
_FAMILIES: dict[str, Any] = {name: _OURS.get(name) or getattr(dist, name) for name in _PARAMETERS}
_NAMES = {family: name for name, family in _FAMILIES.items()}
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


class CannotDescribe(TypeError):
    """A value, a network, a prior or a likelihood cannot be expressed in the format."""


def encode(value: Any, key: str, tensors: dict[str, Tensor]) -> Json:
    """Return the JSON of a value, and add its tensors under names that begin with ``key``."""
    if isinstance(value, Tensor):
        tensors[key] = value
        return {"tensor": key}
    if isinstance(value, dict):
        if wrong := [k for k in value if not isinstance(k, str | int)]:
            raise CannotDescribe(f"{key} must have strings or integers as keys, got {wrong[0]!r}")
        return {"dict": [[k, encode(v, f"{key}.{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, tuple | list):
        items = [encode(item, f"{key}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, tuple) else {"list": items}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Distribution):
        return _encode_distribution(value, key, tensors)
    raise CannotDescribe(f"{key} must consist of numbers and tensors, got {value!r}")


def decode(value: Json, tensors: dict[str, Tensor]) -> Any:
    """Return the value of `encode`; its tensors are removed from ``tensors``."""
    if isinstance(value, list):
        return tuple(decode(item, tensors) for item in value)
    if not isinstance(value, dict):
        return value
    if "distribution" in value:
        return _decode_distribution(tensors, **value)
    ((type_name, content),) = value.items()
    if type_name == "tensor":
        return tensors.pop(content)
    if type_name == "float":
        return float(content)
    if type_name == "dict":
        return {key: decode(item, tensors) for key, item in content}
    if type_name == "list":
        return [decode(item, tensors) for item in content]
    raise ValueError(f"a value must be of a known kind, got {type_name!r}")


def _encode_distribution(value: Any, key: str, tensors: dict[str, Tensor]) -> Json:
    if type(value) not in _NAMES:
        raise CannotDescribe(f"{key} is a {type(value).__name__}, which has no name in the format")
    name = _NAMES[type(value)]
    parameters = {p: getattr(value, p).detach() for p in _PARAMETERS[name]}
    dtypes = {str(x.dtype).removeprefix("torch.") for x in parameters.values()}
    scalar = all(x.dim() == 0 and x.isfinite() for x in parameters.values())
    if isinstance(value, ScaleMixtureNormal):
        scalar = scalar and value.numbers is not None
    if not (scalar and len(dtypes) == 1 and dtypes <= DTYPES.keys()):
        packed = {p: encode(x, f"{key}.{p}", tensors) for p, x in parameters.items()}
        return {"distribution": name, "dtype": None, "parameters": packed}
    numbers = {p: x.item() for p, x in parameters.items()}
    if isinstance(value, ScaleMixtureNormal):  # as they were before they were rounded to tensors
        numbers = dict(zip(numbers, value.numbers or (), strict=True))
    return {"distribution": name, "dtype": dtypes.pop(), "parameters": numbers}


def _decode_distribution(
    tensors: dict[str, Tensor],
    distribution: str,
    dtype: str | None,
    parameters: Mapping[str, Any],
) -> Distribution:
    names = _PARAMETERS[distribution]
    if parameters.keys() != set(names):
        raise ValueError(f"{distribution} has the parameters {names}, got {list(parameters)}")
    if dtype is None:
        values = {p: decode(x, tensors) for p, x in parameters.items()}
    else:
        values = {k: torch.tensor(float(x), dtype=DTYPES[dtype]) for k, x in parameters.items()}
    made: Distribution = _FAMILIES[distribution](**values)  # checks them
    if dtype is not None and isinstance(made, ScaleMixtureNormal):
        pi, sigma1, sigma2 = (float(parameters[name]) for name in names)
        return mixture_of((pi, sigma1, sigma2), (values["pi"], values["sigma1"], values["sigma2"]))
    return made
