# SPDX-License-Identifier: Apache-2.0
"""Batched bandit agents as one network, and the mushroom environment.

The weights of A networks are one tensor; each row of inputs holds one input for each of them. The
ELBO is a sum over the agents and Adam works on every weight by itself, so they learn as if each
were alone, in one step instead of A. Nothing is read from the device, so that on a GPU an
interaction with all its training steps is one CUDA graph.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from pyro.nn import PyroModule
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_bbb import bandits, priors
from pyro_bbb.training._runners.capture_devices import CudaDevice

Player: TypeAlias = "tuple[bandits.ThompsonAgent, Mushrooms]"

PASS, EAT = 0, 1
EDIBLE, POISONOUS = 5.0, -35.0  # rewards of eating; a poisonous one does good half of the time


class StackedMLP(PyroModule):
    """Fully connected ReLU networks of one shape, with inputs ``[rows, agents, in]``.

    All weights of an agent are one row of the random variable ``weights`` ``[agents, weights]``:
    few operations, as the time goes to launching them. Outputs are ``[rows, agents]``.
    """

    def __init__(self, agents: int, sizes: list[int], prior: priors.PriorLike) -> None:
        super().__init__()
        self.agents, self.layers = agents, list(itertools.pairwise(sizes))
        self.lengths = [length for n, m in self.layers for length in (n * m, m)]
        priors.declare(self, priors.as_prior(prior), weights=(agents, sum(self.lengths)))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of every agent's network for its own inputs."""
        x = x.transpose(0, 1)  # [agents, rows, in]
        parts = self.weights.split(self.lengths, 1)
        for number, (n, m) in enumerate(self.layers):
            kernel, bias = parts[2 * number : 2 * number + 2]
            x = x.relu() if number else x
            x = torch.baddbmm(bias.unsqueeze(1), x, kernel.view(-1, n, m))
        return x.squeeze(2).t()

    def he(self, seeds: list[int]) -> Tensor:
        """Initial weights ``[agents, weights]``: kernels from N(0, 2 / n_in), biases 0."""
        spread = he_scales(self.layers, of_biases=0.0)
        sources = [torch.Generator().manual_seed(seed) for seed in seeds]
        noise = torch.stack([torch.randn(len(spread), generator=source) for source in sources])
        return torch.tensor(spread) * noise


def he_scales(layers: Iterable[tuple[int, int]], of_biases: float) -> list[float]:
    """Scales of all weights, kernels' being sqrt(2 / inputs), by the layers' inputs and units."""
    return [
        scale
        for inputs, units in layers
        for scale in [math.sqrt(2 / inputs)] * (inputs * units) + [of_biases] * units
    ]


def encode(contexts: Tensor, action: int) -> Tensor:
    """Mushroom and action as the network's input, ``[..., 117 + 2]``."""
    return F.pad(F.pad(contexts, (0, 1), value=action == PASS), (0, 1), value=action == EAT)


class Mushrooms:
    """Mushroom bandit: batches of contexts for several agents, and their regret.

    Args:
        x: all mushrooms, ``[n, features]``.
        poisonous: which of them are, bool ``[n]``.
        seeds: one for each agent; agents of one seed meet the same mushrooms with the same luck.
        interactions: how many mushrooms there are to be for each agent.
        basket: how many are offered at a time.
        unit: divisor of the rewards that agents observe.

    Attributes:
        next: numbers of the interactions to come next, on the device.
        regret: the oracle's expected reward minus the action's, ``[interactions, agents]``.
        realised: the oracle's expected reward less the one that was got.
    """

    def __init__(
        self,
        x: Tensor,
        poisonous: Tensor,
        seeds: list[int],
        interactions: int,
        *,
        basket: int = 1,
        unit: float = 1.0,
    ) -> None:
        order, luck = zip(*(_fate(seed, interactions, len(x)) for seed in seeds), strict=True)
        self.order, self.luck = (torch.stack(part, 1).to(x.device) for part in (order, luck))
        self.x, self.poisonous, self.basket, self.unit = x, poisonous, basket, unit
        self.next = torch.arange(basket, device=x.device)
        self.regret = torch.zeros(interactions, len(seeds), device=x.device)
        self.realised = self.regret.clone()

    def offer(self, agent: bandits.ThompsonAgent) -> None:
        """A basket for every agent, which eats or passes each and remembers what came of it."""
        which = self.order.index_select(0, self.next)  # [basket, agents]
        contexts, poisonous = self.x[which], self.poisonous[which]
        actions = agent.act(contexts).view_as(poisonous)  # also of an agent alone
        harmed = poisonous & self.luck.index_select(0, self.next)
        rewards = torch.where(actions == EAT, torch.where(harmed, POISONOUS, EDIBLE), 0.0)
        agent.remember(contexts, actions, rewards / self.unit)
        self._note(poisonous, actions, rewards)

    def _note(self, poisonous: Tensor, actions: Tensor, rewards: Tensor) -> None:
        best = torch.where(poisonous, 0.0, EDIBLE)
        eaten = torch.where(poisonous, (EDIBLE + POISONOUS) / 2, EDIBLE)
        self.regret.index_copy_(0, self.next, best - torch.where(actions == EAT, eaten, 0.0))
        self.realised.index_copy_(0, self.next, best - rewards)
        self.next += self.basket


def _fate(seed: int, interactions: int, mushrooms: int) -> tuple[Tensor, Tensor]:
    """Sample the order of mushrooms, and whether a poisonous one does harm."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randint(mushrooms, (interactions,), generator=generator)
    return order, torch.rand(interactions, generator=generator) < 0.5


class RecordedAgent(bandits.ThompsonAgent):
    """A `ThompsonAgent` whose step is recorded once as its tensor operations, and compiled.

    The compiler, such as `torch.compile`, makes the record, a function of ``(x, y, kl_weight)`` to
    the gradients, faster.
    """

    def __init__(self, *args: Any, compiler: Callable[..., Any], **options: Any) -> None:
        super().__init__(*args, **options)
        self._compiler = compiler
        self._recorded: Callable[..., list[Tensor]] | None = None

    def _differentiate(self, x: Tensor, y: Tensor, kl_weight: Any) -> None:
        if self._recorded is None:
            self._gradients(x, y, kl_weight)  # what is done at the first call only
            record = make_fx(lambda *batch: self._gradients(*batch))(x, y, kl_weight)
            self._recorded = self._compiler(record)
        with torch.no_grad():
            gradients = self._recorded(x, y, kl_weight)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def _gradients(self, x: Tensor, y: Tensor, kl_weight: Any) -> list[Tensor]:
        return list(torch.autograd.grad(self._free_energy(x, y, kl_weight), self._parameters))


class Rounds:
    """Baskets one after the other, and learning after each; on a GPU a round is one CUDA graph.

    There the players, agents with their mushrooms, go on at the same time.
    """

    def __init__(self, players: Sequence[Player], device: str) -> None:
        self.players = players
        self.done = 0  # rounds
        self._device = CudaDevice(torch.device(device)) if device != "cpu" else None
        self._lanes = [torch.cuda.Stream() for _ in players] if self._device else []
        self._replay: Callable[[], None] | None = None

    def play(self, until: int) -> None:
        """Goes on to so many rounds in all."""
        while self.done < until:
            self._one()
            self.done += 1

    def _one(self) -> None:
        """A round; from the fourth on it is replayed."""
        if self._device is None:
            self._in_turn()
        elif self.done < 3:  # libraries set themselves up, the compiler runs
            self._device.run(self._at_once)
        else:
            self._replay = self._replay or self._device.capture(self._at_once)
            self._replay()

    def _in_turn(self) -> None:
        for agent, mushrooms in self.players:
            mushrooms.offer(agent)
            agent.learn()

    def _at_once(self) -> None:
        """Every player on a stream of its own, between a fork and a join."""
        around = torch.cuda.current_stream()
        for lane, (agent, mushrooms) in zip(self._lanes, self.players, strict=True):
            lane.wait_stream(around)
            with torch.cuda.stream(lane):
                mushrooms.offer(agent)
                agent.learn()
        for lane in self._lanes:
            around.wait_stream(lane)
