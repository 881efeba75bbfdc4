"""The wheel bandit of Riquelme et al. (2018), and agents that play it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import pyro_bbb as bbb
from pyro_bbb import bandits, guides

ACTIONS = 5
SAFE = 4  # the action whose reward is the same everywhere
LOW, SURE, HIGH, NOISE = 1.0, 1.2, 50.0, 0.01  # mean rewards, and their standard deviation
TRIALS = 3  # times that each action is tried at first


class Wheel:
    """Contexts in the unit disk: beyond the radius delta one of four actions pays fifty times more.

    Args:
        delta: the radius.
        steps: how many contexts.
        seed: of contexts and noise.

    Attributes:
        contexts: ``[steps, 2]``, uniform in the disk.
        means: mean rewards ``[steps, actions]``.
        rewards: what is paid, ``[steps, actions]``.
    """

    def __init__(self, delta: float, steps: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        radius = torch.rand(steps, generator=generator).sqrt()
        angle = 2 * torch.pi * torch.rand(steps, generator=generator)
        self.contexts = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1)
        self.means = torch.full((steps, ACTIONS), LOW)
        self.means[:, SAFE] = SURE
        right, upper = (self.contexts > 0).unbind(-1)
        quadrant = 2 * (~right).long() + (~upper).long()
        beyond = radius > delta
        self.means[beyond, quadrant[beyond]] = HIGH
        noise = torch.randn(steps, ACTIONS, generator=generator)
        self.rewards = self.means + NOISE * noise

    @property
    def uniform_regret(self) -> Tensor:
        """Regret that uniformly random actions are expected to have, ``[steps]``."""
        return self.means.amax(-1) - self.means.mean(-1)

    def regret(self, actions: Tensor) -> Tensor:
        """Mean reward of the best action less that of the one taken, ``[steps]``."""
        return self.means.amax(-1) - self.means.gather(-1, actions[:, None])[:, 0]


class Agent(Protocol):
    """Player of a bandit."""

    def act(self, contexts: Tensor) -> Tensor:
        """An action for each context."""

    def observe(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Learn from the rewards."""


def play(wheel: Wheel, agent: Agent, name: str) -> Tensor:
    """Actions ``[steps]`` of an agent that meets one context after the other."""
    actions = torch.zeros(len(wheel.contexts), dtype=torch.long)
    for step in tqdm(range(len(actions)), desc=name, mininterval=5):
        here = slice(step, step + 1)
        if step < TRIALS * ACTIONS:
            actions[step] = step % ACTIONS
        else:
            actions[here] = agent.act(wheel.contexts[here])
        reward = wheel.rewards[here].gather(-1, actions[here, None])[:, 0]
        agent.observe(wheel.contexts[here], actions[here], reward)
    return actions


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Training of the networks of all agents."""

    hidden: int = 100
    """Units of both hidden layers."""
    learn_every: int = 50
    """Observations between two trainings."""
    num_batches: int = 100
    """Steps of a training."""
    batch_size: int = 512
    """Observations per step."""
    lr: float = 1e-3
    """Adam's learning rate."""
    memory: int = 100_000
    """Latest observations that are learned from."""


def hidden_layers(inputs: int, units: int) -> list[nn.Module]:
    """Two layers of ReLU units."""
    return [nn.Linear(inputs, units), nn.ReLU(), nn.Linear(units, units), nn.ReLU()]


def last_layer(of: Learning) -> Agent:
    """Exact linear regressions on learned features."""
    return bandits.LastLayerAgent(
        nn.Sequential(*hidden_layers(2, of.hidden)),
        ACTIONS,
        of.hidden,
        memory=of.memory,
        learn_every=of.learn_every,
        num_batches=of.num_batches,
        batch_size=of.batch_size,
        lr=of.lr,
    )


class Periodic:
    """A `ThompsonAgent` that learns after every so many observations."""

    def __init__(self, agent: bandits.ThompsonAgent, learn_every: int) -> None:
        self.agent, self.learn_every, self.seen = agent, learn_every, 0

    def act(self, contexts: Tensor) -> Tensor:
        """An action for each context."""
        return self.agent.act(contexts)

    def observe(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Remember, and learn now and then."""
        self.agent.remember(contexts, actions, rewards / HIGH)
        self.seen += len(contexts)
        if self.seen % self.learn_every == 0:
            self.agent.learn()


def encode(contexts: Tensor, action: int) -> Tensor:
    """Context and action as the network's input, ``[n, 2 + actions]``."""
    one_hot = F.one_hot(torch.full((len(contexts),), action), ACTIONS)
    return torch.cat([contexts, one_hot.to(contexts)], dim=-1)


def by_guide(guide: str, of: Learning, **options: Any) -> Periodic:
    """Thompson sampling by a guide over all weights, or greedy by a point."""
    network = nn.Sequential(*hidden_layers(2 + ACTIONS, of.hidden), nn.Linear(of.hidden, 1))
    network = bbb.bayesianize(network, bbb.priors.FanInNormal())
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(NETWORK_NOISE), of.memory)
    agent = bandits.ThompsonAgent(
        model,
        guides.make(guide, model),
        encode,
        ACTIONS,
        memory=of.memory,
        batch_size=of.batch_size,
        num_batches=of.num_batches,
        num_samples=1,
        lr=of.lr,
        **options,
    )
    return Periodic(agent, of.learn_every)


class Bootstrap:
    """Networks that see each observation twice or not at all (Osband and Van Roy 2015).

    A network drawn at random decides.
    """

    def __init__(self, size: int, of: Learning) -> None:
        self.members = [by_guide("delta", of) for _ in range(size)]

    def act(self, contexts: Tensor) -> Tensor:
        """An action for each context."""
        return self.members[int(torch.randint(len(self.members), ()))].act(contexts)

    def observe(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Each member remembers by its own coin."""
        for member in self.members:
            if torch.rand(()) < 0.5:
                member.observe(contexts, actions, rewards)


NETWORK_NOISE = 0.02  # of rewards divided by the highest
AGENTS: dict[str, Callable[[Learning], Agent]] = {
    "last layer": last_layer,
    "BBB": lambda of: by_guide("softplus_normal", of),
    "bootstrap of 5": lambda of: Bootstrap(5, of),
    "greedy": lambda of: by_guide("delta", of, epsilon=0.05),
}
