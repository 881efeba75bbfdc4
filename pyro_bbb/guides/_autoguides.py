"""Pyro's own automatic guides, mended where they go wrong with networks.

Their mathematics is Pyro's. What changes is what `Guide` gives them all (parameters that exist from
the start and are theirs, the weight of the KL, copies), where they start, and how they are drawn
from. Pyro's defaults start weights at 0, where hidden units are alike, or at medians of a few prior
draws, as wide for every layer; and with standard deviations of 0.1, noise in which wide networks
drown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from pyro.infer import autoguide
from pyro.infer.autoguide import AutoGuide
from pyro.poutine import Trace
from torch import Tensor

from pyro_bbb._utils.validation import count, positive, probabilities
from pyro_bbb.guides._base import Guide
from pyro_bbb.guides.latents import InitLoc, describe, start

INIT_SCALE = math.log1p(math.exp(-5.0))  # that of AutoSoftplusNormal


class _Space(NamedTuple):
    """What a stock guide needs to know of a latent's prior."""

    support: Any
    event_dim: int


class Prototype(AutoGuide):
    """Stands behind a stock guide, and hands it the latents where Pyro would run the model."""

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        (self.prototype_trace,) = args
        frames = [f for latent in self._latents.values() for f in latent.frames]
        self._prototype_frames = {frame.name: frame for frame in frames}


class Stock(Guide):
    """In front of a stock guide: finds the latents and their start, and lets it build on them."""

    def _add_latents(self, trace: Any) -> None:
        known = Trace() if self.prototype_trace is None else self.prototype_trace.copy()
        for name, site in trace.iter_stochastic_nodes():
            if name not in self._latents:
                self._latents[name] = latent = describe(name, site)
                value = latent.constrain(start(latent, site, self._initialise))
                node = {"type": "sample", "name": name, "is_observed": False, "value": value}
                space = _Space(site["fn"].support, site["fn"].event_dim)
                known.add_node(name, **node, fn=space, cond_indep_stack=latent.frames)
        if len(known.nodes) > len(getattr(self.prototype_trace, "nodes", ())):
            self._build(known)

    def _build(self, known: Trace) -> None:
        """Makes the parameters; those there already stay the objects that an optimiser holds."""
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


class Normal(Stock, autoguide.AutoNormal, Prototype):
    """Independent Normals in Pyro's own parametrisation, `pyro.infer.autoguide.AutoNormal`.

    Args:
        model: a `BayesianModel`, or any Pyro model.
        init_loc: where the means start, see `AutoSoftplusNormal`.
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
        """Independent draws of all latents, ``[num_samples, ...]`` by site name, no gradient."""
        draws, shape = {}, (count("num_samples", num_samples),)
        with torch.no_grad():
            for latent in self._known_latents():
                loc, scale = self._get_loc_and_scale(latent.name)
                draws[latent.name] = latent.constrain(dist.Normal(loc, scale).sample(shape))
        return draws


class Delta(Stock, autoguide.AutoDelta, Prototype):
    """A point: maximum a posteriori in the latents' own space, `pyro.infer.autoguide.AutoDelta`.

    Args:
        model: a `BayesianModel`, or any Pyro model.
        init_loc: where the point starts, see `AutoSoftplusNormal`.
    """

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
        """The point as ``num_samples`` equal draws."""
        num_samples = count("num_samples", num_samples)
        return {name: x.expand(num_samples, *x.shape) for name, x in self.median().items()}
