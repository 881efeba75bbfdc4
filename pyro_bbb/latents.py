# SPDX-License-Identifier: Apache-2.0
r"""Latent variables of a model, and one vector $z$ of all of them in unconstrained space.

Each latent $\theta_i$ is read off its sample site. A bijection maps $\mathbb R^{d_i}$ onto its
support, and its unconstrained values fill one slice of $z \in \mathbb R^d$, in the model's order:

$$\theta_i = T_i(z_{[a_i, b_i)}), \qquad
  \ln p(z) = \ln p(\theta) + \sum_i \ln \lvert \det T_i' \rvert.$$
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeAlias

import torch
from torch import Size, Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributions import Distribution, ExpTransform, Transform, biject_to, constraints

from pyro_bbb._utils.memory import joined

Site: TypeAlias = dict[str, Any]  # a node of a Pyro trace
Role: TypeAlias = Literal["weight", "adapter", "prior", "likelihood"]
Bijection: TypeAlias = Callable[[Any], Any]  # from a support to a transform

_REAL = (constraints.real, constraints.real_vector)
_POSITIVE = (constraints.positive, constraints.nonnegative)


def role_of(name: str) -> Role:
    """Return what a latent is for. The library's own classes name their sites so.

    `BayesianModel` calls its likelihood ``likelihood``; a prior's latents of weight ``w`` are
    ``w_prior_...`` (`Prior.attach`); the B of an adapter BA, which starts at 0, ends in ``lora_B``.
    """
    path, _, attribute = name.rpartition(".")
    if path.split(".")[0] == "likelihood":
        return "likelihood"
    if "_prior_" in attribute:
        return "prior"
    return "adapter" if attribute.endswith("lora_B") else "weight"


@dataclass(frozen=True)
class Latent:
    """A latent variable of a model."""

    name: str  # of its sample site
    shape: Size
    transform: Transform | None  # from unconstrained space onto the support; None if that is real
    event_dim: int
    frames: tuple[Any, ...]  # plates around the site

    @classmethod
    def of_site(cls, name: str, site: Site, onto: Bijection = biject_to) -> Latent:
        """Read a latent off its sample site; it must be continuous, in no subsampled plate.

        Args:
            name: name of the site.
            site: a node of a trace.
            onto: from a support to the transform of unconstrained space onto it.

        Raises:
            ValueError: the latent is discrete, subsampled, or of a support without a bijection.
        """
        fn, frames = site["fn"], tuple(f for f in site["cond_indep_stack"] if f.vectorized)
        if fn.has_enumerate_support or getattr(fn.support, "is_discrete", False):
            raise ValueError(f"latent {name!r} is discrete, and must be continuous here")
        if any(frame.full_size not in (None, frame.size) for frame in frames):
            raise ValueError(f"latent {name!r} is in a subsampled plate, and must be in a full one")
        support = base_support(fn)
        try:
            transform = None if support in _REAL else onto(support)
            if support in _POSITIVE:  # torch's has an affine part, and so no closed-form KL
                transform = ExpTransform()
        except NotImplementedError as error:
            raise ValueError(
                f"latent {name!r} has the support {support}, onto which no bijection is known: "
                "guides.make('delta', model) takes it, as a point estimate"
            ) from error
        return cls(name, site["value"].shape, transform, fn.event_dim, frames)

    @property
    def role(self) -> Role:
        """Purpose of the latent, by its name."""
        return role_of(self.name)

    @property
    def unconstrained_shape(self) -> Size:
        """Shape in unconstrained space."""
        return self.shape if self.transform is None else self.transform.inverse_shape(self.shape)

    def constrain(self, unconstrained: Tensor) -> Tensor:
        """Return the value at a point of unconstrained space."""
        return unconstrained if self.transform is None else self.transform(unconstrained)

    def unconstrain(self, value: Tensor, what: str = "a value") -> Tensor:
        """Return the point of unconstrained space at a value; ``what`` names it in errors.

        Raises:
            ValueError: it has another shape, or is outside the support.
        """
        if value.shape != self.shape:
            expected = f"have shape {list(self.shape)}, got {list(value.shape)}"
            raise ValueError(f"{what} of {self.name!r} must {expected}")
        unconstrained = value if self.transform is None else self.transform.inv(value)
        if not unconstrained.isfinite().all():
            raise ValueError(
                f"{what} of {self.name!r} must be finite and inside its support, got values from "
                f"{value.min().item()} to {value.max().item()}"
            )
        return unconstrained


class Latents(Mapping[str, Latent]):
    """Latents by site name, in the model's order, and their layout in one vector.

    Args:
        latents: the latents; those of a model are read by `of_sites`.

    Attributes:
        slices: slice of the vector for each latent, by site name.
        size: length of the vector.
    """

    def __init__(self, latents: Iterable[Latent] = ()) -> None:
        self._by_name = {latent.name: latent for latent in latents}
        self._shapes = [latent.unconstrained_shape for latent in self.values()]
        self._sizes = [shape.numel() for shape in self._shapes]
        ends = list(accumulate(self._sizes, initial=0))
        bounds = zip(self, pairwise(ends), strict=True)
        self.slices = {name: slice(start, stop) for name, (start, stop) in bounds}
        self.size = ends[-1]

    @classmethod
    def of_sites(cls, sites: Mapping[str, Site], onto: Bijection = biject_to) -> Latents:
        """Read the latents off sample sites, by the rules of `Latent.of_site`."""
        return cls(Latent.of_site(name, site, onto) for name, site in sites.items())

    def of_role(self, *roles: Role) -> list[Latent]:
        """Return the latents of the roles."""
        return [latent for latent in self.values() if latent.role in roles]

    def within(self, where: slice) -> Latents:
        """Return the latents inside a range of the vector, with the layout of that range."""
        offsets = {name: rows.start for name, rows in self.slices.items()}
        return Latents(x for x in self.values() if where.start <= offsets[x.name] < where.stop)

    def ravel(self, unconstrained: Mapping[str, Tensor]) -> Tensor:
        """Return one vector ``[d]`` of unconstrained values by site name."""
        return torch.cat([unconstrained[name].reshape(-1) for name in self])

    def ravel_parameters(self, parameters: Iterable[Tensor]) -> Tensor:
        """Return one vector ``[d]`` of parameters in the order of the latents.

        It is a view where they lie consecutively in memory.
        """
        vector: Tensor = _Ravel.apply(*parameters)
        return vector

    def unravel(self, z: Tensor) -> dict[str, Tensor]:
        """Return unconstrained values ``[..., *shape]`` by site name, of vectors ``[..., d]``.

        One operation splits the vector, so that its derivative is one, too.
        """
        pieces = zip(self, z.split(self._sizes, dim=-1), self._shapes, strict=True)
        return {name: piece.reshape(z.shape[:-1] + shape) for name, piece, shape in pieces}

    def constrain(self, z: Tensor) -> dict[str, Tensor]:
        """Return values ``[..., *shape]`` by site name, of vectors ``[..., d]``."""
        return {name: self[name].constrain(piece) for name, piece in self.unravel(z).items()}

    def unconstrain(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the vector ``[d]`` of one value of every latent.

        Raises:
            ValueError: a value is missing, of another shape, or outside its latent's support.
        """
        if missing := [name for name in self if name not in values]:
            raise ValueError(f"no value for the latent {missing[0]!r}, only for {list(values)}")
        pieces = {name: latent.unconstrain(values[name].detach()) for name, latent in self.items()}
        return self.ravel(pieces)

    def log_abs_det(self, z: Tensor | Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Any:
        r"""Return $\sum_i \ln\lvert\det T_i'\rvert$, 0 where all latents are real.

        Args:
            z: one vector, or unconstrained values by site name.
            values: the values there, by site name.
        """
        pieces = self.unravel(z) if isinstance(z, Tensor) else z
        return sum(
            latent.transform.log_abs_det_jacobian(pieces[name], values[name]).sum()
            for name, latent in self.items()
            if latent.transform is not None
        )

    def __getitem__(self, name: str) -> Latent:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __repr__(self) -> str:
        return f"Latents({len(self)} sites, {self.size:,} values)"


def base_support(fn: Distribution) -> Any:
    """Return the support of one value of a distribution, without the dimensions of its event."""
    support = fn.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def is_real(fn: Distribution) -> bool:
    """Return whether a distribution is of real values."""
    return base_support(fn) in _REAL


class _Ravel(Function):
    """Parameters as one vector ``[d]``: at 784-1200-1200-10 a copy would take 4 % of a step."""

    @staticmethod
    def forward(*parameters: Tensor) -> Tensor:
        return joined([x.detach().reshape(-1) for x in parameters])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.shapes = [x.shape for x in inputs]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        pieces = grad.split([shape.numel() for shape in ctx.shapes])
        return tuple(x.view(shape) for x, shape in zip(pieces, ctx.shapes, strict=True))
