# SPDX-License-Identifier: Apache-2.0
r"""The mean-field posterior of Bayes by Backprop, independent Normals of all weights.

Blundell et al. (2015), section 3.2. A draw and its log-density are, for $\epsilon \sim N(0, I)$,

$$w = \mu + \sigma\epsilon, \quad \sigma = \mathrm{softplus}(\rho), \qquad
  \ln q(w) = -\sum_j \big(\tfrac12\epsilon_j^2 + \ln\sigma_j + \tfrac12\ln 2\pi\big)$$

A latent variable that is not real-valued gets its Normal in unconstrained space, carried over by a
bijection. `AutoSoftplusNormal.forward` samples site by site, as every autoguide does;
`AutoSoftplusNormal.draw` draws all latents as one vector, for a training step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.memory import pieces
from pyro_bbb._utils.tables import as_markdown
from pyro_bbb._utils.validation import count, finite
from pyro_bbb.distributions import PrunedNormal, SoftplusNormal, softplus
from pyro_bbb.distributions.normal import LINEAR
from pyro_bbb.distributions.summed_event import HALF_LOG_2PI
from pyro_bbb.guides._base import Guide
from pyro_bbb.guides.covariance import Diagonal, PartsNormal
from pyro_bbb.guides.initial_values import InitLoc, initial_loc
from pyro_bbb.latents import Latent, Latents, Site

_HEAD = ["latent", "shape", "loc, root mean square", "scale, median"]  # of a table in a notebook


class VectorDraw(NamedTuple):
    """A draw of all latents as one vector, or S draws ``[S, ...]``."""

    vector: Tensor  # in unconstrained space, [n]
    values: dict[str, Tensor]  # the latents by site name
    log_q: Tensor  # log-density of the latents under the guide
    loc: Tensor  # means, [n]; [S, n] where each draw has its own
    scale: Tensor  # standard deviations, by latent


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
        r"""Return the scale $\mathrm{softplus}(\rho)$ of one latent (in unconstrained space)."""
        rho = self._parameter("rhos", name).detach()
        scale = softplus(rho)
        # an optimiser may have made NaN of minus infinity, by its weight decay
        return scale.where(rho > -math.inf, 0.0) if self._pruned else scale

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw every latent, by site name, for the model's arguments."""
        plates = self._create_plates(*args, **kwargs) if self._prototype_frames else {}
        draws = {}
        for latent in self._latents.values():
            with ExitStack() as stack:
                for frame in latent.frames:
                    stack.enter_context(plates[frame.name])
                draws[latent.name] = pyro.sample(latent.name, self._posterior(latent))
        return draws

    @property
    def is_one_vector(self) -> bool:
        """True if all latents can be drawn as one vector: none in a plate, none pruned."""
        latents = self._latents.values()
        forms = {(self.loc(x.name).dtype, self.loc(x.name).device) for x in latents}
        in_plates = any(latent.frames for latent in latents)
        return self._complete and len(forms) == 1 and not in_plates and not self._pruned

    def draw(self, num_draws: int | None = None) -> VectorDraw:
        r"""Draw all latents as one vector, $w = \mu + \mathrm{softplus}(\rho)\,\epsilon$.

        With ``num_draws=None`` it is the draw of `forward`, for the same seed.

        Args:
            num_draws: S, for independent draws ``[S, ...]`` of real latents; ``None`` for one.
        """
        loc, rho = self.vectors()
        noise = loc.new_empty(loc.shape if num_draws is None else (num_draws, len(loc)))
        for epsilon in self._latents.unravel(noise).values() if num_draws is None else (noise,):
            epsilon.normal_()
        vector, scale, log_q = reparameterize(loc, rho, noise)
        values = self._latents.constrain(vector)
        if any(latent.transform is not None for latent in self._latents.values()):
            log_q = log_q - self._latents.log_abs_det(vector, values)
        return VectorDraw(vector, values, log_q, loc, scale)

    def vectors(self) -> tuple[Tensor, Tensor]:
        r"""Return $\mu$ and $\rho$ of all latents, ``[n]`` each."""
        loc, rho = (
            self._latents.ravel({name: self._own(group, name) for name in self._latents})
            for group in ("locs", "rhos")
        )
        return loc, rho

    @property
    def is_factorised(self) -> bool:
        """Return whether it draws independent Normals; a subclass may draw otherwise."""
        return type(self) is AutoSoftplusNormal

    def unconstrained_normal(self) -> PartsNormal:
        """Return the Normal of all unconstrained latents."""
        names = [latent.name for latent in self._known_latents()]
        loc, scale = (
            self._latents.ravel({name: moment(name) for name in names})
            for moment in (self.loc, self.scale)
        )
        return PartsNormal(loc, [Diagonal(slice(0, len(loc)), scale)])

    @torch.no_grad()
    def sampler(self, names: Iterable[str] | None = None) -> Callable[[int], dict[str, Tensor]]:
        """Return `sample_posterior` of the latents, or some; scales are computed once."""
        if not self.is_factorised:
            return super().sampler()
        chosen = [x.name for x in self._known_latents()] if names is None else names
        posteriors = {name: self._posterior(self._latents[name]) for name in chosen}
        return locked(lambda size: {name: q.sample((size,)) for name, q in posteriors.items()})

    def sample_posterior(self, num_samples: int) -> dict[str, Tensor]:
        """Independent draws of all latents, ``[num_samples, ...]`` by site name, no gradient."""
        shape = (count("num_samples", num_samples),)
        with torch.no_grad():
            return {x.name: self._posterior(x).sample(shape) for x in self._known_latents()}

    def _repr_markdown_(self) -> str:
        """Return a table of the latents' moments in unconstrained space."""
        rows = []
        for name in self.site_names:
            loc, scale, left = self.loc(name), self.scale(name), self.unpruned.get(name, ...)
            row = [f"`{name}`", " × ".join(map(str, loc.shape)) or "1"]
            moments = loc[left].square().mean().sqrt(), scale[left].median()
            rows.append(row + [f"{moment:.3g}" for moment in moments])
        return as_markdown(_HEAD, rows, labels=2) if rows else repr(self)

    def without(self, removed: Mapping[str, Tensor]) -> AutoSoftplusNormal:
        """Return a copy in which weights are fixed at exactly 0, and stay so in further training.

        Args:
            removed: masks by site name, true where a weight goes.

        Raises:
            KeyError: there is no latent of such a name.
            TypeError: ``removed`` is not a dict.
            ValueError: a mask is not a bool tensor of its latent's shape, or that cannot be 0.
        """
        if not isinstance(removed, Mapping):
            raise TypeError(f"removed must be a dict of masks by name, got {removed!r}")
        for name, mask in removed.items():
            shape = self.loc(name).shape
            if self._latents[name].transform is not None:
                raise ValueError(f"removed must hold latents of real values, got {name!r}")
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != shape:
                expected = f"a bool tensor of shape {list(shape)}"
                raise ValueError(f"removed[{name!r}] must be {expected}, got {mask!r}")
        new = copy.deepcopy(self)
        for name, mask in removed.items():
            new.loc(name)[mask] = 0.0
            new._parameter("rhos", name).detach()[mask] = -math.inf
        new._pruned = True
        return new

    def narrowed(
        self, model: Any, takes: Mapping[str, Callable[[Tensor], Tensor]]
    ) -> AutoSoftplusNormal:
        """Return a copy for a narrower copy of the model.

        Args:
            model: a model with the latents of this guide's, some of them with fewer entries.
            takes: functions from a tensor of an old latent's shape to the entries that the new one
                has, by site name.
        """
        new = copy.deepcopy(self, {id(self.model): model})
        for name, take in takes.items():
            for group in ("locs", "rhos"):
                parameter = self._parameter(group, name)
                new._add_parameter(group, name, take(parameter))
                new._parameter(group, name).requires_grad_(parameter.requires_grad)
        shapes = {name: new.loc(name).shape for name in takes}
        new._latents = Latents(
            replace(latent, shape=shapes.get(name, latent.shape))
            for name, latent in self._latents.items()
        )
        new._pruned = not all(mask.all() for mask in new.unpruned.values())
        return new

    @property
    def unpruned(self) -> dict[str, Tensor]:
        """Masks by site name, true where a weight is left; none if nothing was ever removed."""
        names = self.weight_names if self._pruned else ()
        return {name: self._parameter("rhos", name).detach() > -math.inf for name in names}

    def _posterior(self, latent: Latent) -> Any:
        """Return the distribution of one latent, on its support."""
        loc, rho = (self._own(group, latent.name) for group in ("locs", "rhos"))
        q = (PrunedNormal if self._pruned else SoftplusNormal)(loc, rho)
        if latent.transform is not None:
            # a separate cache: stored in the guide, it would hold the graph of the latest step
            q = dist.TransformedDistribution(q, [latent.transform.with_cache()])
        return q.to_event(latent.event_dim - len(q.event_shape))

    def _add_parameters(self, sites: Mapping[str, Site]) -> None:
        for name, site in sites.items():
            loc = initial_loc(self._latents[name], site, self.initialise)
            self._add_parameter("locs", name, loc)
            self._add_parameter("rhos", name, torch.full_like(loc, self._init_rho))


def plain_draw(loc: Tensor, rho: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return $w$, $\sigma$ and $\ln q(w)$ by the formula; `reparameterize` is its fast form."""
    scale = softplus(rho)
    log_q = -(0.5 * noise.square() + scale.log() + HALF_LOG_2PI).sum(-1)
    return loc + scale * noise, scale, log_q


def reparameterize(loc: Tensor, rho: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return $w = \mu + \sigma\epsilon$, $\sigma = \mathrm{softplus}(\rho)$ and $\ln q(w)$.

    The noise is ``[n]`` or ``[S, n]``, and so are the parameters where each draw has its own.
    """
    vector, scale, log_q = Reparameterize.apply(loc, rho, noise)
    return vector, scale, log_q


class Reparameterize(Function):
    r"""`reparameterize` in few passes over many weights.

    At fixed noise $\ln q$ depends on $\rho$ alone, through $-\sum\ln\sigma$.
    """

    @staticmethod
    def forward(loc: Tensor, rho: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        vector, scale = torch.empty_like(noise), torch.empty_like(rho)
        squares, logs = [], []
        for mu, r, epsilon, w, sigma in pieces(loc, rho, noise, vector, scale):
            squares.append(epsilon.square().sum(-1))
            torch.ops.aten.softplus.out(r, 1, LINEAR, out=sigma)
            logs.append(sigma.log().sum(-1))
            torch.addcmul(mu, sigma, epsilon, out=w)
        log_q = -0.5 * reduce(add, squares) - noise.shape[-1] * HALF_LOG_2PI
        return vector, scale, log_q - reduce(add, logs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, rho, noise = inputs
        ctx.save_for_backward(rho, noise, output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_vector: Tensor | None, of_scale: Tensor | None, of_log_q: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        rho, noise, scale = ctx.saved_tensors
        shared = rho.dim() < noise.dim()  # by several draws
        if of_vector is None:
            of_vector = torch.zeros_like(noise)
        if of_log_q is not None:
            of_log_q = of_log_q.sum() if shared else of_log_q.unsqueeze(-1)
        of_rho = torch.empty_like(rho)
        for g, epsilon, r, sigma, of_r in pieces(of_vector, noise, rho, scale, of_rho):
            of_sigma = (g * epsilon).sum(0) if shared else g * epsilon
            if of_log_q is not None:
                of_sigma.addcdiv_(of_log_q, sigma, value=-1)
            torch.mul(of_sigma, torch.sigmoid(r), out=of_r)
        if of_scale is not None:
            of_rho.addcmul_(of_scale, torch.sigmoid(rho))
        return of_vector.sum(0) if shared else of_vector, of_rho, None
