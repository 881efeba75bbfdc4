# SPDX-License-Identifier: Apache-2.0
"""Python values as JSON with tensors apart, and back.

`encode` is for constructor arguments, distributions among them; every sequence is a tuple. `pack`
is for optimizer states, where dicts may have integer keys. `decode` reads both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_bbb.distributions import ScaleMixtureNormal
from pyro_bbb.distributions.scale_mixture import mixture_of
from pyro_bbb.persistence.archive import Json

_FAMILIES: dict[str, tuple[Any, list[str]]] = {
    "Beta": (dist.Beta, ["concentration1", "concentration0"]),
    "Cauchy": (dist.Cauchy, ["loc", "scale"]),
    "Chi2": (dist.Chi2, ["df"]),
    "Exponential": (dist.Exponential, ["rate"]),
    "Gamma": (dist.Gamma, ["concentration", "rate"]),
    "Gumbel": (dist.Gumbel, ["loc", "scale"]),
    "HalfCauchy": (dist.HalfCauchy, ["scale"]),
    "HalfNormal": (dist.HalfNormal, ["scale"]),
    "InverseGamma": (dist.InverseGamma, ["concentration", "rate"]),
    "Laplace": (dist.Laplace, ["loc", "scale"]),
    "LogNormal": (dist.LogNormal, ["loc", "scale"]),
    "Normal": (dist.Normal, ["loc", "scale"]),
    "ScaleMixtureNormal": (ScaleMixtureNormal, ["pi", "sigma1", "sigma2"]),
    "StudentT": (dist.StudentT, ["df", "loc", "scale"]),
    "Uniform": (dist.Uniform, ["low", "high"]),
}
_NAMES = {family: name for name, (family, _) in _FAMILIES.items()}
DTYPES = {
    str(x).removeprefix("torch."): x
    for x in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


class CannotDescribe(ValueError):
    """A network, a prior or a likelihood cannot be expressed in the format."""


def encode(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """Return the JSON of an argument, and add its tensors under names that begin with ``key``."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, (tuple, list)):
        return [encode(item, f"{key}.{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, Tensor):
        tensors[key] = value
        return {"tensor": key}
    if isinstance(value, Distribution):
        return _encode_distribution(value, key, tensors)
    raise CannotDescribe(f"{key} is {value!r}")


def decode(value: Json, tensors: dict[str, Tensor]) -> Any:
    """Return the value of `encode`, lists as tuples, or of `pack`; its tensors are removed."""
    if isinstance(value, list):
        return tuple(decode(item, tensors) for item in value)
    if not isinstance(value, dict):
        return value
    if "distribution" in value:
        return _decode_distribution(tensors, **value)
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors.pop(content)
    if kind == "float":
        return float(content)
    if kind == "dict":
        return {key: decode(item, tensors) for key, item in content}
    sequence: Any = {"list": list, "tuple": tuple}[kind]
    return sequence(decode(item, tensors) for item in content)


def _encode_distribution(value: Any, key: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if type(value) not in _NAMES:
        raise CannotDescribe(f"{key} is a {type(value).__name__}, which has no name in the format")
    name = _NAMES[type(value)]
    parameters = {part: getattr(value, part).detach() for part in _FAMILIES[name][1]}
    dtypes = {str(x.dtype).removeprefix("torch.") for x in parameters.values()}
    scalar = all(x.dim() == 0 and x.isfinite() for x in parameters.values())
    if scalar and len(dtypes) == 1 and dtypes <= DTYPES.keys():
        numbers = {part: x.item() for part, x in parameters.items()}
        record = {"distribution": name, "dtype": dtypes.pop(), "parameters": numbers}
        given = isinstance(value, ScaleMixtureNormal) and value.same_for_each
        return record | ({"given": list(given)} if given else {})
    packed = {part: encode(x, f"{key}.{part}", tensors) for part, x in parameters.items()}
    return {"distribution": name, "dtype": None, "parameters": packed}


def _decode_distribution(
    tensors: dict[str, Tensor],
    distribution: str,
    dtype: str | None,
    parameters: Mapping[str, Any],
    given: Sequence[float] = (),
) -> Distribution:
    family, names = _FAMILIES[distribution]
    if parameters.keys() != set(names):
        raise ValueError(f"{distribution} has the parameters {names}, got {list(parameters)}")
    if dtype is None:
        values = {part: decode(x, tensors) for part, x in parameters.items()}
    else:
        values = {k: torch.tensor(float(x), dtype=DTYPES[dtype]) for k, x in parameters.items()}
    made: Distribution = family(**values)
    if given:  # Python numbers of a mixture, before they were rounded to tensors
        pi, sigma1, sigma2 = map(float, given)
        rounded = values["pi"], values["sigma1"], values["sigma2"]
        pairs = zip((pi, sigma1, sigma2), rounded, strict=True)
        if not all(math.isclose(exact, x.item(), rel_tol=0.01) for exact, x in pairs):
            raise ValueError(f"{distribution} must be given by its parameters, got {given}")
        return mixture_of((pi, sigma1, sigma2), rounded)
    return made


def pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Json:
    """Return the JSON form of a value; tensors are added under names that begin with ``name``."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        pairs = [[_key(name, key), pack(v, f"{name}.{key}", tensors)] for key, v in value.items()]
        return {"dict": pairs}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [pack(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if not (value is None or isinstance(value, bool | int | float | str)):
        raise TypeError(f"{name} must consist of numbers and tensors, got {value!r}")
    return value


def _key(name: str, key: Any) -> Json:
    if not isinstance(key, str | int):
        raise TypeError(f"{name} must have strings or integers as keys, got {key!r}")
    return key
