# SPDX-License-Identifier: Apache-2.0
"""A regression on placed points: chains of a small network's posterior.

Both axes run from -1 to 1. Short chains give a first band, longer ones the final band.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from pyro.distributions import Normal
from torch import Tensor

from pyro_bbb.likelihoods import Gaussian
from pyro_bbb.mcmc import sample
from pyro_bbb.models import BayesianModel
from pyro_bbb.networks import BayesianMLP
from pyro_bbb.prediction import RegressionPrediction, predict
from pyro_bbb.priors import FanInNormal

GRID = torch.linspace(-1, 1, 101)[:, None]  # x of the band
NOISE = 0.1  # known std of the points around the curve
MOST = 200  # points
_UNIT = 1.7  # from the axes to the network's units, in which points on all of an axis have std 1


def bands(x: Tensor, y: Tensor) -> Iterator[RegressionPrediction]:
    """Sample the posterior given points ``[n, 1]``, and predict on `GRID` after each run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = BayesianMLP([1, 50, 1], prior=FanInNormal(2.5))
    model = BayesianModel(network, Gaussian(scale=NOISE * _UNIT), num_data=len(x))
    for steps in (300, 1000):
        data = _UNIT * x, _UNIT * y
        chains = sample(model, data, max_steps=steps, seed=0, progress=False)
        prediction = predict(model, chains, _UNIT * GRID, num_samples=100)
        assert isinstance(prediction, RegressionPrediction)  # by the likelihood above
        yield RegressionPrediction(Normal(prediction.sample_means / _UNIT, NOISE))


def examples() -> dict[str, tuple[Tensor, Tensor]]:
    """Return sets of points by name."""
    generator = torch.Generator().manual_seed(0)
    gap = torch.cat([torch.linspace(-0.8, -0.3, 12), torch.linspace(0.3, 0.8, 12)])[:, None]
    few = torch.tensor([[-0.5], [0.0], [0.4]])
    line = torch.linspace(-0.4, 0.4, 15)[:, None]
    wave = 0.6 * torch.sin(5 * gap) + NOISE * torch.randn(gap.shape, generator=generator)
    slope = 0.8 * line + NOISE * torch.randn(line.shape, generator=generator)
    return {
        "sine with a gap": (gap, wave),
        "three points": (few, torch.tensor([[0.2], [-0.3], [0.5]])),
        "a line": (line, slope),
    }
