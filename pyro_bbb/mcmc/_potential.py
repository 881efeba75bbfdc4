# SPDX-License-Identifier: Apache-2.0
r"""The potential energy $U(z) = -\ln p(\theta(z), y)\,|d\theta/dz|$ of a model, and its gradient.

$z \in R^d$ holds all latents in unconstrained space (`pyro_bbb.latents`). Given a minibatch of $n$
of the $N$ rows the log-likelihood counts $N / n$ times, which makes $U$ an unbiased estimate.

For nets of some hundred weights the mathematics of $U$ and $\nabla U$ takes microseconds and the
bookkeeping around it milliseconds. So both are recorded once, as the plain list of their tensor
operations, and the list is run. Priors of one family are one operation on the vector, not one per
weight tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor

from pyro_bbb._param_store import own_store
from pyro_bbb._recorder import record
from pyro_bbb._utils.context import evaluating
from pyro_bbb._utils.inputs import Rows, input_tensors, with_tensors
from pyro_bbb.distributions import ScaleMixtureNormal, SummedNormal
from pyro_bbb.distributions.summed_event import innermost
from pyro_bbb.latents import Latents, drawn
from pyro_bbb.models import BayesianModel

# families on the real line, whose parameters can be joined along a vector
_JOINABLE = (dist.Normal, SummedNormal, dist.Laplace, dist.StudentT, ScaleMixtureNormal)


class Potential:
    """The potential energy of a model given data, as a function of one flat vector.

    ``latents`` has the slices of the vector, ``sites`` the latents' sample sites by name.
    """

    def __init__(self, model: BayesianModel, x: Rows, y: Tensor) -> None:
        self.model, self.x, self.y = model, x, y
        with torch.no_grad(), torch.random.fork_rng():
            self.sites = drawn(self._trace({}, x, y))
        if not self.sites:
            raise ValueError("model must have at least one latent variable, it has none")
        self.latents = Latents.of_sites(self.sites)

    def __call__(self, z: Tensor, x: Rows | None = None, y: Tensor | None = None) -> Tensor:
        """Return the energy in nats at ``z``, ``[d]``, given the data or others; differentiable."""
        x, y = (self.x, self.y) if x is None or y is None else (x, y)
        unconstrained = self.latents.unravel(z)
        values = {name: self.latents[name].constrain(u) for name, u in unconstrained.items()}
        with pyro.validation_enabled(False):  # points of no density are part of the search
            log_joint = self._log_joint(self._trace(values, x, y), z, self.model.num_data / len(y))
        return -(log_joint + self.latents.log_abs_det(unconstrained, values))

    def _log_joint(self, trace: Any, z: Tensor, repeats: float) -> Tensor:
        """Return the log-density of all sites in nats, the observations ``repeats`` times."""
        families = self._families(trace)
        joined = {name for names in families for name in names}
        trace.compute_log_prob(lambda name, _: name not in joined)
        terms = [self._joint_log_prob(names, trace, z) for names in families]
        for name, site in trace.nodes.items():
            if site["type"] == "sample" and name not in joined:
                terms.append(site["log_prob_sum"] * (repeats if name == "obs" else 1.0))
        return torch.stack(terms).sum()

    def _families(self, trace: Any) -> list[list[str]]:
        """Return the names of latents whose priors are of one family, for each family."""
        families: dict[type, list[str]] = {}
        for name in self.latents:
            site = trace.nodes[name]
            family = type(innermost(site["fn"]))
            plain = site["mask"] is None and not isinstance(site["scale"], Tensor)
            if family in _JOINABLE and plain and site["scale"] == 1.0:
                families.setdefault(family, []).append(name)
        return list(families.values())

    def _joint_log_prob(self, names: Sequence[str], trace: Any, z: Tensor) -> Tensor:
        """Return the log-density of latents of one family, as that of one vector."""
        leaves = {name: innermost(trace.nodes[name]["fn"]) for name in names}
        family = type(leaves[names[0]])
        parameters = {
            parameter: torch.cat(
                [
                    getattr(leaf, parameter).expand(self.latents[name].shape).reshape(-1)
                    for name, leaf in leaves.items()
                ]
            )
            for parameter in family.arg_constraints
        }
        slices = [self.latents.slices[name] for name in names]
        adjacent = all(a.stop == b.start for a, b in zip(slices, slices[1:], strict=False))
        if not adjacent:
            z = torch.cat([z[rows] for rows in slices])
        elif slices[-1].stop - slices[0].start < len(z):
            z = z[slices[0].start : slices[-1].stop]
        log_prob: Tensor = family(**parameters, validate_args=False).log_prob(z).sum()
        return log_prob

    def by_chain(self, draws: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return draws by name, ``[chains, draws, ...]``, of positions ``[chains, d]``."""
        with torch.no_grad():
            values = self.latents.constrain(torch.stack(list(draws), dim=1))
        return {name: value.contiguous() for name, value in values.items()}

    def unconstrain(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the vector ``[d]`` of one value of every latent."""
        sites = self.sites
        return self.latents.unconstrain(
            {name: v.to(sites[name]["value"]) for name, v in values.items() if name in sites}
        )

    def draw_prior(self) -> dict[str, Tensor]:
        """Draw every latent from the prior, by name."""
        trace = self._trace({}, self.x, self.y)
        return {name: trace.nodes[name]["value"].detach() for name in self.sites}

    def value_and_gradient(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the energy and its gradient at ``z``, by running the model."""
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            energy = self(z)
            (gradient,) = torch.autograd.grad(energy, z)
        return energy.detach(), gradient

    def _trace(self, values: dict[str, Tensor], x: Rows, y: Tensor) -> Any:
        """Run the model with the latents at ``values``."""
        conditioned = poutine.condition(self.model, data=values) if values else self.model
        with own_store(self.model), evaluating(self.model), pyro.validation_enabled(False):
            return poutine.trace(conditioned).get_trace(x, y)


class MinibatchGradient:
    """Energies and gradients at positions ``[chains, d]``, given a minibatch of constant size.

    Chains run one after the other where the model's operations cannot be batched over them.
    """

    def __init__(self, potential: Potential, z: Tensor, batch: tuple[Rows, Tensor]) -> None:
        self._potential, self._inputs = potential, batch[0]
        self._batched = len(z) > 1 and self._can_be_batched(z, *batch)
        self._run = record(self._by_model, z, batch[1], *input_tensors(batch[0]))

    def __call__(self, z: Tensor, x: Rows, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return energies in nats, ``[chains]``, and their gradients, ``[chains, d]``."""
        return self._run(z, y, *input_tensors(x))

    def _by_model(self, z: Tensor, y: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            energies = self._energies(z, with_tensors(self._inputs, inputs), y)
            (gradient,) = torch.autograd.grad(energies.sum(), z)
        return energies.detach(), gradient

    def _energies(self, z: Tensor, x: Rows, y: Tensor) -> Tensor:
        if self._batched:
            return torch.vmap(lambda position: self._potential(position, x, y))(z)
        return torch.stack([self._potential(position, x, y) for position in z])

    def _can_be_batched(self, z: Tensor, x: Rows, y: Tensor) -> bool:
        self._batched = True
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)  # torch warns of slow batching
                self._by_model(z, y, *input_tensors(x))
        except (RuntimeError, UserWarning):
            return False
        return True
