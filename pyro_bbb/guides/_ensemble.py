# SPDX-License-Identifier: Apache-2.0
"""Ensembles: several guides with different initial values, as one posterior.

Ensembles of points are the deep ensembles of Lakshminarayanan et al. (2017), "Simple and Scalable
Predictive Uncertainty Estimation using Deep Ensembles".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroModule
from torch import Size, Tensor

from pyro_bbb._utils.validation import count, function
from pyro_bbb.distributions import SoftplusNormal
from pyro_bbb.guides._autoguides import Delta, PointThenNormal
from pyro_bbb.guides._base import Approximated, Guide
from pyro_bbb.guides._mean_field import AutoSoftplusNormal, VectorDraw, reparameterize
from pyro_bbb.guides.scale_kl import scale_kl
from pyro_bbb.latents import Latents, plate_shape


class Ensemble(Guide):
    """Equally weighted mixture of guides, which take turns at each call.

    `fit` runs every member in every step, so that the loss is the mean of theirs; a member's
    gradient then carries the factor 1 / size, which Adam does not see. Ordinary parameters of the
    model are shared, and so are BatchNorm's running statistics: predict by `batchnorm_draws`.

    Args:
        model: the model.
        make_member: function from the model to a member; called once per member.
        size: number of members.

    Raises:
        ValueError: ``size`` is below 1, or points have equal initial values, and would stay equal.
    """

    def __init__(
        self, model: Callable[..., Any], make_member: Callable[[Any], Guide], size: int
    ) -> None:
        size = count("size", size)
        function("make_member", make_member, "(model) -> guide")
        super().__init__(model)
        self.turn: int = 0
        self.add_module("member", PyroModule())
        for _ in range(size):
            self.add(make_member(model))
        self._kl_weight_at = None  # the members weigh theirs
        states = [list(member.parameters()) for member in self.members[:2]]
        points = all(member.is_point for member in self.members)
        if points and len(states) == 2 and states[0]:
            if all(torch.equal(a, b) for a, b in zip(*states, strict=True)):
                raise ValueError(
                    "init_loc must give each member different initial values, got equal ones; use "
                    "init_loc='he'"
                )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.size} members, the first {self.members[0]!r})"

    def add(self, member: Guide) -> None:
        """Add a guide for the same model as the last member.

        Raises:
            TypeError: the member is not a guide of `pyro_bbb.guides`.
        """
        if not isinstance(member, Guide):
            raise TypeError(f"member must be one of pyro_bbb.guides, got {member!r}")
        self._modules["member"].add_module(str(self.size), member)  # type: ignore[union-attr]

    @property
    def members(self) -> list[Guide]:
        """The guides, in turn."""
        return list(self._modules["member"].children())  # type: ignore[union-attr,arg-type]

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    @property
    def latents(self) -> Latents:
        """Latent variables by site name, those of every member."""
        return self.members[0].latents

    @property
    def stackable(self) -> bool:
        """Return whether members can be drawn at once: plain Normals can, and points.

        Points of a flat vector can, as plain Normals, where all latents are real.
        """
        members = self.members
        latents = [latent for member in members for latent in member._latents.values()]
        if any(latent.frames for latent in latents):
            return False
        if not all(member._complete and member.stackable for member in members):
            return False
        if all(type(member) is Delta for member in members):
            return True
        if any(latent.transform is not None for latent in latents):
            return False
        if all(isinstance(member, PointThenNormal) and member.is_point for member in members):
            return True
        return all(type(x) is AutoSoftplusNormal and not x._pruned for x in members)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample every latent, by site name, from the member whose turn it is.

        Within the plate of several draws, a multiple of ``size``, draw i is of member i modulo
        ``size``, all by one operation on the members' parameters, stacked.
        """
        plates = plate_shape()
        if plates and plates.numel() % self.size == 0 and self.stackable:
            return self._draw_stacked(plates, self.members[0]._kl_weight(args, kwargs))
        member = self.members[self.turn % self.size]
        self.turn = (self.turn + 1) % self.size
        draws: dict[str, Tensor] = member(*args, **kwargs)
        return draws

    def _draw_stacked(self, plates: Size, kl_weight: Any) -> dict[str, Tensor]:
        """Draw each latent by one operation on the members' parameters, in turn along plates."""
        members: Any = self.members
        normal, repeats = isinstance(members[0], AutoSoftplusNormal), plates.numel() // self.size
        points = [] if normal else [member._points() for member in members]

        def stacked(values: list[Tensor]) -> Tensor:
            return torch.stack(values * repeats).view(plates + values[0].shape)

        draws = {}
        for name, latent in self.latents.items():
            if normal:
                locs = stacked([member._own("locs", name) for member in members])
                rhos = stacked([member._own("rhos", name) for member in members])
                q: Any = SoftplusNormal(locs, rhos)
            else:
                q = dist.Delta(stacked([point[name] for point in points]))
            with scale_kl(kl_weight):
                draws[name] = pyro.sample(name, q.to_event(latent.event_dim))
        return draws

    @property
    def is_one_vector(self) -> bool:
        """True if all members are independent Normals that can be drawn as vectors."""
        return all(type(x) is AutoSoftplusNormal and x.is_one_vector for x in self.members)

    def draw(self, num_draws: int) -> VectorDraw:
        """Draw S vectors of all latents, draw i from member i modulo ``size``.

        Args:
            num_draws: S, a multiple of ``size``.
        """
        members: Any = self.members
        pairs = [member.vectors() for member in members] * (num_draws // self.size)
        loc, rho = (torch.cat(vectors).view(num_draws, -1) for vectors in zip(*pairs, strict=True))
        vector, scale, log_q = reparameterize(loc, rho, torch.randn_like(loc))
        return VectorDraw(vector, members[0].latents.unravel(vector), log_q, loc, scale)

    def sample_posterior(self, num_samples: int) -> dict[str, Tensor]:
        """Return samples of each member in turn, ``[num_samples, ...]`` by site name."""
        num_samples = count("num_samples", num_samples)
        turns = [
            torch.arange(k, num_samples, self.size) for k in range(min(self.size, num_samples))
        ]
        pairs = zip(self.members, turns, strict=False)
        drawn = [member.sample_posterior(len(turn)) for member, turn in pairs]
        order = torch.cat(turns).argsort()  # sample i is of member i modulo size
        return {name: torch.cat([draws[name] for draws in drawn])[order] for name in drawn[0]}

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Raise TypeError: the mean of the members is no working network."""
        raise TypeError(
            "an ensemble has no single centre; use predict, or one of guide.members alone"
        )

    def approximate(self, data: Any) -> None:
        """Approximate the members that need it, with the data as for `Laplace.approximate`."""
        for member in self.members:
            if isinstance(member, Approximated):
                member.approximate(data)

    def reset(self) -> None:
        """Make such members points again, for further training."""
        for member in self.members:
            if isinstance(member, Approximated):
                member.reset()

    def _find_latents(self, *args: Any, **kwargs: Any) -> None:
        for member in self.members:
            if not member._complete:
                member._find_latents(*args, **kwargs)
        self._complete = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for module in self.modules():
            if isinstance(module, AutoGuide):
                module.master = None  # Pyro would take members for parts of one guide
