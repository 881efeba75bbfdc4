"""Columns of a table at mean 0 and standard deviation 1, and back in their own units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from pyro_bbb.distributions.observation import Normal, StudentT
from pyro_bbb.likelihoods import Likelihood
from pyro_bbb.prediction import RegressionPrediction

Array: TypeAlias = NDArray[np.float64]
_ROUNDING = 1e-14  # a column whose deviations are below this share of its size is constant


@dataclass(frozen=True)
class Scaling:
    """$z = (v - m) / s$ for each column."""

    mean: Array  # m, [columns], in the columns' units
    scale: Array  # s, [columns], likewise, positive; 1 where a column is constant

    @classmethod
    def of(cls, values: Array) -> Scaling:
        """That of the rows given, ``[n, columns]``."""
        mean, scale = values.mean(0), values.std(0)
        constant = scale <= _ROUNDING * np.abs(values).max(0)
        return cls(mean, np.where(constant, 1.0, scale))

    @classmethod
    def none(cls, columns: int) -> Scaling:
        """That which changes nothing."""
        return cls(np.zeros(columns), np.ones(columns))

    def __call__(self, values: Array) -> Array:
        """From the columns' units to z."""
        scaled: Array = (values - self.mean) / self.scale
        return scaled

    def as_dict(self) -> dict[str, Any]:
        """For JSON, to the last digit."""
        return {"mean": self.mean.tolist(), "scale": self.scale.tolist()}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Scaling:
        """From what `as_dict` gave."""
        return cls(np.array(record["mean"], float), np.array(record["scale"], float))


_LOCATION_SCALE = (Normal, StudentT)  # families that stay the same under a change of units


def is_scaled(likelihood: Likelihood) -> bool:
    """Return whether the likelihood takes standardised targets; counts stay."""
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
