"""Initial positions of Markov chains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from pyro_bbb._utils.context import seeded
from pyro_bbb.guides.latents import as_initialiser, refuse_unknown
from pyro_bbb.mcmc._potential import Potential
from pyro_bbb.prediction import posterior_draws


def starting_points(potential: Potential, init: Any, seeds: list[int]) -> list[Tensor]:
    """A point of finite energy for each chain."""
    draw, positions = _initialiser(potential, init), []
    for seed in seeds:
        with seeded(seed), torch.no_grad():
            z = potential.unconstrain(draw())
        energy, gradient = potential.value_and_gradient(z)
        if not (energy.isfinite() and gradient.isfinite().all()):
            raise ValueError(f"init must be a point of positive density, got energy {energy:.4g}")
        positions.append(z)
    return positions


def _initialiser(potential: Potential, init: Any) -> Callable[[], dict[str, Tensor]]:
    """A function that draws a start."""
    if isinstance(init, str) and init == "prior":
        return potential.draw_prior
    if hasattr(init, "sample_posterior") or isinstance(init, AutoGuide):
        x = potential.x[:1]
        return lambda: {
            name: values[0]
            for name, values in next(posterior_draws(potential.model, init, x, 1)).items()
        }
    if init is None:
        init = potential.model.initial_locs()
    refuse_unknown(init, potential.sites)
    initialise = as_initialiser(init)
    return lambda: {name: initialise(site) for name, site in potential.sites.items()}
