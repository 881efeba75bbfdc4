# SPDX-License-Identifier: Apache-2.0
r"""IVON as a torch optimiser of a guide's ``loc`` and ``rho``: natural gradients.

The objective leaves two sums over examples as gradients: $\sum\nabla\ell$ at ``loc``, and at
``rho`` Price's $\sum\nabla\ell\,\epsilon/\sigma$. As they are sums, they add up over parts of a
minibatch and over processes as gradients do; so does their number, the gradient of ``totals``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Adam

from pyro_bbb._ops.flat import FlatTensors, joined
from pyro_bbb.training._runners.flat_adam import FlatMemory
from pyro_bbb.training._runners.ivon_options import IVON
from pyro_bbb.training._runners.ivon_step import (
    IvonScalars,
    IvonVectors,
    inverse_softplus,
    scale_into,
    sum_of_logs,
    update,
)

Pair: TypeAlias = tuple[FlatTensors, FlatTensors]


@dataclass(frozen=True)
class NormalPriors:
    """The fixed Normal priors of a vector of weights: numbers, or ``[n]`` where they differ.

    A precision of 0 marks entries of another prior, whose density the objective has, and pruned
    ones. ``loc`` is none where all are 0.
    """

    loc: Tensor | None
    precision: Tensor


class FlatPosterior:
    """The means and Hessians of a guide's latents as vectors, and draws from the posterior.

    Beside parameters and state it takes three vectors: of the draw, its gradient, and Price's
    product. A second draw in a step takes two more.

    Args:
        locs: the guide's parameters by site name; their memory is the vector's until `close`.
        rhos: likewise; `write` sets them.
        priors: of the vectors' entries.
        unpruned: true where an entry is left; none if all are.
        hessian: the initial Hessian of the mean loss per example, ``[n]``.
    """

    def __init__(
        self,
        locs: Mapping[str, nn.Parameter],
        rhos: Mapping[str, nn.Parameter],
        priors: NormalPriors,
        unpruned: Tensor | None,
        hessian: Tensor,
    ) -> None:
        self.names, self.locs, self.rhos = list(locs), list(locs.values()), list(rhos.values())
        self.priors, self.unpruned = priors, unpruned
        self.memory: FlatMemory | None = None
        like = self.hessian = hessian
        self.momentum = torch.zeros_like(like)
        self.value = torch.empty_like(like)
        self.sums = self.latest = self._pair()  # of a step's draws, and of the latest one
        self._further: Pair | None = None
        self.square = self.log_scale = like.new_zeros(())  # of the latest draw's noise and scales
        self.totals = nn.Parameter(like.new_zeros(2))  # its gradient: examples, KL weight of a step
        self.num_data = like.new_ones(())  # effective: lambda of the latest step
        self.step = torch.zeros((), device=like.device)  # number of steps

    @property
    def mean(self) -> Tensor:
        """The vector on which the parameters ``locs`` lie from here on."""
        if self.memory is None:
            self.memory = FlatMemory(self.locs, keep=False)
        return self.memory.vector

    @torch.no_grad()
    def draw(self, num_data: Tensor | float) -> dict[str, Tensor]:
        """Draw all latents for an effective number of data; leaves of a graph, by site name."""
        self.latest = self.sums if self.locs[0].grad is None else self._another()
        gradient, price = self.latest
        noise = self.value.normal_()
        scale = scale_into(self.hessian, self.priors.precision, num_data, price.vector)
        if self.unpruned is not None:
            noise.mul_(self.unpruned)
            scale.masked_fill_(~self.unpruned, 1.0)
        self.square, self.log_scale = noise.dot(noise), sum_of_logs(scale)
        torch.addcmul(self.mean, scale, noise, out=self.value)
        gradient.vector.zero_()
        parts = FlatTensors(self.value, self.locs).parts
        draws = {n: x.requires_grad_() for n, x in zip(self.names, parts, strict=True)}
        for draw, part in zip(draws.values(), gradient.parts, strict=True):
            draw.grad = part  # to which the backward pass adds
        return draws

    @torch.no_grad()
    def add(self, num_data: Tensor | float) -> None:
        r"""Add the draw's gradients to those of ``loc``, and Price's product to those of ``rho``.

        Args:
            num_data: as for `draw`.
        """
        gradient, price = self.latest
        distance = torch.sub(self.value, self.mean, out=price.vector)
        precision = torch.mul(self.hessian, num_data, out=self.value).add_(self.priors.precision)
        distance.mul_(gradient.vector).mul_(precision)
        if self.latest is not self.sums:
            for total, one in zip(self.sums, self.latest, strict=True):
                total.vector.add_(one.vector)
            return
        self.totals.grad = None  # of a step that failed
        for parameters, flat in ((self.locs, gradient), (self.rhos, price)):
            for parameter, part in zip(parameters, flat.parts, strict=True):
                parameter.grad = part

    def _pair(self) -> Pair:
        gradient, price = (FlatTensors(torch.zeros_like(self.hessian), self.locs) for _ in range(2))
        return gradient, price

    def _another(self) -> Pair:
        """Memory for a further draw in a step."""
        self._further = self._further or self._pair()
        return self._further

    @torch.no_grad()
    def count(self, examples: int, kl_weight: Tensor | float) -> None:
        """Add to the number of examples and the weight of the KL of a step."""
        found = self.totals.new_tensor([examples, 0.0])
        found[1] = kl_weight
        self.totals.grad = found if self.totals.grad is None else self.totals.grad + found

    @torch.no_grad()
    def write(self) -> None:
        """Set ``rho`` to what the steps have made of it, until it is closed."""
        if self.memory is None or not self.step:
            return
        scale = scale_into(self.hessian, self.priors.precision, self.num_data, self.value)
        if self.unpruned is not None:
            scale.mul_(self.unpruned)
        rho = FlatTensors(inverse_softplus(scale, self.sums[1].vector), self.rhos)
        for parameter, part in zip(self.rhos, rho.parts, strict=True):
            parameter.copy_(part)

    def close(self) -> None:
        """Set ``rho``, and give ``loc`` its own memory back; there are no further draws."""
        self.write()
        if self.memory is not None:
            del self.value, self.sums, self.latest, self._further  # before that memory is taken
            self.memory.close()
        self.memory = None


class NaturalGradient(Adam):
    """IVON for the latents of a posterior, and Adam for all other parameters.

    Args:
        parameters: of model and guide.
        lr: learning rate.
        posterior: of the guide.
        options: of the algorithm.
        num_steps: of the run; the decay rate of the Hessian depends on it.
        max_lr: the most that Adam uses.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        *,
        posterior: FlatPosterior,
        options: IVON,
        num_steps: int,
        max_lr: float,
    ) -> None:
        own = [posterior.totals, *posterior.locs, *posterior.rhos]
        others = [p for p in parameters if p not in {*own}]
        groups: list[dict[str, Any]] = [{"params": own}]
        super().__init__(groups, lr=lr, fused=True)
        if others:
            self.add_param_group({"params": others, "max_lr": max_lr})
        self.posterior, self.beta1 = posterior, options.beta1
        self.beta2, self.ramp = options.hessian_decay(num_steps)
        self.defaults.update(asdict(options), beta2=self.beta2)
        self.found_inf: Tensor | None = None  # 1 where a step is to move nothing
        self.state[posterior.totals] = self._vectors()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of all parameters that have a gradient."""
        posterior = self.posterior
        if any(p.grad is None for p in posterior.locs):
            raise ValueError(
                "optimizer 'ivon' trains all latents of the guide, which are not to be frozen"
            )
        grad, price = (
            joined([_gradient(p).reshape(-1) for p in parameters])
            for parameters in (posterior.locs, posterior.rhos)
        )
        self._update(grad, price)
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None
        if len(self.param_groups) > 1:
            super().step()

    def _update(self, grad: Tensor, price: Tensor) -> None:
        posterior, prior = self.posterior, self.posterior.priors
        examples, kl_weight = _gradient(posterior.totals).unbind()
        if self.found_inf is not None:  # they leave the state as it is, if multiplied by 0
            for sums in (grad, price):
                sums.nan_to_num_(0.0, 0.0, 0.0)
        posterior.num_data.copy_(examples / kl_weight)
        vectors = posterior.mean, posterior.momentum, posterior.hessian
        at = IvonVectors(*vectors, posterior.value)
        decay = prior.precision / posterior.num_data
        update(at, grad, price, prior.loc, decay, self._scalars(examples))
        if posterior.unpruned is not None:
            posterior.mean.mul_(posterior.unpruned)

    def _scalars(self, examples: Tensor) -> IvonScalars:
        """The numbers of the next step, which it is from here on."""
        moving = 1.0 if self.found_inf is None else 1 - self.found_inf.to(examples.dtype)
        self.posterior.step += moving
        step = self.posterior.step.clamp(min=1).to(examples.dtype)
        rate2 = (step * self.ramp).clamp(max=1) * (1 - self.beta2)
        lr = torch.as_tensor(self.param_groups[0]["lr"], dtype=step.dtype, device=step.device)
        rate1 = (1 - self.beta1) * torch.ones_like(step)
        debias = 1 - self.beta1**step
        return IvonScalars(examples, lr * moving, rate1 * moving, rate2 * moving, debias)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state; the vectors stay where they are."""
        super().load_state_dict(state_dict)
        vectors = self._vectors()
        for name, value in self.state[self.posterior.totals].items():
            vectors[name].copy_(value)
        self.state[self.posterior.totals] = vectors

    def _vectors(self) -> dict[str, Tensor]:
        """Tensors of the posterior in a checkpoint, apart from the parameters."""
        return {x: getattr(self.posterior, x) for x in ("step", "hessian", "momentum", "num_data")}

    def write(self) -> None:
        """Write the posterior to the guide's parameters."""
        self.posterior.write()

    def close(self) -> None:
        """Likewise, and leave the parameters' memory as it was."""
        self.posterior.close()


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad
