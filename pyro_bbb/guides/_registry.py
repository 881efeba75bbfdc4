# SPDX-License-Identifier: Apache-2.0
"""Guides by name: a new one needs a line here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pyro_bbb.guides._autoguides import Delta, Flow, FullRank, LowRank, Normal
from pyro_bbb.guides._base import Guide
from pyro_bbb.guides._ensemble import Ensemble
from pyro_bbb.guides._laplace import Laplace
from pyro_bbb.guides._last_layer import LastLayer
from pyro_bbb.guides._mean_field import AutoSoftplusNormal
from pyro_bbb.guides._rank1 import Rank1Ensemble
from pyro_bbb.guides._swag import SWAG


def ensemble(
    model: Callable[..., Any], size: int = 5, guide: str = "delta", **options: Any
) -> Ensemble:
    """Make an ensemble of guides of one name, with different initial values.

    Args:
        model: the model that the guides are for.
        size: number of members.
        guide: name of the members; ``"delta"`` makes a deep ensemble, ``"swag"`` MultiSWAG.
        **options: keyword arguments of the members' class; ``init_loc`` is ``"he"`` by default,
            which leaves the B of `adapt`'s adapters at 0.

    Raises:
        ValueError: an unknown name, a number out of range, or points with equal initial values.
    """
    options.setdefault("init_loc", "he")
    return Ensemble(model, partial(make, guide, **options), size)


GUIDES: dict[str, Callable[..., Guide]] = {
    "softplus_normal": AutoSoftplusNormal,
    "normal": Normal,
    "low_rank": LowRank,
    "full_rank": FullRank,
    "flow": Flow,
    "delta": Delta,
    "vbll": LastLayer,
    "laplace": Laplace,
    "swag": SWAG,
    "rank1_ensemble": Rank1Ensemble,
    "ensemble": ensemble,
}


def make(name: str, model: Callable[..., Any], **options: Any) -> Guide:
    """Make a guide by its name.

    Args:
        name: one of `GUIDES`.
        model: the model that the guide is for.
        **options: keyword arguments of the guide's class (of `ensemble`, for that name).

    Raises:
        ValueError: an unknown name.
    """
    if not isinstance(name, str) or name not in GUIDES:
        raise ValueError(f"name must be one of {sorted(GUIDES)}, got {name!r}")
    return GUIDES[name](model, **options)
