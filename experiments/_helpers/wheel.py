# SPDX-License-Identifier: Apache-2.0
"""The wheel bandit of Riquelme et al. (2018), and agents that play it."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from pyro.distributions import Normal
from torch import Tensor, nn
from tqdm import tqdm

import pyro_bbb as bbb
from _helpers.bandit import StackedMLP, he_scales
from pyro_bbb import bandits, guides

ACTIONS = 5
SAFE = 4  # the action whose reward is the same everywhere
LOW, SURE, HIGH, NOISE = 1.0, 1.2, 50.0, 0.01  # mean rewards, and their standard deviation
TRIALS = 3  # times that each action is tried at first


class Wheel:
    """Contexts in the unit disk: beyond a radius one of four actions pays fifty times more.

    Wheels of several radii have the same contexts and the same noise.

    Args:
        radii: beyond which one action pays more, a wheel each.
        steps: how many contexts.
        seed: of contexts and noise.

    Attributes:
        contexts: ``[steps, 2]``, uniform in the disk.
        means: mean rewards ``[steps, radii, actions]``.
        rewards: what is paid, ``[steps, radii, actions]``.
    """

    def __init__(self, radii: tuple[float, ...], steps: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        radius = torch.rand(steps, generator=generator).sqrt()
        angle = 2 * torch.pi * torch.rand(steps, generator=generator)
        self.contexts = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1)
        self.means = torch.full((steps, len(radii), ACTIONS), LOW)
        self.means[..., SAFE] = SURE
        right, upper = (self.contexts > 0).unbind(-1)
        quadrant = 2 * (~right).long() + (~upper).long()
        for number, delta in enumerate(radii):
            beyond = radius > delta
            self.means[beyond, number, quadrant[beyond]] = HIGH
        noise = torch.randn(steps, ACTIONS, generator=generator)
        self.rewards = self.means + NOISE * noise[:, None]

    @property
    def uniform_regret(self) -> Tensor:
        """Regret that uniformly random actions are expected to have, ``[steps, radii]``."""
        return self.means.amax(-1) - self.means.mean(-1)

    def regret(self, actions: Tensor) -> Tensor:
        """Mean reward of the best action less that of the one taken, ``[steps, radii]``."""
        return self.means.amax(-1) - self.means.gather(-1, actions[..., None])[..., 0]


class Agent(Protocol):
    """Player of several wheels, on each of which it has learned that one's rewards alone."""

    def act(self, contexts: Tensor) -> Tensor:
        """Actions ``[n, radii]`` in contexts ``[n, radii, 2]``."""

    def observe(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Learn from rewards ``[n, radii]``."""


def play(wheel: Wheel, agent: Agent, name: str) -> Tensor:
    """Actions ``[steps, radii]`` of an agent that meets one context after the other."""
    steps, radii = wheel.means.shape[:2]
    actions = torch.zeros(steps, radii, dtype=torch.long)
    for step in tqdm(range(steps), desc=name, mininterval=5):
        context = wheel.contexts[step].expand(1, radii, 2)
        if step < TRIALS * ACTIONS:
            action = torch.full((1, radii), step % ACTIONS)
        else:
            action = agent.act(context).view(1, radii)
        reward = wheel.rewards[step, None].gather(-1, action[..., None])[..., 0]
        agent.observe(context, action, reward)
        actions[step] = action[0]
    return actions


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Training of the networks of all agents."""

    hidden: int = 100
    """Units of both hidden layers."""
    learn_every: int = 50
    """Observations between two trainings, at least..."""
    learn_growth: float = 0.02
    """...and as a fraction of those before."""
    num_batches: int = 100
    """Steps of a training."""
    batch_size: int = 512
    """Observations per step."""
    lr: float = 1e-3
    """Adam's learning rate."""
    memory: int = 100_000
    """Latest observations that are learned from."""


class LastLayers:
    """Exact linear regressions on learned features, an agent for each wheel."""

    def __init__(self, radii: int, of: Learning) -> None:
        self.agents = [self._one(of) for _ in range(radii)]

    @staticmethod
    def _one(of: Learning) -> bandits.LastLayerAgent:
        layers = [nn.Linear(2, of.hidden), nn.ReLU(), nn.Linear(of.hidden, of.hidden), nn.ReLU()]
        return bandits.LastLayerAgent(
            nn.Sequential(*layers),
            ACTIONS,
            of.hidden,
            memory=of.memory,
            learn_every=of.learn_every,
            learn_growth=of.learn_growth,
            num_batches=of.num_batches,
            batch_size=of.batch_size,
            lr=of.lr,
        )

    def act(self, contexts: Tensor) -> Tensor:
        """Actions of each wheel's agent."""
        each = zip(self.agents, contexts.unbind(1), strict=True)
        return torch.stack([agent.act(context) for agent, context in each], dim=1)

    def observe(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Each agent learns from its wheel."""
        observed = (part.unbind(1) for part in (contexts, actions, rewards))
        for agent, *observation in zip(self.agents, *observed, strict=True):
            agent.observe(*observation)


class Periodic:
    """A `ThompsonAgent` that learns now and then, as `bandits.LastLayerAgent` does."""

    def __init__(self, agent: bandits.ThompsonAgent, of: Learning) -> None:
        self.agent, self.of, self.seen, self.learned_at = agent, of, 0, 0

    def act(self, contexts: Tensor) -> Tensor:
        """An action for each context."""
        return self.agent.act(contexts)

    def observe(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Remember, and learn now and then."""
        self.agent.remember(contexts, actions, rewards / HIGH)
        self.seen += len(contexts)
        pause = max(self.of.learn_every, self.of.learn_growth * self.learned_at)
        if self.seen - self.learned_at >= pause:
            self.agent.learn()
            self.learned_at = self.seen


def encode(contexts: Tensor, action: int) -> Tensor:
    """Context and action as the network's input, ``[n, radii, 2 + actions]``."""
    return torch.cat([contexts, torch.eye(ACTIONS)[action].expand(*contexts.shape[:2], -1)], dim=-1)


def by_guide(guide: str, radii: int, of: Learning) -> Periodic:
    """Thompson sampling by a guide over all weights, a network for each wheel."""
    sizes = [2 + ACTIONS, of.hidden, of.hidden, 1]
    network = StackedMLP(radii, sizes, fan_in(sizes))
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(NETWORK_NOISE), of.memory)
    seeds = torch.randint(2**31, (radii,)).tolist()
    agent = bandits.ThompsonAgent(
        model,
        guides.make(guide, model, init_loc={"weights": network.he(seeds)}),
        encode,
        ACTIONS,
        memory=of.memory,
        batch_size=of.batch_size,
        num_batches=of.num_batches,
        num_samples=1,
        lr=of.lr,
    )
    return Periodic(agent, of)


def fan_in(sizes: list[int]) -> Normal:
    """N(0, 2 / inputs) for kernels and N(0, 2) for biases, over all weights of a network."""
    scales = he_scales(itertools.pairwise(sizes), of_biases=math.sqrt(2))
    return Normal(torch.zeros(len(scales)), torch.tensor(scales))


class Bootstrap:
    """Networks that see each observation twice or not at all (Osband and Van Roy 2015).

    A network drawn at random decides.
    """

    def __init__(self, size: int, radii: int, of: Learning) -> None:
        self.members = [by_guide("delta", radii, of) for _ in range(size)]

    def act(self, contexts: Tensor) -> Tensor:
        """An action for each context."""
        return self.members[int(torch.randint(len(self.members), ()))].act(contexts)

    def observe(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Each member remembers by its own coin."""
        for member in self.members:
            if torch.rand(()) < 0.5:
                member.observe(contexts, actions, rewards)


NETWORK_NOISE = 0.02  # of rewards divided by the highest
AGENTS: dict[str, Callable[[int, Learning], Agent]] = {
    "last layer": LastLayers,
    "BBB": partial(by_guide, "softplus_normal"),
    "bootstrap of 3": partial(Bootstrap, 3),
}
