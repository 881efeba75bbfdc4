# SPDX-License-Identifier: Apache-2.0
"""Wheel bandit: exploration that pays only where few contexts are.

    python experiments/wheel_bandit.py [--agents "last layer"] [--seeds 5]

After Riquelme, Tucker and Snoek (2018), "Deep Bayesian bandits showdown", arXiv:1802.09127: 80,000
contexts, uniform in the unit disk, and five actions. One pays 1.2 everywhere, the others 1.0; but
beyond the radius delta one of these, by the quadrant, pays 50 (noise of standard deviation 0.01).
The larger delta, the rarer the contexts in which exploring pays. Scores are the cumulative regret
in per cent of what uniformly random actions are expected to have on the same contexts.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import tyro
from _helpers.bandit import StackedMLP, he_scales
from _helpers.run import Picture, Run, SeveralSeeds, check_names
from _helpers.tables import Table, over_seeds, shown
from pyro.distributions import Normal
from torch import Tensor, nn
from tqdm import tqdm

import pyro_bbb as bbb
from pyro_bbb import bandits, guides

ACTIONS = 5
SAFE = 4  # the action whose reward is the same everywhere
LOW, SURE, HIGH, NOISE = 1.0, 1.2, 50.0, 0.01  # mean rewards, and their standard deviation
TRIALS = 3  # times that each action is tried at first


class Wheel:
    """Contexts in the unit disk: beyond a radius one of four actions pays fifty times more.

    Wheels of several radii have the same contexts ``[steps, 2]``, uniform in the disk, and the same
    noise; ``means`` and ``rewards``, what is paid, are ``[steps, radii, actions]``.
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


def play(wheel: Wheel, agent: Any, name: str) -> Tensor:
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

    hidden: int = 100  # units of both hidden layers
    learn_every: int = 50  # observations between two trainings, at least...
    learn_growth: float = 0.02  # ...and as a fraction of those before
    num_batches: int = 100  # steps of a training
    batch_size: int = 512  # observations per step
    lr: float = 1e-3  # Adam's learning rate
    memory: int = 100_000  # latest observations that are learned from


class LastLayers:
    """Exact linear regressions on learned features, an agent for each wheel."""

    def __init__(self, radii: int, of: Learning) -> None:
        options = {name: value for name, value in vars(of).items() if name != "hidden"}
        self.agents = []
        for _ in range(radii):
            layers = nn.Linear(2, of.hidden), nn.ReLU(), nn.Linear(of.hidden, of.hidden), nn.ReLU()
            features = nn.Sequential(*layers)
            agent = bandits.LastLayerAgent(features, ACTIONS, of.hidden, **options)
            self.agents.append(agent)

    def act(self, contexts: Tensor) -> Tensor:
        """Actions of each wheel's agent."""
        pairs = zip(self.agents, contexts.unbind(1), strict=True)
        return torch.stack([agent.act(context) for agent, context in pairs], dim=1)

    def observe(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Each agent learns from its wheel."""
        observed = (values.unbind(1) for values in (contexts, actions, rewards))
        for agent, *observation in zip(self.agents, *observed, strict=True):
            agent.observe(*observation)


class Periodic:
    """A `ThompsonAgent` that learns now and then, as `bandits.LastLayerAgent` does."""

    def __init__(self, agent: bandits.ThompsonAgent, of: Learning) -> None:
        self.agent, self.of, self.seen, self.learned_at = agent, of, 0, 0

    def act(self, contexts: Tensor) -> Tensor:
        """Return an action for each context."""
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


def by_guide(name: str, radii: int, of: Learning) -> Periodic:
    """Thompson sampling by a guide over all weights, a network for each wheel."""
    sizes = [2 + ACTIONS, of.hidden, of.hidden, 1]
    # N(0, 2 / inputs) for kernels and N(0, 2) for biases
    scales = torch.tensor(he_scales(itertools.pairwise(sizes), of_biases=math.sqrt(2)))
    network = StackedMLP(radii, sizes, Normal(torch.zeros_like(scales), scales))
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(NETWORK_NOISE), of.memory)
    seeds = torch.randint(2**31, (radii,)).tolist()
    guide = guides.make(name, model, init_loc={"weights": network.he(seeds)})
    options = {name: getattr(of, name) for name in ("memory", "batch_size", "num_batches", "lr")}
    agent = bandits.ThompsonAgent(model, guide, encode, ACTIONS, num_samples=1, **options)
    return Periodic(agent, of)


class Bootstrap:
    """Networks that see each observation twice or not at all (Osband and Van Roy 2015).

    A network drawn at random decides.
    """

    def __init__(self, size: int, radii: int, of: Learning) -> None:
        self.members = [by_guide("delta", radii, of) for _ in range(size)]

    def act(self, contexts: Tensor) -> Tensor:
        """Return an action for each context."""
        return self.members[int(torch.randint(len(self.members), ()))].act(contexts)

    def observe(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Add an observation to the memory of each member with probability 1/2."""
        for member in self.members:
            if torch.rand(()) < 0.5:
                member.observe(contexts, actions, rewards)


NETWORK_NOISE = 0.02  # of rewards divided by the highest
AGENTS: dict[str, Callable[[int, Learning], Any]] = {
    "last layer": LastLayers,
    "BBB": partial(by_guide, "softplus_normal"),
    "bootstrap of 3": partial(Bootstrap, 3),
}


PUBLISHED = {  # means, by delta
    "published: NeuralLinear": (0.95, 1.60, 4.65, 9.56, 49.63),
    "published: Bayes by Backprop": (1.37, 3.32, 34.42, 59.04, 97.38),
}
DELTAS = (0.5, 0.7, 0.9, 0.95, 0.99)
CURVE = 100  # points of a curve


@dataclass(frozen=True)
class Config(SeveralSeeds):
    """Settings of one run."""

    agents: tuple[str, ...] = tuple(AGENTS)
    """Agents to compare."""
    seeds: int = 5
    """Runs with consecutive seeds; tables show their means and standard deviations."""
    steps: int = 80_000
    """Contexts."""


def run_one(config: Config, learning: Learning, agent: str, seed: int) -> dict[str, Any]:
    """Regret of one agent by radius, in per cent of the uniform agent's."""
    wheel = Wheel(DELTAS, config.steps, seed)
    torch.manual_seed(seed)
    actions = play(wheel, AGENTS[agent](len(DELTAS), learning), f"{agent}, seed {seed}")
    uniform = wheel.uniform_regret.double().sum(0)
    regret = 100 * wheel.regret(actions).double().cumsum(0) / uniform
    at = torch.linspace(config.steps / CURVE, config.steps, CURVE).long() - 1
    return {
        str(delta): {"regret": curve[-1].item(), "curve": curve[at].tolist()}
        for delta, curve in zip(DELTAS, regret.unbind(1), strict=True)
    }


def compare(config: Config, run: Run) -> dict[str, dict[str, Any]]:
    """All agents at all radii: figures of the seeds, their means and deviations."""
    learning, found = Learning(num_batches=2, batch_size=16) if config.smoke else Learning(), {}
    for agent in config.agents:
        records = run.repeat(partial(run_one, config, learning, agent), agent)["seeds"].values()
        by_delta = {str(delta): [record[str(delta)] for record in records] for delta in DELTAS}
        found[agent] = {d: {"seeds": runs} | over_seeds(runs) for d, runs in by_delta.items()}
    return found


def table(found: dict[str, dict[str, Any]]) -> Table:
    """Regret by radius, with published ones."""
    rows = [
        (agent, *(shown(by_delta[str(d)], "regret", factor=1) for d in DELTAS))
        for agent, by_delta in found.items()
    ]
    rows += [(name, *map("{:.2f}".format, values)) for name, values in PUBLISHED.items()]
    return Table(("regret (% of uniform's)", *(f"delta {d}" for d in DELTAS)), rows)


def draw_curves(run: Run, config: Config, found: dict[str, dict[str, Any]]) -> Picture:
    """Plot cumulative regret against steps, a panel for each radius."""
    steps = np.linspace(config.steps / CURVE, config.steps, CURVE) / 1000
    panels: dict[str, Any] = {f"delta {delta}": {} for delta in DELTAS}
    for agent, by_delta in found.items():
        for lines, delta in zip(panels.values(), DELTAS, strict=True):
            curves = np.array([record["curve"] for record in by_delta[str(delta)]["seeds"]])
            lines[agent] = steps, curves.mean(0), curves.min(0), curves.max(0)
    caption = "Means over seeds; bands are from the best to the worst."
    axes = {"xlabel": "thousands of steps", "ylabel": "regret (% of uniform's)"}
    return run.curves("curves", caption, panels, **axes)


def main(config: Config) -> dict[str, Any]:
    """Plays every bandit by every agent, prints the table and writes the results."""
    check_names("--agents", config.agents, AGENTS)
    if config.smoke:
        config = replace(config, steps=200, seeds=1)
    run = Run(config, free=("agents",))
    summaries = compare(config, run)
    tables, pictures = [table(summaries)], [draw_curves(run, config, summaries)]
    return run.report(__doc__, {"agents": summaries}, tables, pictures)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
