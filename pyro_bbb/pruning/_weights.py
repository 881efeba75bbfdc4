# SPDX-License-Identifier: Apache-2.0
r"""Pruning by signal-to-noise ratio (Blundell et al. 2015, section 5.1 and table 2).

A weight whose posterior mean is small against its standard deviation, $|\mu|/\sigma$, can be
removed with little effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_bbb._utils import validation as checks
from pyro_bbb.pruning._units import remove_units

if TYPE_CHECKING:
    from pyro_bbb.models import BayesianModel

__all__ = ["PrunableGuide", "keeping", "prune", "signal_to_noise"]

G = TypeVar("G", bound="PrunableGuide")


class PrunableGuide(Protocol):
    """Guide with a mean and a scale per weight."""

    @property
    def weight_names(self) -> list[str]:
        """Return the names of the latents that are weights."""

    def loc(self, name: str) -> Tensor:
        """Return the posterior mean."""

    def scale(self, name: str) -> Tensor:
        """Return the posterior standard deviation."""

    def without(self: G, removed: Mapping[str, Tensor]) -> G:
        """Return a copy without the weights where the masks are true."""


def signal_to_noise(guide: PrunableGuide) -> dict[str, Tensor]:
    r"""Return $|\mu| / \sigma$ of every weight and bias by site name; 0 for removed weights.

    `plots.snr_density_and_cdf` shows it in decibel, as ``10 * log10`` of the ratio.

    Raises:
        TypeError: the guide has no posterior mean and scale per weight.
    """
    if not hasattr(guide, "weight_names"):
        hint = f"{type(guide).__name__}: train a guide that has means and scales by bbb.fit"
        raise TypeError(f"guide must be an AutoSoftplusNormal, got {hint}")
    moments = {name: (guide.loc(name), guide.scale(name)) for name in guide.weight_names}
    return {name: (m.abs() / s).where(m != 0, 0.0) for name, (m, s) in moments.items()}


@overload
def prune(
    guide: G,
    fraction: float | None = None,
    *,
    threshold: float | None = None,
    units: Literal[False] = False,
    x: None = None,
) -> G: ...


@overload
def prune(
    guide: G,
    fraction: float | None = None,
    *,
    threshold: float | None = None,
    units: Literal[True],
    x: Any = None,
) -> tuple[BayesianModel, G]: ...


def prune(
    guide: Any,
    fraction: float | None = None,
    *,
    threshold: float | None = None,
    units: bool = False,
    x: Any = None,
) -> Any:
    r"""Remove the weights, or whole units, of lowest signal-to-noise ratio.

    All layers and biases are ranked together. Give either ``fraction`` or ``threshold``.

    With ``units=True`` the network becomes narrower. A unit is an output of a linear layer or a
    channel of a convolution. Its ratio is $\sqrt{\sum\mu^2 / \sigma^2}$ over its incoming weights
    and bias, or over its outgoing weights, whichever is lower; over the outgoing ones alone where a
    unit of 0 is read as another number, after a sigmoid or batch normalisation. Units that have no
    weights of such a kind left always go; without ``fraction`` and ``threshold`` no others do. A
    unit stays if a later layer reads it together with others (residual sums, layer normalisation,
    attention), if it is an output of the network, or as the last one of its layer. Priors are those
    of the narrower layers: `priors.FanInNormal` widens.

    Args:
        guide: a trained guide; not changed.
        fraction: fraction of the weights to remove, in [0, 1]; those already removed count. With
            ``units=True``, fraction of the units that can be removed.
        threshold: ratio below which weights or units are removed; of weights, after training with a
            prior that prunes, 0.22 (Molchanov et al. 2017, by the logarithm of its inverse square,
            above 3).
        units: whether whole units are removed.
        x: inputs of the network, ``[n, ...]``, with ``units=True``. The first is run to find which
            layers read a unit. Only needed if its shape does not follow from the network.

    Returns:
        A new guide, in which removed weights are exactly 0 with scale exactly 0, also in further
        training. With ``units=True`` a new model and its guide, without the removed units, which
        predict as the old ones do after removal of these units' weights.

    Raises:
        ValueError: the fraction is outside [0, 1], the threshold negative, both are given, or
            neither, or ``x``, without ``units=True``; the network has no units that can be removed,
            its forward pass states their number, or ``x`` is missing.
        TypeError: the guide has no posterior mean and scale per weight.
    """
    if fraction is not None and threshold is not None or not units and fraction is threshold:
        got = f"fraction={fraction!r} and threshold={threshold!r}"
        raise ValueError(f"prune must have either fraction or threshold, got {got}")
    if fraction is not None:
        fraction = checks.fraction("fraction", fraction)
    if threshold is not None:
        threshold = checks.at_least_zero("threshold", threshold)
    checks.kind("units", units, bool)
    if x is not None and not units:
        raise ValueError("x must be None without units=True: single weights need no inputs")
    ratios = signal_to_noise(guide)
    if units:
        return remove_units(guide, fraction, threshold, x)
    flat = torch.cat([ratio.flatten() for ratio in ratios.values()])
    removed = flat < (threshold or 0.0)
    if fraction is not None:
        removed[flat.argsort(stable=True)[: round(fraction * len(flat))]] = True
    by_site = removed.split([ratio.numel() for ratio in ratios.values()])
    masks = {name: m.view_as(ratios[name]) for name, m in zip(ratios, by_site, strict=True)}
    return guide.without(masks)


def keeping(model: Callable[..., Any], guide: Any) -> Callable[..., Any]:
    """Return the model without the prior density of weights that a guide has removed.

    A fixed prior has a constant density at 0, but a learned one would be drawn towards the zeros.
    """
    masks = getattr(guide, "unpruned", None)
    return _MaskPruned(masks)(model) if masks else model


class _MaskPruned(Messenger):
    """Masks the priors of removed weights."""

    def __init__(self, masks: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.masks = masks

    def _pyro_sample(self, msg: Any) -> None:
        fn = msg["fn"]
        if msg["name"] in self.masks and isinstance(fn, dist.Independent):
            priors = fn.base_dist.expand(fn.batch_shape + fn.event_shape)
            msg["fn"] = priors.mask(self.masks[msg["name"]]).to_event(len(fn.event_shape))
