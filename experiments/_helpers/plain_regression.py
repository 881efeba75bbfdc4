# SPDX-License-Identifier: Apache-2.0
"""Networks without random weights that predict a Normal, alone or as an ensemble."""

import torch
from torch import Tensor, nn
from torch.distributions import Normal

import pyro_bbb as bbb


class Plain(nn.Module):
    """Network without random weights, of these hidden units, that predicts a Normal."""

    def __init__(self, units: tuple[int, ...]) -> None:
        super().__init__()
        sizes, layers = [1, *units, 1], list[nn.Module]()
        for n_in, n_out in zip(sizes[:-1], sizes[1:], strict=True):
            layers += [nn.Linear(n_in, n_out), nn.ReLU()]
            nn.init.kaiming_normal_(layers[-2].weight)
        self.mean = nn.Sequential(*layers[:-1])
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Normal:
        """The predicted Normal."""
        loc = self.mean(x)
        return Normal(loc, self.log_scale.exp().expand_as(loc))


def predict_plain(networks: list[Plain], x: Tensor) -> bbb.RegressionPrediction:
    """Networks without random weights as an ensemble, which may be of one."""
    with torch.no_grad():
        each = [network(x) for network in networks]
    loc, scale = (torch.stack([getattr(n, name) for n in each]) for name in ("loc", "scale"))
    return bbb.RegressionPrediction(Normal(loc, scale))
