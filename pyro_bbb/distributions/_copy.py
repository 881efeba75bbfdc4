# SPDX-License-Identifier: Apache-2.0
"""Copies of distributions with other tensors inside, or without validation."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributions import Distribution, Transform

from pyro_bbb.distributions.scale_mixture import ScaleMixtureNormal


def map_tensors(distribution: Distribution, fn: Callable[[Tensor], Tensor]) -> Distribution:
    """Copy a distribution (nested ones too) with ``fn`` applied to every tensor inside."""
    return _map_tensors(distribution, fn, {})


def _map_tensors(x: Any, fn: Callable[[Tensor], Tensor], memo: dict[int, Any]) -> Any:
    if isinstance(x, Tensor):
        return fn(x)
    if hasattr(x, "_fields"):  # a named tuple
        return type(x)(*(_map_tensors(item, fn, memo) for item in x))
    if isinstance(x, (list, tuple)):
        return type(x)(_map_tensors(item, fn, memo) for item in x)
    if isinstance(x, weakref.ref):
        return None  # a transform's cached inverse in some versions of torch
    if not isinstance(x, (Distribution, Transform)):
        return x
    if id(x) not in memo:  # a distribution and its transforms refer to one another
        memo[id(x)] = new = copy.copy(x)
        new.__dict__.update({key: _map_tensors(value, fn, memo) for key, value in vars(x).items()})
        if isinstance(new, ScaleMixtureNormal):
            new.derive()  # in the dtype of the new parameters
    return memo[id(x)]


def without_validation(distribution: Distribution) -> Distribution:
    """Copy without validation of values, which costs passes and fails inside ``torch.vmap``."""
    new = copy.copy(distribution)
    for key, value in vars(distribution).items():
        if isinstance(value, Distribution):
            setattr(new, key, without_validation(value))
    new._validate_args = False  # last, as some pass it on to the distribution inside
    return new
