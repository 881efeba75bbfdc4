"""Ensembles: several guides with different initial values, as one posterior.

Ensembles of points are the deep ensembles of Lakshminarayanan et al. (2017), "Simple and Scalable
Predictive Uncertainty Estimation using Deep Ensembles".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroModule
from torch import Size, Tensor

from pyro_bbb._utils.validation import count, function
from pyro_bbb.guides._autoguides import Delta
from pyro_bbb.guides._base import Approximated, Guide
from pyro_bbb.guides._laplace import Laplace


class Ensemble(Guide):
    """Equally weighted mixture of guides, which take turns at each call.

    `fit` runs every member in every step, so that the loss is the mean of theirs; a member's
    gradient then carries the factor 1 / size, which Adam does not see. Ordinary parameters of the
    model are shared.

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
        self._calls = 0
        self.add_module("member", PyroModule())
        for _ in range(size):
            self.add(make_member(model))
        self._kl_weight = replace(self._kl_weight, position=None)  # the members weigh theirs
        self._refuse_equal_points()

    def add(self, member: Guide) -> None:
        """Add a guide for the same model as the last member.

        Raises:
            TypeError: it is none of `pyro_bbb.guides`.
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
    def site_names(self) -> list[str]:
        """Names of the latent variables, in the model's order."""
        return self.members[0].site_names

    def latent_shapes(self) -> dict[str, Size]:
        """Shapes of the latents, by site name."""
        return self.members[0].latent_shapes()

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample every latent, by site name, from the member whose turn it is."""
        member = self.members[self._calls % self.size]
        self._calls += 1
        draws: dict[str, Tensor] = member(*args, **kwargs)
        return draws

    def sample_posterior(self, num_samples: int) -> dict[str, Tensor]:
        """Samples of all latents, ``[num_samples, ...]`` by site name, of each member in turn."""
        num_samples = count("num_samples", num_samples)
        counts = [len(range(k, num_samples, self.size)) for k in range(self.size)]
        drawn = [
            member.sample_posterior(number)
            for member, number in zip(self.members, counts, strict=True)
            if number
        ]
        # samples are sorted by member: sample i belongs to turn turns[i]
        turns = [i for k in range(self.size) for i in range(k, num_samples, self.size)]
        order = torch.tensor(turns).argsort()
        return {name: torch.cat([draws[name] for draws in drawn])[order] for name in drawn[0]}

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Raise TypeError: the mean of the members is no working network."""
        raise TypeError(
            "an ensemble has no single centre; use predict, or one of guide.members by itself"
        )

    def quantiles(self, quantiles: Iterable[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Raise TypeError, as `median`."""
        return self.median()

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

    def _refuse_equal_points(self) -> None:
        states = [list(member.parameters()) for member in self.members[:2]]
        points = all(isinstance(member, Delta | Laplace) for member in self.members)
        if points and len(states) == 2 and states[0]:
            if all(torch.equal(a, b) for a, b in zip(*states, strict=True)):
                raise ValueError(
                    "init_loc must give each member different initial values, got equal ones; use "
                    "init_loc='he'"
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for module in self.modules():
            if isinstance(module, AutoGuide):
                module.master = None  # each member is a guide by itself
