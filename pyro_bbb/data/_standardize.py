# SPDX-License-Identifier: Apache-2.0
"""Columns at mean 0 and standard deviation 1, and back in their own units."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_bbb._utils.inputs import weight_of, weighted
from pyro_bbb._utils.validation import all_finite, tensor

_ROUNDING = 1e-14  # a column whose deviations are below this fraction of its size is constant


@dataclass(frozen=True)
class Standardization:
    """$z = (v - m) / s$ for each column.

    Args:
        mean: m, ``[...]`` of one row, float64, in the columns' units.
        scale: s, of the same shape, positive; 1 where a column is constant.
    """

    mean: Tensor
    scale: Tensor

    def __call__(self, values: Tensor) -> Tensor:
        """Return z, ``[n, ...]``, in the dtype of floating values."""
        values = tensor("values", values)
        if values.shape[1:] != self.mean.shape:
            expected, got = list(self.mean.shape), list(values.shape[1:])
            raise ValueError(f"values must have rows of shape {expected}, got {got}")
        dtype = values.dtype if values.is_floating_point() else torch.get_default_dtype()
        mean, scale = self.mean.to(values.device), self.scale.to(values.device)
        # (v - m) / s by halves: the difference of finite values may be infinite
        return ((values.double() / 2 - mean / 2) / scale * 2).to(dtype)


def standardize(
    values: Tensor, *, sample_weight: Tensor | None = None
) -> tuple[Tensor, Standardization]:
    """Scale columns to mean 0 and standard deviation 1, as priors of scale 1 expect them.

        y, in_units = bbb.data.standardize(y_train)  # targets; the same for inputs
        ... fit(model, guide, (x, y)) ...
        prediction = predict(model, guide, x_test).rescaled(in_units.mean, in_units.scale)

    Args:
        values: training rows, ``[n, ...]``; the standard deviation divides by n.
        sample_weight: weights ``[n]`` of the rows in both means, as for `fit`.

    Returns:
        The rows standardised, and the transformation, to apply to other rows.
    """
    values = tensor("values", values)
    if values.is_complex():
        raise TypeError(f"values must be real, got {values.dtype}")
    if values.ndim == 0 or len(values) == 0 or values.is_meta or not all_finite(values):
        raise ValueError(f"values must be finite rows, got shape {list(values.shape)}")
    precise = values.double()
    # in a power of 2 near the largest value, exactly, so that no square overflows or vanishes
    size = precise.abs().amax(0)
    unit = torch.where(size > 0, size / (2 * size.frexp().mantissa), 1.0)
    relative = precise / unit
    weight = weight_of(weighted(values, sample_weight))
    mean = _mean(relative, weight)
    scale = _mean((relative - mean).square(), weight).sqrt()
    constant = scale * unit <= _ROUNDING * size
    scaling = Standardization(mean * unit, (scale * unit).masked_fill(constant, 1.0))
    return scaling(values), scaling


def _mean(values: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return values.mean(0)
    return torch.tensordot(weight.double() / weight.double().sum(), values, 1)
