"""Columns of a table at mean 0 and standard deviation 1, and back in their own units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]

_ROUNDING = 1e-14  # a column whose deviations are below this share of its size is constant


@dataclass(frozen=True)
class Scaling:
    """$z = (v - m) / s$ for each column.

    Args:
        mean: m, ``[columns]``, in the columns' units.
        scale: s, ``[columns]``, likewise, positive; 1 where a column is constant.
    """

    mean: Array
    scale: Array

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
