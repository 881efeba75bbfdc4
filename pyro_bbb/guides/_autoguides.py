# SPDX-License-Identifier: Apache-2.0
r"""Pyro's autoguides as guides of this library.

| guide | posterior of the unconstrained latents z |
|---|---|
| `Normal` | $\prod_j N(z_j | \mu_j, \sigma_j^2)$ |
| `LowRank` | $N(\mu, F F^\top + \mathrm{diag}(s^2))$ |
| `FullRank` | $N(\mu, L L^\top)$ |
| `Flow` | $\mu + \sigma f(\epsilon)$, f an inverse autoregressive flow |
| `Delta` | a point |
| `PointThenNormal` | a point in training, then a Normal; the base of Laplace and SWAG |

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
from pyro.distributions import constraints
from pyro.distributions.transforms import affine_autoregressive, iterated
from pyro.infer import autoguide
from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroParam
from pyro.poutine import Trace
from torch import Tensor, nn
from torch.distributions import transform_to

from pyro_bbb._param_store import own_store
from pyro_bbb._utils.validation import count, positive, probabilities
from pyro_bbb.guides._base import Guide
from pyro_bbb.guides.covariance import (
    CovariancePart,
    Dense,
    Diagonal,
    LowRankPlusDiagonal,
    PartsNormal,
)
from pyro_bbb.guides.initial_values import InitLoc, initial_loc
from pyro_bbb.latents import Site

INIT_SCALE = math.log1p(math.exp(-5.0))  # the initial scale of AutoSoftplusNormal
_MAX_NUMBERS = 2**28  # in a guide's parameters: 1 GiB of float32


class _Support(NamedTuple):
    """Support and event dimensions of a latent, as Pyro's autoguides read them off its prior."""

    support: Any
    event_dim: int


class PrototypeFromLatents(AutoGuide):
    """Base of Pyro's autoguide in a wrapped one: the latents replace a run of the model."""

    prototype_trace: Any

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        (self.prototype_trace,) = args
        frames = [f for latent in self._latents.values() for f in latent.frames]
        self._prototype_frames = {frame.name: frame for frame in frames}


class WrappedAutoguide(Guide):
    """Guide that passes latents and their initial means to one of Pyro's autoguides.

    Bases stand in the order ``WrappedAutoguide, Auto..., PrototypeFromLatents``: the first replaces
    methods of Pyro's class, whose own calls of ``super()`` then reach the last.
    """

    def _add_parameters(self, sites: Mapping[str, Site]) -> None:
        known = Trace() if self.prototype_trace is None else self.prototype_trace.copy()
        for name, site in sites.items():
            latent = self._latents[name]
            value = latent.constrain(initial_loc(latent, site, self.initialise).clone())
            node = {"type": "sample", "name": name, "is_observed": False, "value": value}
            space = _Support(site["fn"].support, site["fn"].event_dim)
            known.add_node(name, **node, fn=space, cond_indep_stack=latent.frames)
        if sites:
            self._build(known)

    def _build(self, known: Trace) -> None:
        """Make the parameters; existing ones stay the objects that an optimiser holds."""
        before = dict(self.named_parameters())
        self._setup_prototype(known)
        for name, parameter in before.items():
            path, _, leaf = name.rpartition(".")
            owner = self.get_submodule(path)
            new: Any = owner._parameters[leaf]
            if new.shape != parameter.shape:
                parameter.data = new.data
            owner._parameters[leaf] = parameter


class InitScaleGuide(WrappedAutoguide):
    """Wrapped autoguide whose one option is its initial standard deviation."""

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        init_loc: InitLoc | None = None,
        init_scale: float = INIT_SCALE,
    ) -> None:
        super().__init__(model, init_loc=init_loc, init_scale=positive("init_scale", init_scale))
        self._find_declared()


class Normal(InitScaleGuide, autoguide.AutoNormal, PrototypeFromLatents):
    """Independent Normals in Pyro's parametrisation, `pyro.infer.autoguide.AutoNormal`.

    Args:
        model: a `BayesianModel`, or any Pyro model.
        init_loc: initial means, see `AutoSoftplusNormal`.
        init_scale: initial standard deviation of every latent, in unconstrained space.
    """

    def sample_posterior(self, num_samples: int) -> dict[str, Tensor]:
        """Return samples of all latents, ``[num_samples, ...]`` by site name, no gradient."""
        draws, shape = {}, (count("num_samples", num_samples),)
        with torch.no_grad():
            for latent in self._known_latents():
                loc, scale = self._get_loc_and_scale(latent.name)
                draws[latent.name] = latent.constrain(dist.Normal(loc, scale).sample(shape))
        return draws

    def unconstrained_normal(self) -> PartsNormal:
        moments = [self._get_loc_and_scale(latent.name) for latent in self._known_latents()]
        loc, scale = (torch.cat([x[i].detach().flatten() for x in moments]) for i in range(2))
        return PartsNormal(loc, [Diagonal(slice(0, len(loc)), scale)])


class Delta(WrappedAutoguide, autoguide.AutoDelta, PrototypeFromLatents):
    """Point estimate: MAP in the constrained space, `pyro.infer.autoguide.AutoDelta`.

    Args:
        model: a `BayesianModel`, or any Pyro model.
        init_loc: initial point, see `AutoSoftplusNormal`.
    """

    _onto = staticmethod(transform_to)  # a point needs no bijection: onto a sphere there is none

    def __init__(self, model: Callable[..., Any], *, init_loc: InitLoc | None = None) -> None:
        super().__init__(model, init_loc=init_loc)
        self._find_declared()

    @property
    def is_point(self) -> bool:
        return True

    def _points(self) -> dict[str, Tensor]:
        """Return the point by site name, with its gradient."""
        with own_store(self):
            return {latent.name: attrgetter(latent.name)(self) for latent in self._known_latents()}

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self._points().items()}

    def quantiles(self, quantiles: Iterable[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return self.sample_posterior(len(probabilities("quantiles", quantiles)))

    def sample_posterior(self, num_samples: int) -> dict[str, Tensor]:
        """Return the point as ``num_samples`` equal samples."""
        num_samples = count("num_samples", num_samples)
        return {name: x.expand(num_samples, *x.shape) for name, x in self.median().items()}


class JointAutoguide(WrappedAutoguide):
    """Wrapper of an autoguide with one distribution of all latents, as one vector."""

    latent_dim: int
    loc: Any
    scale: Any
    transform: Any

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        self._known_latents()
        values = self._latents.constrain(self.loc.detach())
        return {name: value.clone() for name, value in values.items()}

    def sample_posterior(self, num_samples: int) -> dict[str, Tensor]:
        """Return samples of all latents, ``[num_samples, ...]`` by site name, no gradient."""
        self._known_latents()
        num_samples = count("num_samples", num_samples)
        with torch.no_grad():
            return self._latents.constrain(self.get_posterior().sample((num_samples,)))

    def _build(self, known: Trace) -> None:
        self._check_size(self._latents.size)
        super()._build(known)

    def _check_size(self, latent_dim: int) -> None:
        """Raise ValueError if a guide for this many latents is not feasible."""


class LowRank(JointAutoguide, autoguide.AutoLowRankMultivariateNormal, PrototypeFromLatents):
    """Normal of covariance low-rank plus diagonal, `AutoLowRankMultivariateNormal`.

    Args:
        model: a `BayesianModel`, or any Pyro model.
        init_loc: initial means, see `AutoSoftplusNormal`.
        init_scale: initial standard deviation of every latent, about, in unconstrained space.
        rank: rank of the first part; by default about the root of the number of latents.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        init_loc: InitLoc | None = None,
        init_scale: float = INIT_SCALE,
        rank: int | None = None,
    ) -> None:
        init_scale = positive("init_scale", init_scale)
        rank = None if rank is None else count("rank", rank)
        super().__init__(model, init_loc=init_loc, init_scale=init_scale, rank=rank)
        self._rank = rank
        self._find_declared()

    def unconstrained_normal(self) -> PartsNormal:
        self._known_latents()
        q, everything = self.get_posterior(), slice(0, self.latent_dim)
        scale = q.cov_diag.sqrt()
        return PartsNormal(q.loc, [LowRankPlusDiagonal(everything, q.cov_factor, scale)])

    def _build(self, known: Trace) -> None:
        self.rank: int | None = self._rank
        super()._build(known)


class FullRank(
    InitScaleGuide, JointAutoguide, autoguide.AutoMultivariateNormal, PrototypeFromLatents
):
    """Normal of any covariance, `pyro.infer.autoguide.AutoMultivariateNormal`.

    Args:
        model: a `BayesianModel`, or any Pyro model.
        init_loc: initial means, see `AutoSoftplusNormal`.
        init_scale: initial standard deviation of every latent, in unconstrained space.

    Raises:
        ValueError: the model has more than 16,384 latents.
    """

    def unconstrained_normal(self) -> PartsNormal:
        self._known_latents()
        q = self.get_posterior()
        return PartsNormal(q.loc, [Dense(slice(0, self.latent_dim), q.scale_tril)])

    def _check_size(self, latent_dim: int) -> None:
        _refuse_size("full_rank", latent_dim, latent_dim**2)


class Flow(JointAutoguide, autoguide.AutoIAFNormal, PrototypeFromLatents):
    r"""Inverse autoregressive flow (Kingma et al. 2016), `pyro.infer.autoguide.AutoIAFNormal`.

    Its samples are $\mu + \sigma f(\epsilon)$. The flow $f$ is initially the identity, and
    the guide independent Normals. Its marginals have no closed form, so it has no medians.

    Args:
        model: a `BayesianModel`, or any Pyro model.
        init_loc: initial $\mu$, see `AutoSoftplusNormal`.
        init_scale: initial $\sigma$, in unconstrained space.
        hidden_dim: hidden units of each transform's network, at least the number of latents,
            which is the default.
        num_transforms: number of successive transforms.

    Raises:
        ValueError: the networks would hold more than 2^28 weights, or a number is out of range.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        init_loc: InitLoc | None = None,
        init_scale: float = INIT_SCALE,
        hidden_dim: int | None = None,
        num_transforms: int = 1,
    ) -> None:
        super().__init__(model, init_loc=init_loc)
        self._init_scale = positive("init_scale", init_scale)
        self._hidden_dim = None if hidden_dim is None else count("hidden_dim", hidden_dim)
        self._num_transforms = count("num_transforms", num_transforms)
        self._find_declared()

    median: Callable[..., dict[str, Tensor]] = Guide.median  # which raises TypeError

    def get_base_dist(self) -> Any:
        return dist.Normal(torch.zeros_like(self.loc), torch.ones_like(self.loc)).to_event(1)

    def get_transform(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the flow, then location and scale; a cache spares its inversion."""
        return [
            *self.transform.parts,
            dist.transforms.AffineTransform(self.loc, self.scale, event_dim=1, cache_size=1),
        ]

    def _check_size(self, latent_dim: int) -> None:
        hidden_dim = self._hidden_dim or latent_dim
        if latent_dim < 2:
            raise ValueError(f"flow needs at least 2 latents, the model has {latent_dim}")
        if hidden_dim < latent_dim:
            raise ValueError(
                f"hidden_dim must be at least the number of latents, {latent_dim}, got {hidden_dim}"
            )
        _refuse_size("flow", latent_dim, 3 * latent_dim * hidden_dim * self._num_transforms)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        self.loc: nn.Parameter = nn.Parameter(self._init_loc())
        self.scale: Any = PyroParam(
            torch.full_like(self.loc, self._init_scale), constraints.softplus_positive
        )
        widths = [self._hidden_dim or self.latent_dim]
        flow = iterated(
            self._num_transforms, affine_autoregressive, self.latent_dim, hidden_dims=widths
        )
        self.transform: Any = flow.to(self.loc)
        for transform in self.transform:
            for parameter in transform.arn.layers[-1].parameters():
                nn.init.zeros_(parameter)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the latest sample, which the transforms cache with its graph."""
        for transform in self.transform or ():
            transform._cached_x_y, transform._cached_log_scale = (None, None), None
        return super().__getstate__()


class PointThenNormal(JointAutoguide, autoguide.AutoContinuous, PrototypeFromLatents):
    """Point in training, and then a Normal around it of a covariance in parts."""

    def reset(self) -> None:
        """Return to the point, for further training."""
        for block in self.covariance:
            block.forget()

    def unconstrained_normal(self) -> PartsNormal:
        """Return the Normal of all unconstrained latents.

        Raises:
            RuntimeError: not yet approximated.
        """
        if self.is_point:
            raise RuntimeError(
                "the guide is still a point: call guide.approximate((x, y)) with the training "
                "set, as fit does at its end; guide.median() has the point"
            )
        return PartsNormal(self.loc.detach(), self.covariance)

    def _points(self) -> dict[str, Tensor]:
        """Return the point by site name, with its gradient."""
        return self._latents.constrain(self.loc)

    def get_posterior(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_point:
            return dist.Delta(self.loc).to_event(1)
        return PartsNormal(self.loc, self.covariance)

    def sample_posterior(self, num_samples: int) -> dict[str, Tensor]:
        self.unconstrained_normal()  # raises if it has none
        return super().sample_posterior(num_samples)

    @property
    def covariance(self) -> list[CovariancePart]:
        """The parts of the covariance, without values while the guide is a point."""
        return [p for p in self.parts if isinstance(p, CovariancePart)]

    @property
    def is_point(self) -> bool:
        """Return whether it has no covariance, as in training."""
        return any(value is None for p in self.covariance for value in p._buffers.values())

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        self.loc: nn.Parameter = nn.Parameter(self._init_loc())
        self.parts: nn.ModuleList = nn.ModuleList(self._unknown_parts())

    def _unknown_parts(self) -> list[CovariancePart]:
        """Return the parts of the covariance, not yet with values."""
        raise NotImplementedError


def _refuse_size(name: str, latent_dim: int, numbers: int) -> None:
    """Raise ValueError if a guide's largest tensor would hold too many numbers."""
    if numbers > _MAX_NUMBERS:
        raise ValueError(
            f"{name} for {latent_dim:,} latents needs {numbers:,} parameters, "
            f"{numbers * 4 / 2**30:.1f} GiB in float32 and four times that in training; "
            "use one of low_rank, softplus_normal"
        )
