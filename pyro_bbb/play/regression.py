# SPDX-License-Identifier: Apache-2.0
"""A regression on points that somebody places: a small network that follows them.

Both axes run from -1 to 1. Training on new points starts from the posterior of those before and is
cut into stages, so that the band can be shown on its way. The KL has 0.03 of its weight: with a
handful of points a mean-field posterior would else stay near the prior. It is still too sure
between two groups of points (Foong et al., https://arxiv.org/abs/1909.00719).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from pyro.distributions import Normal
from torch import Tensor

from pyro_bbb.guides import AutoSoftplusNormal
from pyro_bbb.likelihoods import Gaussian
from pyro_bbb.models import BayesianModel
from pyro_bbb.networks import BayesianMLP
from pyro_bbb.prediction import RegressionPrediction, predict
from pyro_bbb.training import KLSchedule, fit

GRID = torch.linspace(-1, 1, 101)[:, None]  # where the band is drawn
NOISE = 0.1  # known sd of the points around the curve
MOST = 200  # points
DRAWS = 100
_X, _Y = 3.0, 10.0  # from the axes to the network's units, in which the noise has sd 1
_STEPS, _STAGES = 100, 3


class Curve:
    """The posterior of one person's points."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.forget()

    def forget(self) -> None:
        """Back to an untrained network."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            network = BayesianMLP([1, 20, 20, 1], prior=Normal(0.0, 1.0))
            self.model = BayesianModel(network, Gaussian(scale=NOISE * _Y), num_data=1)
            self.guide = AutoSoftplusNormal(self.model, init_loc="he")

    def learn(self, x: Tensor, y: Tensor) -> Iterator[RegressionPrediction]:
        """Trains on the points ``[n, 1]``, and after each stage gives the prediction on `GRID`."""
        self.model.num_data = len(x)
        for stage in range(_STAGES):
            fit(
                self.model,
                self.guide,
                (_X * x, _Y * y),
                epochs=_STEPS,
                batch_size=len(x),
                lr=0.02,
                lr_schedule="cosine" if stage == _STAGES - 1 else "constant",
                kl_schedule=KLSchedule(temperature=0.03),
                estimator="local_reparam",
                loss="mean_field",
                progress=False,
                seed=self.seed,
            )
            yield self.predict()

    def predict(self) -> RegressionPrediction:
        """The prediction on `GRID`, in the axes' units."""
        found = predict(self.model, self.guide, _X * GRID, num_samples=DRAWS, seed=self.seed)
        assert isinstance(found, RegressionPrediction)  # by the likelihood above
        return RegressionPrediction(Normal(found.sample_means / _Y, NOISE))


def examples() -> dict[str, tuple[Tensor, Tensor]]:
    """Points to begin with, by name."""
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
