# SPDX-License-Identifier: Apache-2.0
"""Contextual bandit on UCI's mushrooms: Thompson sampling against epsilon-greedy agents.

    python experiments/mushroom_bandit.py [--preset published]

The bandit of Blundell et al. (2015, arXiv:1505.05424, section 5.3 and figure 6) on the mushrooms of
UCI. Each interaction offers a mushroom, 117 one-hot features, to eat or to pass. Eating an edible
one rewards by 5, a poisonous one by -35 or 5 with even odds, passing by 0. Regret is what an oracle
that eats the edible ones is expected to get, less what the agent's action is.
"""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from _helpers.bandit import StackedMLP
from _helpers.run import DataSettings, Picture, Run, SeveralSeeds, check_names
from _helpers.tables import Table, over, over_seeds, table
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from tqdm.auto import tqdm

import pyro_bbb as bbb
from pyro_bbb import bandits, priors

PASS, EAT = 0, 1
EDIBLE, POISONOUS = 5.0, -35.0  # rewards of eating; a poisonous one does good half of the time
BBB = "Bayes by Backprop"
GREEDY = {"greedy": 0.0, "1 % greedy": 0.01, "5 % greedy": 0.05}
AGENTS = dict(zip(("bbb", "greedy", "greedy1", "greedy5"), (BBB, *GREEDY), strict=True))
MARKS = (1_000, 5_000, 20_000, 50_000)
Found: TypeAlias = dict[str, tuple[Tensor, Tensor]]
"""Regret and realised regret of every interaction, each ``[interactions, seeds]``, by agent."""


def encode(contexts: Tensor, action: int) -> Tensor:
    """Mushroom and action as the network's input, ``[..., 117 + 2]``."""
    return F.pad(F.pad(contexts, (0, 1), value=action == PASS), (0, 1), value=action == EAT)


class Mushrooms:
    """Mushroom bandit: batches of contexts for several agents, and their regret.

    Agents of one seed meet the same mushrooms ``x`` ``[n, features]`` with the same luck, a
    ``basket`` at a time, and observe rewards divided by ``unit``. ``regret`` is the oracle's
    expected reward less the action's, ``[interactions, agents]``, ``realised`` less what was got.
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
        self.order, self.luck = torch.stack(order, 1), torch.stack(luck, 1)
        self.x, self.poisonous, self.basket, self.unit = x, poisonous, basket, unit
        self.next = torch.arange(basket)
        self.regret = torch.zeros(interactions, len(seeds))
        self.realised = self.regret.clone()

    def offer(self, agent: bandits.ThompsonAgent) -> None:
        """Run a basket for every agent, which eats or passes each and learns from the reward."""
        which = self.order[self.next]  # [basket, agents]
        contexts, poisonous = self.x[which], self.poisonous[which]
        actions = agent.act(contexts).view_as(poisonous)  # also of an agent alone
        harmed = poisonous & self.luck[self.next]
        rewards = torch.where(actions == EAT, torch.where(harmed, POISONOUS, EDIBLE), 0.0)
        agent.remember(contexts, actions, rewards / self.unit)
        best = torch.where(poisonous, 0.0, EDIBLE)
        eaten = torch.where(poisonous, (EDIBLE + POISONOUS) / 2, EDIBLE)
        self.regret[self.next] = best - torch.where(actions == EAT, eaten, 0.0)
        self.realised[self.next] = best - rewards
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


@dataclass(frozen=True)
class Recipe:
    """Hyper-parameters of one preset."""

    prior: str  # name of the prior in `pyro_bbb.priors`
    options: dict[str, float]  # its arguments
    init_rho: float  # initial rho; standard deviations are softplus(rho)
    noise: float  # standard deviation of the likelihood, in units of reward
    unit: float  # rewards are divided by it for the network
    weigh_by: str  # number of observations that weights the KL, see `bandits.ThompsonAgent`
    lr: float  # Adam's learning rate of Bayes by Backprop
    greedy_lr: float  # Adam's learning rate of the plain networks
    interactions: int = 50_000  # mushrooms offered
    basket: int = 1  # mushrooms offered at a time, between two times of learning
    num_batches: int = 64  # steps each time
    batch_size: int = 64  # observations per step
    memory: int = 4096  # latest observations that are learned from
    hidden: int = 100  # units of each of the two hidden layers
    num_samples: int = 2  # networks averaged by Thompson sampling


PUBLISHED = Recipe(
    prior="scale_mixture",
    options={"pi": 0.5, "sigma1": 1.0, "sigma2": 0.0025},
    init_rho=-3.0,
    noise=3.0,
    unit=10.0,
    weigh_by="memory",
    lr=1e-4,
    greedy_lr=1e-3,
)
RECIPES = {
    "published": PUBLISHED,
    "ours": replace(PUBLISHED, interactions=8_000, basket=20, memory=8_192, lr=1e-3),
}


@dataclass(frozen=True)
class Config(SeveralSeeds, DataSettings):
    """Settings of one run."""

    preset: Literal["published", "ours"] = "ours"
    """Name of the recipe."""
    seeds: int = 5
    """Number of consecutive seeds, trained as one batch."""
    agents: tuple[str, ...] = tuple(AGENTS)
    """Agents: bbb; and greedy, greedy1, greedy5, with 0, 1 and 5 % random actions."""
    compile: bool = True
    """Compile the steps, which takes a C++ compiler; without, they are Pyro's, and slower."""


def mushrooms_of(config: Config) -> tuple[Tensor, Tensor]:
    """Features and which are poisonous; in a smoke test made up, poisonous by their first one."""
    if not config.smoke:
        x, poisonous = bbb.data.load_mushrooms(root=config.data_root)
        return x, poisonous.bool()
    x = torch.rand(200, 117, generator=torch.Generator().manual_seed(0)).round()
    return x, x[:, 0] > 0


def make_agent(
    config: Config, recipe: Recipe, names: tuple[str, ...], seeds: list[int]
) -> bandits.ThompsonAgent:
    """Agents with a network for each seed: with a posterior, or with a point and epsilon."""
    bayesian = names == (BBB,)
    prior = priors.make(recipe.prior, **recipe.options) if bayesian else priors.make("normal")
    network = StackedMLP(len(seeds), [119, recipe.hidden, recipe.hidden, 1], prior)
    likelihood = bbb.likelihoods.Gaussian(recipe.noise / recipe.unit)
    model = bbb.BayesianModel(network, likelihood, num_data=recipe.memory)
    start = {"init_loc": {"weights": network.he(seeds)}}
    options = {key: getattr(recipe, key) for key in ("memory", "batch_size", "num_batches")}
    if bayesian:
        guide: Any = bbb.AutoSoftplusNormal(model, **start, init_rho=recipe.init_rho)
        options |= {key: getattr(recipe, key) for key in ("lr", "num_samples", "weigh_by")}
    else:
        guide = bbb.guides.make("delta", model, **start)
        epsilon = torch.tensor([GREEDY[name] for name in names for _ in config.all_seeds])
        options |= {"lr": recipe.greedy_lr, "num_samples": 1, "temperature": 0.0}
        options["epsilon"] = epsilon
    make: Any = bandits.ThompsonAgent
    if config.compile and not config.smoke:  # the same random numbers as without
        make = partial(
            RecordedAgent, compiler=partial(torch.compile, options={"fallback_random": True})
        )
    return make(model, guide, encode, 2, **options)


def play(config: Config, recipe: Recipe, names: tuple[str, ...], path: Path) -> Found:
    """Play all interactions and learn after each basket; the regret is kept in a file."""
    if not path.exists():
        seeds = list(config.all_seeds) * len(names)
        agent = make_agent(config, recipe, names, seeds)
        options = {"basket": recipe.basket, "unit": recipe.unit}
        mushrooms = Mushrooms(*mushrooms_of(config), seeds, recipe.interactions, **options)
        torch.manual_seed(config.seed)
        for _ in tqdm(range(recipe.interactions // recipe.basket), desc=names[0]):
            mushrooms.offer(agent)
            agent.learn()
        path.parent.mkdir(parents=True, exist_ok=True)
        regrets = torch.stack([mushrooms.regret, mushrooms.realised])
        np.save(path, regrets.to(torch.int8).numpy())
    blocks = torch.from_numpy(np.load(path, allow_pickle=False)).double().chunk(len(names), -1)
    return {name: tuple(block) for name, block in zip(names, blocks, strict=True)}


def score(regret: Tensor, realised: Tensor) -> dict[str, float]:
    """One agent's figures, from its regret in each interaction."""
    total, last = regret.double().cumsum(0), regret[-max(1, len(regret) // 10) :]
    at = {f"regret at {n:,}": float(total[n - 1]) for n in MARKS if n <= len(total)}
    return at | {
        "regret": float(total[-1]),
        "realised regret": float(realised.double().sum()),
        "regret per interaction at the end": float(last.double().mean()),
        "poisonous eaten": int((regret == 15).sum()),
        "edible passed": int((regret == 5).sum()),
    }


def summarise(found: Found, seeds: range) -> dict[str, Any]:
    """Figures by seed, and over the seeds their mean, sd, median, least and largest."""
    records = {
        str(seed): {
            name: score(regret[:, column], realised[:, column])
            for name, (regret, realised) in found.items()
        }
        for column, seed in enumerate(seeds)
    }
    functions = {"median": statistics.median, "min": min, "max": max}
    summary = {name: over(function, list(records.values())) for name, function in functions.items()}
    return {"seeds": records} | over_seeds(list(records.values())) | summary


def regret_table(summary: dict[str, Any]) -> Table:
    """One row per agent: cumulative regret on the way, and what became of the mushrooms."""
    first = next(iter(summary["median"].values()))
    columns: list[Any] = [(mark, mark, 1, 0) for mark in first if mark.startswith("regret at")]
    columns += [
        ("at the end", "regret", 1, 0),
        ("least", lambda agent: f"{agent['min']['regret']:,.0f}"),
        ("most", lambda agent: f"{agent['max']['regret']:,.0f}"),
        ("per interaction in the last tenth", "regret per interaction at the end", 1, 3),
        ("poisonous eaten", "poisonous eaten", 1, 0),
        ("edible passed", "edible passed", 1, 0),
    ]
    agents = {
        name: {"mean": median, **{end: summary[end][name] for end in ("min", "max")}}
        for name, median in summary["median"].items()
    }
    return table("agent, medians", agents, columns)


def draw_regret(run: Run, found: Found) -> Picture:
    """Cumulative regret, as figure 6 of the paper has it."""
    lines = {}
    for name, (regret, _) in found.items():
        total = regret.double().cumsum(0).clamp(min=1)  # a logarithm needs something to show
        at = np.unique(np.geomspace(10, len(total), 400).astype(int)) - 1
        middle, low, high = total.median(1).values, total.min(1).values, total.max(1).values
        lines[name] = at + 1, middle[at], low[at], high[at]
    caption = "Median and range over the seeds; regret is of expected rewards."
    axes = {"xlabel": "interactions", "ylabel": "cumulative regret"}
    return run.curves("regret", caption, {"": lines}, xscale="log", yscale="log", **axes)


def main(config: Config) -> dict[str, Any]:
    """Offer mushrooms to all agents, print the table, write the results."""
    check_names("--agents", config.agents or ("none",), AGENTS)
    run, recipe = Run(config, free=("agents",)), RECIPES[config.preset]
    if config.smoke:
        small = {"interactions": 40, "basket": 10, "num_batches": 2, "memory": 32}
        recipe = replace(recipe, **small, batch_size=16)
    regrets: Found = {}
    names = [AGENTS[agent] for agent in config.agents]
    for group in ((BBB,), tuple(GREEDY)):
        if group := tuple(name for name in group if name in names):
            path = run.cells / f"{config.all_seeds}{group}.npy"
            regrets |= play(config, recipe, group, path)
    summary = summarise(regrets, config.all_seeds)
    text = "An oracle has no regret; eating none costs 2.6 each time."
    metrics = {"recipe": asdict(recipe), "interactions": recipe.interactions, **summary}
    tables, pictures = [regret_table(summary)], [draw_regret(run, regrets)]
    return run.report(__doc__, metrics, tables, pictures, remark=text)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
