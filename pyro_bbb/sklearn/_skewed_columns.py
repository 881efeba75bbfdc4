# SPDX-License-Identifier: Apache-2.0
r"""Skewed input columns, repeated after a power transform.

A frequency or a concentration often acts by its logarithm. With $u = 1 + 10 (x - \min x)$ of a
standardised column, the transform is that of Box and Cox (1964), which continues as a line below
the training data's least value:

$$t_\lambda(x) = \begin{cases} (u^\lambda - 1) / \lambda & u > 1 \\ u - 1 & \text{else,} \end{cases}
\qquad t_0 = \log u.$$

$\lambda$ maximises the likelihood of Normal $t_\lambda$, $(\lambda - 1) \sum_i \log u_i -
\frac n2 \log \operatorname{Var} t_\lambda$. A column that the transform leaves nearly as it is is
not repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_UNITS = 10.0  # of u in a standard deviation
_POWERS = [i / 4 for i in range(-8, 13)]  # lambda, from -2 to 3
_ALIKE = 0.95  # correlation of a column with its transform, from which on it is left out


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
    def learn(cls, x: Tensor) -> SkewedColumns:
        """Return the transforms of the skewed columns of training rows ``[n, d]``."""
        varied = torch.tensor([len(column.unique()) > 2 for column in x.T])
        column = varied.nonzero()[:, 0]
        x = x[:, column]
        least = x.amin(0)
        logs = (1 + _UNITS * (x - least)).log().sum(0)
        powers = torch.tensor(_POWERS, dtype=x.dtype)
        spreads = torch.stack([_box_cox(x, least, power).var(0) for power in powers])
        likelihood = (powers[:, None] - 1) * logs - len(x) / 2 * spreads.log()
        power = powers[likelihood.argmax(0)]
        transformed = _box_cox(x, least, power)
        std, mean = torch.std_mean(transformed, 0, correction=0)
        product = ((x - x.mean(0)) * (transformed - mean)).mean(0)
        skewed = product < _ALIKE * std * x.std(0, correction=0)
        return cls(*(values[skewed] for values in (column, least, power, mean, std)))

    def __call__(self, x: Tensor) -> Tensor:
        """Return rows with the transformed columns added, ``[n, d + k]``."""
        transformed = _box_cox(x[:, self.column], self.least, self.power)
        return torch.cat([x, (transformed - self.mean) / self.std], 1)


def _box_cox(x: Tensor, least: Tensor, power: Tensor) -> Tensor:
    beyond = _UNITS * (x - least)
    log = beyond.clamp_min(0.0).log1p()
    scaled = torch.where(power == 0, log, torch.expm1(power * log) / power)
    return torch.where(beyond > 0, scaled, beyond)
