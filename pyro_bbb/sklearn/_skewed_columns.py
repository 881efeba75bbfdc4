# SPDX-License-Identifier: Apache-2.0
r"""Input columns with a long upper tail, repeated after a power transform.

A frequency or a concentration often acts by its logarithm. With $u = 1 + 10 (x - \min x)_+$ of a
standardised column, the transform is that of Box and Cox (1964),

$$t_\lambda(x) = (u^\lambda - 1) / \lambda, \qquad t_0(x) = \log u,$$

with $\lambda$ from -1 to 1 of largest likelihood if $t_\lambda$ is Normal, $(\lambda - 1) \sum_i
\log u_i - \frac n2 \log \operatorname{Var} t_\lambda$. It is constant below the least training
value, where its slope would be large. A column stays single if the transform hardly changes it,
or if it has one or two values, which any transform maps to two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_bbb.data import Standardization, standardize

_UNITS = 10.0  # increase of u for one standard deviation of the column
_POWERS = [i / 4 for i in range(-4, 5)]  # lambda
_ALIKE = 0.95  # least correlation of a column with a transform that hardly changes it


@dataclass(frozen=True)
class SkewedColumns:
    """Transforms of k columns.

    Args:
        column: numbers ``[k]`` of the columns.
        least: their least values in the training rows, ``[k]``.
        power: lambda, ``[k]``.
        mean: means of the transformed training values, ``[k]``.
        std: their standard deviations, ``[k]``.
    """

    column: Tensor
    least: Tensor
    power: Tensor
    mean: Tensor
    std: Tensor

    @classmethod
    def learn(cls, x: Tensor, weight: Tensor) -> SkewedColumns:
        """Return the transforms of training rows ``[n, d]`` of weights ``[n]``."""
        column = torch.tensor(
            [j for j, values in enumerate(x.T) if len(values.unique()) > 2]
        ).long()
        x, share = x[:, column], weight / weight.sum()
        least = x.amin(0)

        def transform(power: Tensor) -> tuple[Tensor, Standardization]:
            return standardize(_box_cox(x, least, power), sample_weight=weight)

        powers = torch.tensor(_POWERS, dtype=x.dtype)
        stds = torch.stack([transform(power)[1].scale for power in powers])
        logs = share @ (1 + _UNITS * (x - least)).log()
        power = powers[((powers[:, None] - 1) * logs - stds.log()).argmax(0)]
        transformed, scaling = transform(power)
        skewed = share @ (standardize(x, sample_weight=weight)[0] * transformed) < _ALIKE
        learned = column, least, power, scaling.mean, scaling.scale
        return cls(*(values[skewed] for values in learned))

    def __call__(self, x: Tensor) -> Tensor:
        """Return rows with the transformed columns added, ``[n, d + k]``."""
        transformed = _box_cox(x[:, self.column], self.least, self.power)
        return torch.cat([x, (transformed - self.mean) / self.std], 1)


def _box_cox(x: Tensor, least: Tensor, power: Tensor) -> Tensor:
    log = (_UNITS * (x - least)).clamp_min(0.0).log1p()
    return torch.where(power == 0, log, torch.expm1(power * log) / power)
