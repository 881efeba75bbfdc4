# SPDX-License-Identifier: Apache-2.0
"""Pyro's autoguides with one joint distribution of all latents: low-rank, full-rank, flow.

`PointThenNormal` is the base of guides that are a point in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.distributions.transforms import affine_autoregressive, iterated
from pyro.infer import autoguide
from pyro.nn import PyroParam
from pyro.poutine import Trace
from torch import Tensor, nn

from pyro_bbb._utils.validation import count, positive, probabilities
from pyro_bbb.guides._autoguides import INIT_SCALE, PrototypeFromLatents, WrappedAutoguide
from pyro_bbb.guides.covariance import CovariancePart, PartsNormal, UnconstrainedNormal
from pyro_bbb.guides.initial_values import InitLoc

_MAX_NUMBERS = 2**28  # in a guide's parameters: 1 GiB of float32


class JointAutoguide(WrappedAutoguide):
    """Wrapper of an autoguide with one distribution of all latents, as one flat vector."""

    latent_dim: int
    loc: Any
    scale: Any
    transform: Any

    def sample_posterior(self, num_samples: int) -> dict[str, Tensor]:
        """Independent samples of all latents, ``[num_samples, ...]`` by site name, no gradient."""
        self._known_latents()
        num_samples = count("num_samples", num_samples)
        with torch.no_grad():
            return self._split(self.get_posterior().sample((num_samples,)))

    def _split(self, vectors: Tensor) -> dict[str, Tensor]:
        """Latents by site name, ``[S, ...]``, from unconstrained vectors, ``[S, latent_dim]``."""
        return self._latents.constrain(vectors)

    def _build(self, known: Trace) -> None:
        self._check_size(self._latents.size)
        super()._build(known)

    def _check_size(self, latent_dim: int) -> None:
        """Raise ValueError if a guide for so many latents is not feasible."""


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

    def _build(self, known: Trace) -> None:
        self.rank = self._rank
        super()._build(known)


class FullRank(JointAutoguide, autoguide.AutoMultivariateNormal, PrototypeFromLatents):
    """Normal of any covariance, `pyro.infer.autoguide.AutoMultivariateNormal`.

    Args:
        model: a `BayesianModel`, or any Pyro model.
        init_loc: initial means, see `AutoSoftplusNormal`.
        init_scale: initial standard deviation of every latent, in unconstrained space.

    Raises:
        ValueError: the model has more than 16,384 latents.
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

    def _check_size(self, latent_dim: int) -> None:
        _refuse_size("full_rank", latent_dim, latent_dim**2, "low_rank, softplus_normal")


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

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Raises TypeError: the marginals of a flow are known by samples only."""
        raise TypeError("a flow's marginals have no closed form; use draws, sample_posterior(1000)")

    def quantiles(self, quantiles: Iterable[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Raises TypeError, as `median`."""
        return self.median()

    def get_base_dist(self) -> Any:
        """Standard Normals, from which the flow starts."""
        return dist.Normal(torch.zeros_like(self.loc), torch.ones_like(self.loc)).to_event(1)

    def get_transform(self, *args: Any, **kwargs: Any) -> list[Any]:
        """The flow, then location and scale; a cache spares its inversion for the density."""
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
        numbers = 3 * latent_dim * hidden_dim * self._num_transforms
        _refuse_size("flow", latent_dim, numbers, "low_rank, softplus_normal")

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        self.loc = nn.Parameter(self._init_loc())
        self.scale = PyroParam(
            torch.full_like(self.loc, self._init_scale), constraints.softplus_positive
        )
        self.transform = iterated(
            self._num_transforms,
            affine_autoregressive,
            self.latent_dim,
            hidden_dims=[self._hidden_dim or self.latent_dim],
        ).to(self.loc)
        for part in self.transform:
            for parameter in part.arn.layers[-1].parameters():
                nn.init.zeros_(parameter)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the latest sample, which the transforms cache with its graph."""
        for part in self.transform or ():
            part._cached_x_y, part._cached_log_scale = (None, None), None
        return super().__getstate__()


class PointThenNormal(JointAutoguide, autoguide.AutoContinuous, PrototypeFromLatents):
    """Point in training, and then a Normal around it of a covariance in parts."""

    def reset(self) -> None:
        """Goes back to the point, for further training."""
        for part in self.covariance:
            part.forget()

    def unconstrained_normal(self) -> UnconstrainedNormal:
        """The Normal of all unconstrained latents.

        Raises:
            RuntimeError: not yet approximated.
        """
        self._require_scale()
        return UnconstrainedNormal(self.loc.detach(), self.covariance)

    def get_posterior(self, *args: Any, **kwargs: Any) -> Any:
        """The distribution of all unconstrained latents."""
        if self.is_point:
            return dist.Delta(self.loc).to_event(1)
        return PartsNormal(self.loc, self.covariance)

    def sample_posterior(self, num_samples: int) -> dict[str, Tensor]:
        """Independent samples of all latents, ``[num_samples, ...]`` by site name, no gradient.

        Raises:
            RuntimeError: not yet approximated.
        """
        self._require_scale()
        return super().sample_posterior(num_samples)

    def quantiles(self, quantiles: Iterable[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Posterior quantiles, ``[len(quantiles), ...]`` by site name.

        Raises:
            RuntimeError: not yet approximated.
        """
        self._require_scale()
        levels = self.loc.new_tensor(probabilities("quantiles", quantiles))
        with torch.no_grad():
            loc, scale = self._loc_scale()  # 0 for a latent that is a point
            return self._split(loc + scale * torch.special.ndtri(levels)[:, None])

    @property
    def covariance(self) -> list[CovariancePart]:
        """The parts of the covariance, without values while the guide is a point."""
        return [part for part in self.parts if isinstance(part, CovariancePart)]

    @property
    def is_point(self) -> bool:
        """Return whether it has no covariance, as in training."""
        return any(value is None for part in self.covariance for value in part._buffers.values())

    def _require_scale(self) -> None:
        if self.is_point:
            raise RuntimeError(
                "the guide is still a point: call guide.approximate((x, y)) with the training "
                "set, as fit does at its end; guide.median() has the point"
            )

    def _loc_scale(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        scale = torch.zeros_like(self.loc)
        for part in () if self.is_point else self.covariance:
            scale[part.where] = part.std()
        return self.loc, scale

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        self.loc = nn.Parameter(self._init_loc())
        self.parts = nn.ModuleList(self._unknown_parts())

    def _unknown_parts(self) -> list[CovariancePart]:
        """The parts of the covariance, not yet with values."""
        raise NotImplementedError


def _refuse_size(name: str, latent_dim: int, numbers: int, others: str) -> None:
    """Raise ValueError if a guide's largest tensor would hold too many numbers."""
    if numbers > _MAX_NUMBERS:
        raise ValueError(
            f"{name} for {latent_dim:,} latents needs {numbers:,} parameters, "
            f"{numbers * 4 / 2**30:.1f} GiB in float32 and four times that in training; "
            f"use one of {others}"
        )
