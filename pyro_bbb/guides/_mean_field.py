# SPDX-License-Identifier: Apache-2.0
r"""The diagonal Gaussian posterior, $q(w) = \prod_j N(w_j | \mu_j, \mathrm{softplus}(\rho_j)^2)$.

Blundell et al. (2015), section 3.2. A latent variable that is not real-valued gets its Normal in
unconstrained space, carried over by a bijection.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from itertools import takewhile
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Size, Tensor, nn

from pyro_bbb._handlers.flat_site import allowed, sample_flat
from pyro_bbb._handlers.particle_plate import plate_shape
from pyro_bbb._ops.softplus import softplus_into
from pyro_bbb._utils.validation import count, finite, probabilities
from pyro_bbb.distributions import PrunedNormal, SoftplusNormal
from pyro_bbb.guides._base import Guide
from pyro_bbb.guides._summary import moments_as_markdown
from pyro_bbb.guides.initial_values import InitLoc, initial_loc
from pyro_bbb.latents import Latent, Site


class AutoSoftplusNormal(Guide):
    r"""Independent Normals, $w = \mu + \mathrm{softplus}(\rho)\,\epsilon$, for every latent.

    Each latent variable is one Normal sample site, so `TraceMeanField_ELBO` has its closed form
    wherever a KL is registered. The parameters of the model's declared latents exist from the
    start, and belong to this guide alone, whatever Pyro's global store holds.

    Args:
        model: a `BayesianModel`, or any Pyro model; where it takes an argument ``kl_weight``, the
            guide's log-density is weighted by it too.
        init_loc: initial means. ``None``: the weights of a network made by `bayesianize` as they
            were, else as ``"he"``. ``"he"``: kernels from $N(0, 2/n_\text{in})$, other latents at
            their prior's centre. A number: all real-valued latents there. A dict of tensors by site
            name (``network.`` may be left out), or a trained network with parameters of those
            names. A function from a Pyro site to its initial value, such as those of
            `pyro.infer.autoguide.initialization`.
        init_rho: initial $\rho$ of every latent; the standard deviation is its softplus.

    Raises:
        ValueError: an unknown ``init_loc``, tensors that do not fit, or numbers not finite.
        TypeError: an argument is of another kind.
    """

    def __init__(
        self, model: Callable[..., Any], *, init_loc: InitLoc | None = None, init_rho: float = -5.0
    ) -> None:
        super().__init__(model, init_loc=init_loc)
        self._init_rho = finite("init_rho", init_rho)
        self._pruned = False
        self.add_module("locs", nn.Module())
        self.add_module("rhos", nn.Module())
        self._find_declared()

    @property
    def weight_names(self) -> list[str]:
        """Names of the latents that are weights, of real values."""
        weights = self._latents.of_role("weight", "adapter")
        return [latent.name for latent in weights if latent.transform is None]

    def loc(self, name: str) -> Tensor:
        r"""$\mu$ of one latent (in unconstrained space), sharing memory with the parameter."""
        return self._parameter("locs", name).detach()

    def scale(self, name: str) -> Tensor:
        r"""Standard deviation $\mathrm{softplus}(\rho)$ of one latent (in unconstrained space)."""
        rho = self._parameter("rhos", name).detach()
        scale = softplus_into(rho, torch.empty_like(rho))
        # an optimiser may have made NaN of minus infinity, by its weight decay
        return scale.where(rho > -math.inf, 0.0) if self._pruned else scale

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw every latent, by site name, for the model's arguments."""
        plates = self._create_plates(*args, **kwargs) if self._prototype_frames else {}
        draws, flat = {}, self._flat_posteriors()
        for latent in self._latents.values():
            with ExitStack() as stack:
                for frame in latent.frames:
                    stack.enter_context(plates[frame.name])
                q = self._posterior(latent, flat.get(latent.name))
                draws[latent.name] = pyro.sample(latent.name, q)
        return draws

    def sample_posterior(self, num_samples: int) -> dict[str, Tensor]:
        """Independent draws of all latents, ``[num_samples, ...]`` by site name, no gradient."""
        shape = (count("num_samples", num_samples),)
        with torch.no_grad():
            return {x.name: self._posterior(x).sample(shape) for x in self._known_latents()}

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Posterior medians by site name; for weights these are the means."""
        return {x.name: x.constrain(self.loc(x.name).clone()) for x in self._known_latents()}

    def quantiles(self, quantiles: Iterable[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Posterior quantiles, ``[len(quantiles), ...]`` by site name."""
        levels = torch.tensor(probabilities("quantiles", quantiles), dtype=torch.float64)
        z = torch.special.ndtri(levels).tolist()
        return {
            x.name: torch.stack(
                [x.constrain(self.loc(x.name) + zq * self.scale(x.name)) for zq in z]
            )
            for x in self._known_latents()
        }

    def _repr_markdown_(self) -> str:
        posteriors = {x.name: self._posterior(x) for x in self._latents.values()}
        return moments_as_markdown(self, posteriors) if posteriors else repr(self)

    def without(self, removed: Mapping[str, Tensor]) -> AutoSoftplusNormal:
        """A copy in which weights are fixed at exactly 0, and stay so in further training.

        Args:
            removed: masks by site name, true where a weight goes.

        Raises:
            KeyError: there is no latent of such a name.
            TypeError: ``removed`` is no dict.
            ValueError: a mask is not a bool tensor of its latent's shape.
        """
        if not isinstance(removed, Mapping):
            raise TypeError(f"removed must be a dict of masks by name, got {removed!r}")
        for name, mask in removed.items():
            shape = self.loc(name).shape
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != shape:
                expected = f"a bool tensor of shape {list(shape)}"
                raise ValueError(f"removed[{name!r}] must be {expected}, got {mask!r}")
        new = copy.deepcopy(self)
        for name, mask in removed.items():
            new.loc(name)[mask] = 0.0
            new._parameter("rhos", name).detach()[mask] = -math.inf
        new._pruned = True
        return new

    @property
    def unpruned(self) -> dict[str, Tensor]:
        """Masks by site name, true where a weight is left; none if nothing was ever removed."""
        names = self.weight_names if self._pruned else ()
        return {name: self._parameter("rhos", name).detach() > -math.inf for name in names}

    def _flat_posteriors(self) -> Mapping[str, Any]:
        """Distributions of the weights that are drawn into one vector, by name."""
        plates = plate_shape()
        if not allowed(self._pruned) or plates is None:
            return {}
        latents = self._latents.values()
        first = takewhile(lambda x: self._is_plain(x, plates), latents)
        plain = [x.name for x in first]  # none after another: noise is drawn in the same order
        locs, rhos = ({name: self._own(kind, name) for name in plain} for kind in ("locs", "rhos"))
        kinds = {(x.dtype, x.device) for x in locs.values()}
        return sample_flat(locs, rhos, plates) if len(plain) > 1 and len(kinds) == 1 else {}

    def _is_plain(self, latent: Latent, plates: Size) -> bool:
        """Return whether a latent is real, and one event where there are several draws of it."""
        event = not plates or 0 < latent.event_dim == self.loc(latent.name).dim()
        return latent.transform is None and not latent.frames and event

    def _posterior(self, latent: Latent, q: Any = None) -> Any:
        if q is None:
            loc, rho = (self._own(kind, latent.name) for kind in ("locs", "rhos"))
            q = (PrunedNormal if self._pruned else SoftplusNormal)(loc, rho)
        if latent.transform is not None:
            # a cache of its own: stored in the guide, it would hold the graph of the latest step
            q = dist.TransformedDistribution(q, [latent.transform.with_cache()])
        return q.to_event(latent.event_dim - len(q.event_shape))

    def _add_parameters(self, sites: Mapping[str, Site]) -> None:
        for name, site in sites.items():
            loc = initial_loc(self._latents[name], site, self._initialise)
            self._add_parameter("locs", name, loc)
            self._add_parameter("rhos", name, torch.full_like(loc, self._init_rho))
