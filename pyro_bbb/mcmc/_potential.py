# SPDX-License-Identifier: Apache-2.0
r"""The potential energy $U(z) = -\ln p(\theta(z), y)\,|d\theta/dz|$ of a model, and its gradient.

All latents stand in one flat vector $z$ of unconstrained numbers. A leapfrog step needs $U$ and
$\nabla U$ at one point; for nets of some hundred weights the mathematics takes microseconds and
the bookkeeping around it milliseconds. So both are recorded once, as the plain list of tensor
operations that they are, and that list is run. Priors of one family are one operation on the
vector, not one per weight tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import biject_to, constraints

from pyro_bbb._handlers.param_store import own_store
from pyro_bbb._handlers.sites import drawn
from pyro_bbb._recorder import Function, record
from pyro_bbb._utils.context import evaluating
from pyro_bbb._utils.inputs import Rows
from pyro_bbb.distributions import ScaleMixtureNormal, SummedNormal
from pyro_bbb.distributions.summed_event import innermost
from pyro_bbb.models import BayesianModel

# Families on the real line whose parameters may be joined along a vector: they say all of it.
_JOINABLE = (dist.Normal, SummedNormal, dist.Laplace, dist.StudentT, ScaleMixtureNormal)


@dataclass(frozen=True)
class Part:
    """Slice of the flat vector that holds one latent, and its way out of it."""

    name: str
    start: int
    shape: torch.Size  # in unconstrained space
    transform: Any  # from unconstrained space; None for real-valued latents

    @property
    def size(self) -> int:
        """Number of entries of the latent in the flat vector."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """One past the latent's last entry."""
        return self.start + self.size


class Potential:
    """The potential energy of a model given data, as a function of one flat vector.

    Networks are in evaluation mode, parameters that are not random stay as they are. Of a minibatch
    of n examples the likelihood counts N / n times, which makes the energy an unbiased estimate.
    """

    def __init__(self, model: BayesianModel, x: Rows, y: Tensor) -> None:
        self.model, self.x, self.y = model, x, y
        with torch.no_grad(), torch.random.fork_rng():
            self.sites = drawn(self._run({}, x, y))
        self.parts: list[Part] = []
        for name, site in self.sites.items():
            start = self.parts[-1].stop if self.parts else 0
            self.parts.append(_part(name, site, start))
        if not self.parts:
            raise ValueError("model must have at least one latent variable, it has none")

    def __call__(self, z: Tensor) -> Tensor:
        """The energy in nats at ``z``, ``[d]``; differentiable."""
        return self.at(z, self.x, self.y)

    def at(self, z: Tensor, x: Rows, y: Tensor) -> Tensor:
        """The same given other data."""
        pieces = self._split(z)
        values = self._constrained(pieces)
        with pyro.validation_enabled(False):  # points of no density are part of the search
            log_joint = self._log_joint(self._run(values, x, y), z, self.model.num_data / len(y))
        for part, piece in zip(self.parts, pieces, strict=True):
            if part.transform is not None:
                jacobian = part.transform.log_abs_det_jacobian(piece, values[part.name])
                log_joint = log_joint + jacobian.sum()
        return -log_joint

    def _log_joint(self, trace: Any, z: Tensor, repeats: float) -> Tensor:
        """Log-density in nats of all that the model samples, the observations so many times."""
        groups = _joinable(self.parts, trace)
        joined = {part.name for group in groups for part in group}
        trace.compute_log_prob(lambda name, _: name not in joined)
        terms = [_joint_log_prob(group, trace, z) for group in groups]
        for name, site in trace.nodes.items():
            if site["type"] == "sample" and name not in joined:
                terms.append(site["log_prob_sum"] * (repeats if name == "obs" else 1.0))
        return torch.stack(terms).sum()

    def constrain(self, z: Tensor) -> dict[str, Tensor]:
        """The latents by name, ``[..., *shape]`` each, from vectors ``[..., d]``."""
        return self._constrained(self._split(z))

    def _constrained(self, pieces: Sequence[Tensor]) -> dict[str, Tensor]:
        return {
            part.name: piece if part.transform is None else part.transform(piece)
            for part, piece in zip(self.parts, pieces, strict=True)
        }

    def _split(self, z: Tensor) -> list[Tensor]:
        """The latents in unconstrained space; as one operation, whose gradient is one too."""
        pieces = z.split([part.size for part in self.parts], dim=-1)
        shapes = (z.shape[:-1] + part.shape for part in self.parts)
        return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def draw_prior(self) -> dict[str, Tensor]:
        """A draw of every latent from the prior, by name."""
        trace = self._run({}, self.x, self.y)
        return {name: trace.nodes[name]["value"].detach() for name in self.sites}

    def unconstrain(self, values: Mapping[str, Tensor]) -> Tensor:
        """The vector ``[d]`` of one value of every latent."""
        return torch.cat([self._unconstrained(part, values).reshape(-1) for part in self.parts])

    def _unconstrained(self, part: Part, values: Mapping[str, Tensor]) -> Tensor:
        if part.name not in values:
            raise ValueError(f"no value for the latent {part.name!r}, only for {list(values)}")
        value, expected = values[part.name].detach(), self.sites[part.name]["value"]
        if value.shape != expected.shape:
            shapes = f"{list(expected.shape)}, got {list(value.shape)}"
            raise ValueError(f"a value of {part.name!r} must have shape {shapes}")
        piece: Tensor = value if part.transform is None else part.transform.inv(value)
        if not piece.isfinite().all():
            raise ValueError(f"a value of {part.name!r} must be inside its support, got {value}")
        return piece.to(expected)

    def value_and_gradient(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The energy and its gradient at ``z``, by running the model."""
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            energy = self(z)
            (gradient,) = torch.autograd.grad(energy, z)
        return energy.detach(), gradient

    def recorded(self, z: Tensor) -> Function:
        """The same function as `value_and_gradient`, as a recorded list of operations.

        Where the model cannot be recorded at ``z``, of finite energy, it is the function itself.
        """
        return record(self.value_and_gradient, z)

    def _run(self, values: dict[str, Tensor], x: Rows, y: Tensor) -> Any:
        """The model's trace with the latents at given values."""
        conditioned = poutine.condition(self.model, data=values) if values else self.model
        with own_store(self.model), evaluating(self.model), pyro.validation_enabled(False):
            return poutine.trace(conditioned).get_trace(x, y)


def _part(name: str, site: dict[str, Any], start: int) -> Part:
    support, value = site["fn"].support, site["value"]
    if site["fn"].has_enumerate_support or getattr(support, "is_discrete", False):
        raise ValueError(f"latent {name!r} is discrete; Markov chains need continuous latents")
    base = support
    while isinstance(base, constraints.independent):
        base = base.base_constraint
    if base in (constraints.real, constraints.real_vector):
        return Part(name, start, value.shape, None)
    transform = biject_to(support)
    return Part(name, start, transform.inv(value).shape, transform)


def _joinable(parts: Sequence[Part], trace: Any) -> list[list[Part]]:
    """Groups of real-valued latents whose priors are of one family."""
    groups: dict[type, list[Part]] = {}
    for part in parts:
        site = trace.nodes[part.name]
        family = type(innermost(site["fn"]))
        plain = site["mask"] is None and not isinstance(site["scale"], Tensor)
        if family in _JOINABLE and plain and site["scale"] == 1.0:
            groups.setdefault(family, []).append(part)
    return list(groups.values())


def _joint_log_prob(parts: Sequence[Part], trace: Any, z: Tensor) -> Tensor:
    """Log-density of latents of one family, as that of one vector."""
    leaves = [innermost(trace.nodes[part.name]["fn"]) for part in parts]
    family = type(leaves[0])
    parameters = {
        name: torch.cat(
            [
                getattr(leaf, name).expand(part.shape).reshape(-1)
                for leaf, part in zip(leaves, parts, strict=True)
            ]
        )
        for name in family.arg_constraints
    }
    log_prob: Tensor = family(**parameters, validate_args=False).log_prob(_pick(parts, z)).sum()
    return log_prob


def _pick(parts: Sequence[Part], z: Tensor) -> Tensor:
    """The entries of ``z`` that belong to some of its parts."""
    start, stop = parts[0].start, parts[-1].stop
    if sum(part.size for part in parts) < stop - start:
        return torch.cat([z[part.start : part.stop] for part in parts])
    return z if stop - start == len(z) else z[start:stop]
