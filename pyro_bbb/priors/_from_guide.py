# SPDX-License-Identifier: Apache-2.0
"""Posterior of one task as the prior of the next: variational continual learning.

Nguyen et al. (2018), "Variational Continual Learning".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyro.distributions as dist
import torch
from torch import Size, Tensor, nn
from torch.distributions import Distribution

from pyro_bbb._param_store import own_store
from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.saving import saveable
from pyro_bbb.priors._base import ByName, Independent, Prior, PriorLike, saveable_by_name

_ONE_BELOW, _ONE_ABOVE = torch.special.ndtr(torch.tensor([-1.0, 1.0]).double()).tolist()
_SKEWNESS = 1e-3  # largest relative difference of a Normal's distances to both quantiles


@locked
def from_guide(guide: Any, default: PriorLike | None = None) -> Prior:
    """Make the posterior of one task the prior of the next.

    Each weight has its marginal Normal under the present guide, without gradient. Correlations are
    dropped: a full-rank posterior passes on its variances only.

    Args:
        guide: a trained guide with Normal marginals: `AutoSoftplusNormal`, or one of Pyro's that
            has ``median`` and ``quantiles``.
        default: prior of weights without a Normal marginal in the guide; without it they are an
            error where the network is built.

    Returns:
        A prior by the weights' names in the network, without the model's ``network.``.

    Raises:
        TypeError: the guide has no quantiles.
        ValueError: a weight has scale 0 (it was pruned) or is not finite, or none is Normal.
    """
    if not hasattr(guide, "quantiles"):
        raise TypeError(f"guide must have a method quantiles, got {type(guide).__name__}")
    priors: dict[str, PriorLike] = {
        name.removeprefix("network."): Marginal(loc, scale)
        for name, loc, scale in _normal_marginals(guide)
    }
    if default is not None:
        priors["*"] = default
    if not priors:
        raise ValueError("guide must have a Normal posterior of a weight, and has none of any")
    return FromGuide(priors)


@saveable_by_name
class FromGuide(ByName):
    """The marginals of a guide by name; see `from_guide`."""

    _missing = (
        "the guide has no Normal posterior of {name!r} for a prior, only of {patterns}; "
        "pass default= for weights the guide lacks"
    )


@saveable(lambda prior: {"loc": prior.distribution.loc, "scale": prior.distribution.scale})
class Marginal(Independent):
    """Independent Normals of the weight's shape."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        super().__init__(dist.Normal(loc, scale))

    def forward(self, module: nn.Module, name: str, shape: Size) -> Distribution:
        """Return the Normals as one event.

        Raises:
            ValueError: the weight has another shape. (Broadcasting would be silently wrong.)
        """
        own = self.distribution.batch_shape
        if shape != own:
            raise ValueError(
                f"the guide's {name!r} must have the weight's shape {list(shape)}, got {list(own)}"
            )
        return super().forward(module, name, shape)


def _normal_marginals(guide: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, mean and standard deviation of each latent with Normal quantiles."""
    with own_store(guide), torch.no_grad():
        quantiles = guide.quantiles([_ONE_BELOW, 0.5, _ONE_ABOVE])
    for name, (below, loc, above) in quantiles.items():
        scale = (above - below) / 2
        if not (loc.isfinite() & (scale > 0) & scale.isfinite()).all():
            raise ValueError(
                f"guide must have finite means and positive scales, got others for {name!r}; "
                "pruned weights have scale 0 and cannot become priors"
            )
        rounding = 8 * torch.finfo(loc.dtype).eps * loc.abs()
        if ((above + below - 2 * loc).abs() <= _SKEWNESS * scale + rounding).all():
            yield name, loc.clone(), scale
