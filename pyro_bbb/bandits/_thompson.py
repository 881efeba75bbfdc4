# SPDX-License-Identifier: Apache-2.0
r"""Thompson sampling: an agent that acts by draws of its posterior and learns from the rewards.

Thompson (1933), as in Blundell et al. (2015), section 4: the agent draws networks, acts as if they
were true, and learns from the reward. Where the posterior is wide the draws disagree, and
so it explores. A guide without spread (``"delta"``) makes it a greedy agent, and
``epsilon`` an $\epsilon$-greedy one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import pyro
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from torch import Tensor, nn

from pyro_bbb._handlers.param_store import own_store
from pyro_bbb._utils import validation as checks
from pyro_bbb._utils.context import ItemOnDevice
from pyro_bbb._utils.locking import lock_methods
from pyro_bbb.bandits._checks import observation as check_observation
from pyro_bbb.bandits._checks import rows as check_rows
from pyro_bbb.estimators import ESTIMATORS
from pyro_bbb.guides.kl_weight import with_kl_weight
from pyro_bbb.models import BayesianModel

Encode: TypeAlias = Callable[[Tensor, int], Tensor]


@lock_methods
class ThompsonAgent:
    r"""Chooses the action whose reward is largest by networks drawn from the posterior.

    The posterior is that given the latest ``memory`` observations. After each observation come
    ``num_batches`` steps on minibatches from memory, in random order, in which all observations
    occur equally often (to one). A step minimises $F_i = \pi_i\,\mathrm{KL} - \ln p(D_i|w)$ with
    $\pi_i = |D_i|/n$, where n is the number of observations in memory, or that which it can hold.

    Args:
        model: predicts the rewards, from what `encode` gives. Outputs are ``[rows]`` or
            ``[rows, 1]``; the outputs of several agents, each of which decides for itself, are
            ``[rows, agents]``.
        guide: its posterior, a module that has its parameters already.
        encode: from contexts ``[n, ...]`` and the number of an action to inputs ``[n, ...]``.
        num_actions: how many actions there are; they are numbered from 0.
        memory: number of latest observations that it learns from.
        batch_size: observations per step.
        num_batches: steps after an observation.
        num_samples: networks drawn for a decision; their expected rewards are averaged.
        epsilon: probability of a random action instead, in [0, 1]; one number, or a tensor of one
            per agent.
        temperature: factor of the KL; 0 leaves the prior out.
        weigh_by: n in the weight of the KL: ``"seen"``, the observations in memory, which is Bayes'
            rule, or ``"memory"``, its size: until it is full, each observation then counts several
            times, and the posterior contracts sooner.
        optimizer: a torch optimiser class or function of ``(parameters, lr=...)``; by default fused
            Adam.
        lr: its learning rate.
        estimator: how gradients are estimated, as in `fit`.
        num_draws: the old name of ``num_samples``.

    Attributes:
        seen: number of observations so far, a tensor on the guide's device.

    Raises:
        ValueError: a number out of range, an unknown estimator, a guide without parameters.
        TypeError: an argument is of another kind.
    """

    def __init__(
        self,
        model: BayesianModel,
        guide: nn.Module,
        encode: Encode,
        num_actions: int,
        *,
        memory: int = 4096,
        batch_size: int = 64,
        num_batches: int = 64,
        num_samples: int = 2,
        epsilon: float | Tensor = 0.0,
        temperature: float = 1.0,
        weigh_by: str = "seen",
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        lr: float = 1e-3,
        estimator: str = "reparam",
        num_draws: int | None = None,
    ) -> None:
        if num_draws is not None:
            warnings.warn("num_draws is called num_samples now", FutureWarning, stacklevel=2)
            num_samples = checks.count("num_draws", num_draws)
        self.model = checks.kind("model", model, BayesianModel)
        self.guide = checks.kind("guide", guide, nn.Module)
        self.encode = checks.function("encode", encode, "(contexts, action) -> inputs")
        self.num_actions = checks.count("num_actions", num_actions)
        self.memory = checks.count("memory", memory)
        self.batch_size = checks.count("batch_size", batch_size)
        self.num_batches = checks.count("num_batches", num_batches)
        self.num_samples = checks.count("num_samples", num_samples)
        self.temperature = checks.at_least_zero("temperature", temperature)
        self.weigh_by = checks.one_of("weigh_by", weigh_by, ("seen", "memory"))
        self.estimator = checks.one_of("estimator", estimator, ESTIMATORS)
        self._parameters = _trainable(guide, model)
        device = self._parameters[0].device
        self.epsilon = _probabilities("epsilon", epsilon).to(device)
        make = checks.function("optimizer", optimizer or _adam, "(parameters, lr=...)")
        self._optimizer = make(self._parameters, lr=checks.positive("lr", lr))
        self._objective = _Surrogate(max_plate_nesting=1)
        self._weighted_guide = with_kl_weight(guide)
        self.seen = torch.zeros((), dtype=torch.long, device=device)
        self._inputs: Tensor | None = None
        self._rewards: Tensor | None = None
        self._fitting: set[Any] = set()  # shapes and dtypes that were tried on the network

    def act(self, contexts: Tensor) -> Tensor:
        """An action for each context; one draw of the networks serves them all.

        Args:
            contexts: ``[n, ...]``, on the guide's device.

        Returns:
            Numbers of actions, ``[n]`` or ``[n, agents]``.

        Raises:
            TypeError: the contexts are no tensor.
            ValueError: they do not fit the network.
        """
        best = self.values(contexts).argmax(0)
        anything = torch.randint_like(best, self.num_actions)
        explores = torch.rand(best.shape, device=best.device) < self.epsilon
        return torch.where(explores, anything, best)

    def values(self, contexts: Tensor) -> Tensor:
        """Expected rewards by ``num_samples`` networks drawn anew, averaged.

        Args:
            contexts: ``[n, ...]``.

        Returns:
            Expected rewards, ``[actions, n]`` or ``[actions, n, agents]``.
        """
        x = self._encoded(contexts)
        with torch.no_grad(), self._quiet():
            draws = torch.stack([self._draw(x.flatten(0, 1)) for _ in range(self.num_samples)])
        values = draws.mean(0).unflatten(0, x.shape[:2])
        return values.squeeze(2) if values.shape[2:] == (1,) else values

    def observe(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Remember actions with their rewards, and learn.

        Args:
            contexts: ``[n, ...]``.
            actions: numbers of the actions taken there, integers ``[n]`` or ``[n, agents]``.
            rewards: of the actions, same shape.

        Raises:
            ValueError: shapes do not fit, there is no such action, or a reward is not finite.
            TypeError: an argument is no tensor.
        """
        check_observation(contexts, actions, rewards, self.num_actions, self.seen.device)
        self.remember(contexts, actions, rewards)
        self.learn()

    @torch.no_grad()
    def remember(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Overwrite the oldest observations, and learn nothing.

        It reads no number from the device, and so checks none; arguments are those of `observe`.
        """
        encoded = self._encoded(contexts)
        chosen = actions.reshape(1, *actions.shape, *[1] * (encoded.dim() - actions.dim() - 1))
        inputs = encoded.take_along_dim(chosen, 0)[0]
        if self._inputs is None or self._rewards is None:
            self._inputs = inputs.new_zeros(self.memory, *inputs.shape[1:])
            self._rewards = inputs.new_zeros(self.memory, *rewards.shape[1:])
        n = min(len(inputs), self.memory)
        slots = self.seen + torch.arange(len(inputs) - n, len(inputs), device=self.seen.device)
        slots = slots % self.memory
        self._inputs.index_copy_(0, slots, inputs[-n:])
        self._rewards.index_copy_(0, slots, rewards[-n:].to(self._rewards.dtype))
        self.seen += len(inputs)

    def learn(self) -> None:
        """Run ``num_batches`` steps on the memory, without host synchronisation.

        Raises:
            ValueError: the memory is empty.
        """
        if self._inputs is None or self._rewards is None:
            raise ValueError("there must be an observation to learn from")
        filled = self.seen.clamp(max=self.memory)
        rows = self._minibatches(filled)
        counted = filled if self.weigh_by == "seen" else self.memory
        kl_weight: Any = self.temperature and self.temperature * self.batch_size / counted
        batches = zip(self._inputs[rows], self._rewards[rows], strict=True)
        with self._quiet(), ESTIMATORS[self.estimator]():
            for x, y in batches:
                self._differentiate(x, y, kl_weight)
                self._optimizer.step()
                self._optimizer.zero_grad()

    def _neg_elbo(self, x: Tensor, y: Tensor, kl_weight: Any) -> Tensor:
        """A surrogate with the gradient of a minibatch's negative ELBO."""
        return self._objective.at(self.model, self._weighted_guide, x, y, kl_weight)

    def _differentiate(self, x: Tensor, y: Tensor, kl_weight: Any) -> None:
        """Add that gradient to the parameters."""
        self._neg_elbo(x, y, kl_weight).backward()

    def _encoded(self, contexts: Tensor) -> Tensor:
        """Inputs of every action in every context, ``[actions, n, ...]``."""
        check_rows("contexts", contexts, self.seen.device)
        x = torch.stack([self.encode(contexts, action) for action in range(self.num_actions)])
        kind = x.shape[2:], x.dtype
        if kind not in self._fitting:
            try:
                self.model.check(x.flatten(0, 1))
            except ValueError as error:
                raise ValueError(f"contexts must fit the network when encoded: {error}") from error
            self._fitting.add(kind)
        return x

    def _draw(self, x: Tensor) -> Tensor:
        """Expected rewards by one network."""
        guide_trace = poutine.trace(self.guide).get_trace(x, None, 1.0)
        with poutine.replay(trace=guide_trace):
            arguments = self.model.predictive(x)
        draws = {name: value.unsqueeze(0) for name, value in arguments.items()}
        mean: Tensor = self.model.observed(draws).mean
        return mean[0]

    def _minibatches(self, filled: Tensor) -> Tensor:
        """Rows of the memory, ``[num_batches, batch_size]``: in turn, by a random order."""
        keys = torch.rand(self.memory, device=filled.device)
        slots = torch.arange(self.memory, device=filled.device)
        order = keys.where(slots < filled, 2.0).argsort()  # what is filled comes first
        turns = torch.arange(self.num_batches * self.batch_size, device=filled.device) % filled
        return order[turns].view(self.num_batches, self.batch_size)

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Parameters of its own, and no checks of numbers."""
        with own_store(self.model, self.guide), pyro.validation_enabled(False):
            yield


class _Surrogate(Trace_ELBO):
    """`Trace_ELBO` for its gradient alone."""

    def at(self, model: Any, guide: Any, *args: Any) -> Tensor:
        """A surrogate with the gradient of the negative ELBO at these arguments."""
        ((model_trace, guide_trace),) = self._get_traces(model, guide, args, {})
        with ItemOnDevice():
            _, surrogate = self._differentiable_loss_particle(model_trace, guide_trace)
        return cast(Tensor, surrogate)


def _adam(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Fused Adam, whose count of steps stays on the device."""
    return torch.optim.Adam(parameters, lr=lr, fused=True, capturable=parameters[0].is_cuda)


def _trainable(*modules: nn.Module) -> list[nn.Parameter]:
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("guide must have its parameters already, got one without any")
    return list(dict.fromkeys(parameters))


def _probabilities(name: str, value: Any) -> Tensor:
    """One number in [0, 1], or a tensor of such."""
    if not isinstance(value, Tensor):
        return torch.tensor(checks.fraction(name, value))
    if not ((value >= 0) & (value <= 1)).all():
        raise ValueError(f"{name} must be in [0, 1], got {value}")
    return value
