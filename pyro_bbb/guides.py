"""Guides: families of posteriors for a model, each under a name.

| name | posterior |
|---|---|
| ``softplus_normal`` | independent Normals, `AutoSoftplusNormal` |
| ``normal`` | independent Normals, `Normal` |
| ``low_rank`` | a Normal of covariance low-rank plus diagonal, `LowRank` |
| ``full_rank`` | a Normal of any covariance, `FullRank` |
| ``flow`` | an inverse autoregressive flow, `Flow` |
| ``delta`` | a point, the MAP, `Delta` |
| ``laplace`` | a Normal at the MAP by the curvature there, `Laplace` |
| ``laplace_ggn`` | the same by the Gauss-Newton curvature, `LaplaceGGN` |
| ``ensemble`` | several of these, each from its own start, `Ensemble` |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pyro_bbb._ensemble import Ensemble
from pyro_bbb._guide import Approximated, Guide, weighs_kl
from pyro_bbb._joint import Flow, FullRank, LowRank
from pyro_bbb._laplace import Laplace, LaplaceGGN, NoModeError
from pyro_bbb._softplus_normal import AutoSoftplusNormal
from pyro_bbb._stock import Delta, Normal

__all__ = [
    "GUIDES",
    "Approximated",
    "AutoSoftplusNormal",
    "Delta",
    "Ensemble",
    "Flow",
    "FullRank",
    "Guide",
    "Laplace",
    "LaplaceGGN",
    "LowRank",
    "NoModeError",
    "Normal",
    "ensemble",
    "make",
    "weighs_kl",
]


def ensemble(
    model: Callable[..., Any], size: int = 5, guide: str = "delta", **options: Any
) -> Ensemble:
    """Guides of one name, each from its own start, as one posterior.

    Args:
        model: the model that the guides are for.
        size: number of members.
        guide: their name; of ``"delta"`` it is a deep ensemble.
        **options: keyword arguments of their class; ``init_loc`` is ``"he"`` where not given.

    Returns:
        The ensemble.

    Raises:
        ValueError: an unknown name, a number out of range, or points that start all alike.
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
    "laplace": Laplace,
    "laplace_ggn": LaplaceGGN,
    "ensemble": ensemble,
}


def make(name: str, model: Callable[..., Any], **options: Any) -> Guide:
    """A guide by its name.

    Args:
        name: one of `GUIDES`.
        model: the model that the guide is for.
        **options: keyword arguments of the guide's class (of `ensemble`, for that name).

    Returns:
        The guide.

    Raises:
        ValueError: an unknown name.
    """
    if not isinstance(name, str) or name not in GUIDES:
        raise ValueError(f"name must be one of {sorted(GUIDES)}, got {name!r}")
    return GUIDES[name](model, **options)
