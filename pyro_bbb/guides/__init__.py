# SPDX-License-Identifier: Apache-2.0
"""Guides: variational families of posteriors, by name.

| name | posterior |
|---|---|
| ``softplus_normal`` | independent Normals, `AutoSoftplusNormal` |
| ``normal`` | independent Normals, `Normal` |
| ``low_rank`` | a Normal of covariance low-rank plus diagonal, `LowRank` |
| ``full_rank`` | a Normal of any covariance, `FullRank` |
| ``flow`` | an inverse autoregressive flow, `Flow` |
| ``delta`` | a point, the MAP, `Delta` |
| ``vbll`` | a Normal of full covariance on the last layer alone, `LastLayer` |
| ``laplace`` | a Normal at the MAP by the curvature there, `Laplace` |
| ``swag`` | a Normal of the iterates of training, `SWAG` |
| ``rank1_ensemble`` | networks that differ by random rank-one factors, `Rank1Ensemble` |
| ``ensemble`` | several of these with different initial values, `Ensemble` |

`Guide` is their interface: draws, moments, outputs and state. A guide that is Normal has a tangent,
in ``linearization.py``: outputs of a network linear in its weights.

Imports the packages up to `latents`, never `priors`. A new guide is one module here and its name
in `GUIDES`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from pyro_bbb.guides._autoguides import Delta, Flow, FullRank, LowRank, Normal
from pyro_bbb.guides._base import Approximated, ClosedForm, Collected, Guide, collected
from pyro_bbb.guides._ensemble import Ensemble
from pyro_bbb.guides._laplace import Laplace, LinearizationWarning, NoModeError
from pyro_bbb.guides._last_layer import LastLayer
from pyro_bbb.guides._mean_field import AutoSoftplusNormal
from pyro_bbb.guides._rank1 import Rank1Ensemble
from pyro_bbb.guides._swag import SWAG, TooFewIteratesError
from pyro_bbb.guides._swag import batchnorms as batchnorms
from pyro_bbb.guides._swag import renew_running_statistics as renew_running_statistics
from pyro_bbb.guides.scale_kl import weighs_kl

__all__ = [
    "Approximated",
    "AutoSoftplusNormal",
    "ClosedForm",
    "Collected",
    "Delta",
    "Ensemble",
    "Flow",
    "FullRank",
    "GUIDES",
    "Guide",
    "Laplace",
    "LastLayer",
    "LinearizationWarning",
    "LowRank",
    "NoModeError",
    "Normal",
    "Rank1Ensemble",
    "SWAG",
    "TooFewIteratesError",
    "collected",
    "ensemble",
    "make",
    "weighs_kl",
]


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
