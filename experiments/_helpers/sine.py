# SPDX-License-Identifier: Apache-2.0
"""Noisy sine: data and figures of `sine_regression`."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import pyro_bbb as bbb
from _helpers.run import Data, Picture, Run

UNIT_SCALE = math.log(math.e - 1)  # the rho at which softplus(rho) = 1


@dataclass(frozen=True)
class Problem:
    """Data of one seed, and the inputs of predictions."""

    data: Data
    x: Tensor
    noise: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, seed: int, *, even_noise: bool) -> "Problem":
        """32 points with noise of sd 1; or 512 whose noise grows from 0.2 to 2.2."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.linspace(-0.5, 0.5, 32 if even_noise else 512)[:, None]
        noise = torch.ones_like if even_noise else growing
        y = sine(x) + noise(x) * torch.randn(x.shape, generator=generator)
        return cls((x, y), torch.linspace(-1.5, 1.5, 1000)[:, None], noise)


def sine(x: Tensor) -> Tensor:
    """The truth without its noise."""
    return 10 * torch.sin(2 * math.pi * x)


def growing(x: Tensor) -> Tensor:
    """Standard deviation of the uneven noise."""
    return 0.2 + 2 * (x + 0.5)


def draw_bands(run: Run, seen: dict[str, bbb.RegressionPrediction], x: Tensor) -> Picture:
    """Plot the mean and two standard deviations, epistemic and total, a panel for each variant."""
    panels = {}
    for name, prediction in seen.items():
        mean = prediction.mean.flatten()
        panels[name] = {
            label: (x.flatten(), mean, mean - 2 * std.flatten(), mean + 2 * std.flatten())
            for label, std in (("total", prediction.std), ("epistemic", prediction.epistemic_std))
        } | {"truth": (x.flatten(), sine(x).flatten())}
    caption = "Mean and 2 sd bands. The inner band is what more data would remove."
    return run.curves("bands", caption, panels, xlabel="x", ylabel="y", ylim=(-45, 45))
