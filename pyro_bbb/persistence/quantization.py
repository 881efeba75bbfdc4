# SPDX-License-Identifier: Apache-2.0
r"""Means and scales of independent Normals as small integers, as precise as the posterior is.

A mean moved by $\delta$ costs $\mathrm{KL} = \delta^2 / 2\sigma^2$. Each is rounded to a multiple
of its weight's $\sigma$, hence by at most $\sigma / 2$ and on average by $E\delta^2 =
\sigma^2 / 12$: 1/24 nat a weight. Steps proportional to $\sigma$ take the fewest bits for a given
sum of these costs. Before it, $\rho$ is rounded to a multiple of 1/16, which changes $\sigma =
\mathrm{softplus}(\rho)$ by at most 3.2 % and costs at most 0.001 nat. Removed weights take one
level of $\rho$ and no mean. Hence a layer of n weights needs about $\log_2(1 + 2\max|\mu|/\sigma)$
bits for a mean, less after deflation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pyro_bbb._utils.files import LoadError
from pyro_bbb.distributions import softplus
from pyro_bbb.guides import AutoSoftplusNormal
from pyro_bbb.persistence.json_codec import DTYPES

_STEPS = 16  # of rho, in 1
_LEVELS = (torch.int8, torch.int16, torch.int32)


def quantize(posterior: object, prefix: str, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Replace means and rho of an `AutoSoftplusNormal`, or of such members, by integers.

    Returns:
        The float type of each mean that was replaced, by its name in ``tensors``.
    """
    dtypes = {}
    for path, guide in posterior.named_modules() if isinstance(posterior, nn.Module) else ():
        for name in guide.site_names if type(guide) is AutoSoftplusNormal else ():
            name = f"{prefix}{path}{'.' * bool(path)}locs.{name}"
            loc, rho = tensors[name], tensors[_of_rho(name)]
            if levels := _levels(loc, rho):
                tensors[name], tensors[_of_rho(name)] = levels
                dtypes[name] = str(loc.dtype).removeprefix("torch.")
    return dtypes


def dequantize(dtypes: dict[str, str], tensors: dict[str, Tensor]) -> None:
    """Replace the integers of `quantize` by means and rho."""
    for name, dtype in dtypes.items():
        levels, of_rho = tensors[name], tensors[_of_rho(name)]
        left = of_rho != torch.iinfo(of_rho.dtype).min
        if list(levels.shape) != [left.sum()]:
            raise LoadError(f"{name} must have {left.sum()} values, got {list(levels.shape)}")
        rho = (of_rho.double() / _STEPS).where(left, -math.inf)
        loc = torch.zeros_like(rho)
        loc[left] = levels * softplus(rho[left])
        tensors[name], tensors[_of_rho(name)] = loc.to(DTYPES[dtype]), rho.to(DTYPES[dtype])


def _of_rho(name: str) -> str:
    return name.replace(".locs.", ".rhos.", 1)


def _levels(loc: Tensor, rho: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return integers for the means left, ``[n]``, and for rho; None where they do not suffice."""
    left = rho > -math.inf
    rounded = (rho[left].double() * _STEPS).round()
    means = _smallest((loc[left] / softplus(rounded / _STEPS)).round())
    scales = _smallest(rounded)
    if means is None or scales is None or loc[~left].any():  # not finite, or a scale near 0
        return None
    of_rho = torch.full(rho.shape, torch.iinfo(scales.dtype).min, dtype=scales.dtype)
    of_rho[left] = scales
    return means, of_rho


def _smallest(levels: Tensor) -> Tensor | None:
    """Return whole numbers in the smallest integer type, whose least value is left free."""
    for dtype in _LEVELS:
        if (levels.abs() <= torch.iinfo(dtype).max).all():
            return levels.to(dtype)
    return None
