# SPDX-License-Identifier: Apache-2.0
r"""Ensembles of networks that differ by rank-one factors of shared weights.

Member k of K has the kernels $W \circ r_k s_k^\top$ (BatchEnsemble, Wen et al. 2020,
arXiv:2002.06715): W is a point that all members share, and the factors r and s are drawn from
Normals (Dusenberry et al. 2020, "Efficient and Scalable Bayesian Neural Nets with Rank-1 Factors",
arXiv:2005.07186). With $q_k(r, s)$ the Normals of a member, w the weights that it makes of them,
$\pi$ the ``kl_weight`` and $p(r, s) = \prod N(1, \tau^2)$, training maximises for a minibatch D

$$\frac1K \sum_{k=1}^K \Big( \mathrm{E}_{q_k}[\ln p(D | w)]
  + \pi \big( \mathrm{E}_{q_k}[\ln p(w)] - \mathrm{KL}[q_k(r, s) \| p(r, s)] \big) \Big).$$

The model's prior p(w) is at the weights that multiply the inputs. The KL has its closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Size, Tensor
from torch.distributions import register_kl
from torch.distributions.transforms import SoftplusTransform

from pyro_bbb._utils.validation import at_least_zero, count, one_of, positive
from pyro_bbb.distributions import softplus
from pyro_bbb.guides._base import Guide
from pyro_bbb.guides.initial_values import InitLoc, initial_loc
from pyro_bbb.latents import Latent, Site, plate_shape

INITS = ("normal", "signs")


class Rank1Ensemble(Guide):
    r"""Ensemble whose members differ by rank-one factors of shared kernels, at one network's cost.

    Kernels are latents of real values with two dimensions or more: the first factor is over the
    first dimension, the second over the second, and both are repeated over further ones, as over
    the positions of a convolution. Each member has its own point of a vector, such as a bias. All
    other latents, and those of the likelihood, are a point that the members share: the MAP in
    constrained space. A further member costs $2 (n_\text{out} + n_\text{in})$ parameters for each
    kernel.

    Each draw is of the next member in turn, so that a step of `fit` costs about that of one
    network and trains one member; ``num_particles`` members are trained at once. The K members
    need more epochs than one network. `predict` draws from the members in turn.

    Args:
        model: a `BayesianModel`, or any Pyro model.
        size: number of members K.
        init_loc: initial values of the shared kernels and of the points, see `AutoSoftplusNormal`.
        init: initial means of the factors: ``"normal"``, from $N(1, \text{spread}^2)$, or
            ``"signs"``, 1 or -1 with equal probability.
        spread: standard deviation of those by ``"normal"``.
        init_scale: initial standard deviation of every factor.
        prior_scale: $\tau$, the standard deviation of the factors' prior $N(1, \tau^2)$.

    Raises:
        ValueError: an unknown ``init``, or a number out of range.
        TypeError: an argument is of another kind.
    """

    _turn: Tensor

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        size: int = 4,
        init_loc: InitLoc | None = None,
        init: str = "normal",
        spread: float = 0.25,
        init_scale: float = 0.1,
        prior_scale: float = 1.0,
    ) -> None:
        super().__init__(model, init_loc=init_loc)
        self._size, self._init = count("size", size), one_of("init", init, INITS)
        self._spread = at_least_zero("spread", spread)
        self._init_scale = positive("init_scale", init_scale)
        self._prior_scale = positive("prior_scale", prior_scale)
        # a tensor: a captured step counts in no other way, and checkpoints have it
        self.register_buffer("_turn", torch.zeros((), dtype=torch.int64))
        self._find_declared()

    @property
    def size(self) -> int:
        """Number of members."""
        return self._size

    @property
    def numbers_per_member(self) -> int:
        """Parameters of each member's own: means and scales of its factors, and its vectors."""
        latents = self._latents.values()
        factors = sum(2 * sum(latent.shape[:2]) for latent in latents if _is_kernel(latent))
        return factors + sum(latent.shape[0] for latent in latents if _is_vector(latent))

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw every latent, by site name, from the member whose turn it is.

        Within the plate of several draws, draw i is of the i-th member from there on.
        """
        frames = self._create_plates(*args, **kwargs) if self._prototype_frames else {}
        plates, draws = plate_shape() or Size(), {}
        turns = torch.arange(plates.numel(), device=self._turn.device)
        members = (self._turn + turns) % self._size
        self._turn.copy_((self._turn + len(turns)) % self._size)
        loc, scale = self._factors(members)
        kl = self._by_kernel(_kl(loc, scale, self._prior_scale))
        values = self._values(members, loc + scale * torch.randn_like(loc))
        for name, latent in self._latents.items():
            value, log_density = values[name], kl[name].sum(1).view(plates) if name in kl else 0.0
            if _is_own(latent):
                value = value.view(plates + latent.shape)
            with ExitStack() as stack:
                for frame in latent.frames:
                    stack.enter_context(frames[frame.name])
                draws[name] = pyro.sample(name, _Draw(value, log_density, latent.event_dim))
        return draws

    def sample_posterior(self, num_samples: int) -> dict[str, Tensor]:
        """Return samples of each member in turn, ``[num_samples, ...]`` by site name."""
        num_samples = count("num_samples", num_samples)
        with torch.no_grad():
            members = torch.arange(num_samples, device=self._turn.device) % self._size
            loc, scale = self._factors(members)
            values = self._values(members, loc + scale * torch.randn_like(loc))
            return {
                name: values[name].expand(num_samples, *latent.shape)
                for name, latent in self._latents.items()
            }

    def member(self, number: int) -> dict[str, Tensor]:
        """Return latents of a member by site name, kernels at the means of their factors.

        Raises:
            ValueError: there is no member of such a number, from 0.
        """
        if count("number", number, 0) >= self._size:
            raise ValueError(f"number must be below {self._size}, of the members, got {number}")
        with torch.no_grad():
            members = torch.tensor([number], device=self._turn.device)
            values = self._values(members, self._factors(members)[0])
            return {x.name: values[x.name].reshape(x.shape) for x in self._known_latents()}

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return `member` of an ensemble of one.

        Raises:
            TypeError: there are several: the mean of the members is no working network.
        """
        if self._size > 1:
            raise TypeError(
                f"an ensemble of {self._size} has no single centre; use predict, or one "
                "member alone, guide.member(0)"
            )
        return self.member(0)

    def _factors(self, members: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and standard deviations of the members' factors, ``[m, n]`` each."""
        names = [x.name for x in self._known_latents() if _is_kernel(x)]
        if not names:
            none = torch.empty(len(members), 0, device=members.device)
            return none, none
        loc, rho = (
            torch.cat([self._own(f"factors.{group}", name) for name in names], 1)
            for group in ("locs", "rhos")
        )
        return loc.index_select(0, members), softplus(rho.index_select(0, members))

    def _by_kernel(self, factors: Tensor) -> dict[str, Tensor]:
        """Split factors ``[m, n]`` to ``[m, out + in]`` by site name."""
        kernels = {x.name: sum(x.shape[:2]) for x in self._latents.values() if _is_kernel(x)}
        return dict(zip(kernels, factors.split(list(kernels.values()), 1), strict=True))

    def _values(self, members: Tensor, factors: Tensor) -> dict[str, Tensor]:
        """Return latents by site name: each member's ``[m, ...]``, shared ones unchanged."""
        by_kernel, values = self._by_kernel(factors), {}
        for name, latent in self._latents.items():
            loc = self._own("locs", name)
            if name in by_kernel:
                r, s = by_kernel[name].split(loc.shape[:2], 1)
                product = torch.einsum("ko,ki->koi", r, s)  # r_k s_k^T
                values[name] = loc * product.reshape(*product.shape, *[1] * (loc.dim() - 2))
            else:
                own = _is_vector(latent)
                values[name] = loc.index_select(0, members) if own else latent.constrain(loc)
        return values

    def _add_parameters(self, sites: Mapping[str, Site]) -> None:
        for name, site in sites.items():
            latent = self._latents[name]
            loc = initial_loc(latent, site, self.initialise)
            own = _is_vector(latent)
            self._add_parameter("locs", name, loc.expand(self._size, -1) if own else loc)
            if _is_kernel(latent):
                noise = torch.randn(self._size, sum(loc.shape[:2])).to(loc)
                signs = 1 - 2 * (noise < 0).to(noise)
                means = 1 + self._spread * noise if self._init == "normal" else signs
                scale = torch.full_like(noise, self._init_scale)
                self._add_parameter("factors.locs", name, means)
                self._add_parameter("factors.rhos", name, SoftplusTransform().inv(scale))


class _Draw(dist.Delta):
    """A draw, with the closed-form KL of its distribution in the place of the log-density there."""

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        return super().rsample(sample_shape) if sample_shape else self.v

    def log_prob(self, x: Tensor) -> Tensor:
        """Return ``log_density`` for the drawn tensor (by identity), else Delta's."""
        log_prob: Tensor = self.log_density if x is self.v else super().log_prob(x)
        return log_prob


@register_kl(_Draw, dist.Distribution)
def _none(q: _Draw, p: dist.Distribution) -> Tensor:
    """Refuse: Pyro's KL of points leaves ``log_density`` out; the draw's density has it."""
    raise NotImplementedError


def _kl(loc: Tensor, scale: Tensor, prior_scale: float) -> Tensor:
    r"""Return $\mathrm{KL}[N(\mu, \sigma^2) \| N(1, \tau^2)]$, elementwise."""
    ratio = scale / prior_scale
    return 0.5 * (ratio.square() + ((loc - 1) / prior_scale).square() - 1) - ratio.log()


def _is_own(latent: Latent) -> bool:
    """Return whether each member has its own value of a latent, a weight."""
    real = latent.transform is None and latent.role != "likelihood"
    return real and not latent.frames and len(latent.shape) > 0


def _is_kernel(latent: Latent) -> bool:
    return _is_own(latent) and len(latent.shape) > 1


def _is_vector(latent: Latent) -> bool:
    return _is_own(latent) and len(latent.shape) == 1
