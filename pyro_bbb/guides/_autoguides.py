# SPDX-License-Identifier: Apache-2.0
"""Pyro's autoguides as guides of this library: `Normal`, `Delta` and their base classes.

The mathematics is Pyro's; `Guide` adds its parameters, KL weight and copies, and the initial means
differ. Pyro starts weights at 0, where hidden units are equal, or at medians of prior samples, as
wide in every layer. Its initial standard deviation of 0.1 is too noisy for wide networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from pyro.infer import autoguide
from pyro.infer.autoguide import AutoGuide
from pyro.poutine import Trace
from torch import Tensor
from torch.distributions import transform_to

from pyro_bbb._utils.validation import count, positive, probabilities
from pyro_bbb.guides._base import Guide
from pyro_bbb.guides.initial_values import InitLoc, initial_loc
from pyro_bbb.latents import Site

INIT_SCALE = math.log1p(math.exp(-5.0))  # the initial scale of AutoSoftplusNormal


class _Support(NamedTuple):
    """Support and event dimensions of a latent, as Pyro's autoguides read them off its prior."""

    support: Any
    event_dim: int


class PrototypeFromLatents(AutoGuide):
    """Base of Pyro's autoguide in a wrapped one: the latents stand for a run of the model."""

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        (self.prototype_trace,) = args
        frames = [f for latent in self._latents.values() for f in latent.frames]
        self._prototype_frames = {frame.name: frame for frame in frames}


class WrappedAutoguide(Guide):
    """Guide that finds the latents and their initial means for one of Pyro's autoguides.

    Bases stand in the order ``WrappedAutoguide, Auto..., PrototypeFromLatents``: the first replaces
    methods of Pyro's class, whose own calls of ``super()`` then reach the last.
    """

    def _add_parameters(self, sites: Mapping[str, Site]) -> None:
        known = Trace() if self.prototype_trace is None else self.prototype_trace.copy()
        for name, site in sites.items():
            latent = self._latents[name]
            value = latent.constrain(initial_loc(latent, site, self._initialise).clone())
            node = {"type": "sample", "name": name, "is_observed": False, "value": value}
            space = _Support(site["fn"].support, site["fn"].event_dim)
            known.add_node(name, **node, fn=space, cond_indep_stack=latent.frames)
        if sites:
            self._build(known)

    def _build(self, known: Trace) -> None:
        """Make the parameters; existing ones stay the objects that an optimiser knows."""
        before = dict(self.named_parameters())
        self._setup_prototype(known)
        for name, parameter in before.items():
            path, _, leaf = name.rpartition(".")
            owner = self.get_submodule(path)
            new: Any = owner._parameters[leaf]
            if new.shape != parameter.shape:
                parameter.data = new.data
            owner._parameters[leaf] = parameter

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Posterior medians by site name."""
        self._known_latents()
        medians: dict[str, Tensor] = super().median(*args, **kwargs)
        return medians

    def quantiles(self, quantiles: Iterable[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Posterior quantiles, ``[len(quantiles), ...]`` by site name."""
        self._known_latents()
        levels = probabilities("quantiles", quantiles)
        found: dict[str, Tensor] = super().quantiles(levels, *args, **kwargs)  # type: ignore[misc]
        return found


class Normal(WrappedAutoguide, autoguide.AutoNormal, PrototypeFromLatents):
    """Independent Normals in Pyro's parametrisation, `pyro.infer.autoguide.AutoNormal`.

    Args:
        model: a `BayesianModel`, or any Pyro model.
        init_loc: initial means, see `AutoSoftplusNormal`.
        init_scale: initial standard deviation of every latent, in unconstrained space.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        init_loc: InitLoc | None = None,
        init_scale: float = INIT_SCALE,
    ) -> None:
        super().__init__(model, init_loc=init_loc, init_scale=positive("init_scale", init_scale))
        self._find_declared()

    def sample_posterior(self, num_samples: int) -> dict[str, Tensor]:
        """Independent samples of all latents, ``[num_samples, ...]`` by site name, no gradient."""
        draws, shape = {}, (count("num_samples", num_samples),)
        with torch.no_grad():
            for latent in self._known_latents():
                loc, scale = self._get_loc_and_scale(latent.name)
                draws[latent.name] = latent.constrain(dist.Normal(loc, scale).sample(shape))
        return draws


class Delta(WrappedAutoguide, autoguide.AutoDelta, PrototypeFromLatents):
    """Point estimate: MAP in the constrained space, `pyro.infer.autoguide.AutoDelta`.

    Args:
        model: a `BayesianModel`, or any Pyro model.
        init_loc: initial point, see `AutoSoftplusNormal`.
    """

    _onto = staticmethod(transform_to)  # a point needs no bijection: on a sphere there is none

    def __init__(self, model: Callable[..., Any], *, init_loc: InitLoc | None = None) -> None:
        super().__init__(model, init_loc=init_loc)
        self._find_declared()

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The point, by site name."""
        with torch.no_grad():
            return {x.name: attrgetter(x.name)(self).clone() for x in self._known_latents()}

    def quantiles(self, quantiles: Iterable[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The point at every level, ``[len(quantiles), ...]`` by site name."""
        return self.sample_posterior(len(probabilities("quantiles", quantiles)))

    def sample_posterior(self, num_samples: int) -> dict[str, Tensor]:
        """The point as ``num_samples`` equal samples."""
        num_samples = count("num_samples", num_samples)
        return {name: x.expand(num_samples, *x.shape) for name, x in self.median().items()}
