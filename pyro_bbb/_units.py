"""Predictions of scaled targets in the targets' own units."""

from __future__ import annotations

from typing import Any

import torch

from pyro_bbb._families import Normal, StudentT
from pyro_bbb._scaling import Scaling
from pyro_bbb.likelihoods import Likelihood
from pyro_bbb.summaries import RegressionPrediction

_LOCATION_SCALE = (Normal, StudentT)  # families that stay the same under a change of units


def is_scaled(likelihood: Likelihood) -> bool:
    """Whether the likelihood takes targets at mean 0 and standard deviation 1; counts stay."""
    return issubclass(likelihood.family, _LOCATION_SCALE)


def in_units(prediction: RegressionPrediction, scaling: Scaling) -> RegressionPrediction:
    """The predictive of $m + s z$ from that of z, ``[n, targets]``."""
    mixture: Any = prediction.components
    if not isinstance(mixture, _LOCATION_SCALE):
        return prediction
    mean, unit = (torch.from_numpy(x).to(mixture.loc) for x in (scaling.mean, scaling.scale))
    moved: dict[str, Any] = {"loc": mean + unit * mixture.loc, "scale": unit * mixture.scale}
    if isinstance(mixture, StudentT):
        moved["df"] = mixture.df
    return RegressionPrediction(type(mixture)(**moved))
