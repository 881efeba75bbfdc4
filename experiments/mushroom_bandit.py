# SPDX-License-Identifier: Apache-2.0
"""Contextual bandit on UCI's mushrooms: Thompson sampling against epsilon-greedy agents.

    python experiments/mushroom_bandit.py [--preset published] [--device cuda]

The bandit of Blundell et al. (2015, arXiv:1505.05424, section 5.3 and figure 6) on the mushrooms of
UCI. Each interaction offers a mushroom, 117 one-hot features, to eat or to pass. Eating an edible
one rewards by 5, a poisonous one by -35 or 5 with even odds, passing by 0. Regret is what an oracle
that eats the edible ones is expected to get, less what the agent's action is.

``docs/development/experiments.md`` has the other settings, and those tried.
"""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from _helpers import bandit as results
from _helpers.bandit import (
    AGENTS,
    BBB,
    GREEDY,
    Found,
    Mushrooms,
    Outcome,
    RecordedAgent,
    Rounds,
    StackedMLP,
    encode,
)
from _helpers.run import DataSettings, Run
from torch import Tensor
from tqdm.auto import tqdm

import pyro_bbb as bbb
from pyro_bbb import bandits, priors

REPORTED = 500  # interactions between two looks at the device


@dataclass(frozen=True)
class Recipe:
    """Hyper-parameters of one preset."""

    prior: str
    """Name of the prior in `pyro_bbb.priors`."""
    options: dict[str, float]
    """Its arguments."""
    init_rho: float
    """Initial rho; standard deviations are softplus(rho)."""
    noise: float
    """Standard deviation of the likelihood, in units of reward."""
    unit: float
    """Rewards are divided by it for the network."""
    weigh_by: str
    """Number of observations that weights the KL, see `bandits.ThompsonAgent`."""
    lr: float
    """Adam's learning rate of Bayes by Backprop."""
    greedy_lr: float
    """Adam's learning rate of the plain networks."""
    interactions: int = 50_000
    """Mushrooms offered."""
    basket: int = 1
    """Mushrooms offered at a time, between two times of learning."""
    num_batches: int = 64
    """Steps each time."""
    batch_size: int = 64
    """Observations per step."""
    memory: int = 4096
    """Latest observations that are learned from."""
    hidden: int = 100
    """Units of each of the two hidden layers."""
    num_samples: int = 2
    """Networks averaged by Thompson sampling."""


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
class Config(DataSettings):
    """Settings of one run."""

    preset: Literal["published", "ours"] = "ours"
    """Name of the recipe."""
    seeds: int = 5
    """Number of consecutive seeds, trained as one batch."""
    agents: tuple[Literal["bbb", "greedy", "greedy1", "greedy5"], ...] = (
        "bbb",
        "greedy",
        "greedy1",
        "greedy5",
    )
    """Agents: Bayes by Backprop, and epsilon-greedy ones with 0, 1 and 5 % random actions."""
    interactions: int | None = None
    """Mushrooms offered; by default as the recipe says."""
    device: str = "cpu"
    """Device, cpu or cuda."""
    compile: bool = True
    """Compile the steps, which takes a C++ compiler; without, they are Pyro's, and slower."""
    pieces: tuple[Path, ...] = ()
    """Play nothing, but put earlier runs' results together, of some agents and seeds each."""
    output: Path = Path("results/mushroom_bandit")
    """Folder for results."""


@dataclass
class Kind:
    """Agents that learn in one way as a batch, and their mushrooms."""

    names: tuple[str, ...]
    agent: bandits.ThompsonAgent
    mushrooms: Mushrooms


def mushrooms_of(config: Config) -> tuple[Tensor, Tensor]:
    """Features and which are poisonous; in a smoke test made up, poisonous by their first one."""
    if not config.smoke:
        x, poisonous = bbb.data.load_mushrooms(root=config.data_root)
        return x, poisonous.bool()
    x = torch.rand(200, 117, generator=torch.Generator().manual_seed(0)).round()
    return x, x[:, 0] > 0


def make_kinds(config: Config, recipe: Recipe) -> list[Kind]:
    """The Bayesian agents, and the greedy ones."""
    data = tuple(part.to(config.device) for part in mushrooms_of(config))
    seeds = list(range(config.seed, config.seed + config.seeds))
    chosen = [AGENTS[agent] for agent in config.agents]
    greedy = tuple(name for name in GREEDY if name in chosen)
    epsilon = torch.tensor([GREEDY[name] for name in greedy for _ in seeds])
    kinds = []
    for names, options in (
        (
            (BBB,) if BBB in chosen else (),
            {"lr": recipe.lr, "num_samples": recipe.num_samples, "weigh_by": recipe.weigh_by},
        ),
        (
            greedy,
            {"lr": recipe.greedy_lr, "num_samples": 1, "temperature": 0.0, "epsilon": epsilon},
        ),
    ):
        if not names:
            continue
        own = seeds * len(names)
        model, guide = make_model(recipe, own, bayesian=BBB in names, device=config.device)
        agent = make_agent(config, recipe, model, guide, options)
        options = {"basket": recipe.basket, "unit": recipe.unit}
        kinds.append(Kind(names, agent, Mushrooms(*data, own, recipe.interactions, **options)))
    return kinds


def make_model(
    recipe: Recipe, seeds: list[int], *, bayesian: bool, device: str
) -> tuple[bbb.BayesianModel, Any]:
    """One network and posterior per seed; plain networks have point estimates."""
    prior = priors.make(recipe.prior, **recipe.options) if bayesian else priors.make("normal")
    network = StackedMLP(len(seeds), [119, recipe.hidden, recipe.hidden, 1], prior)
    likelihood = bbb.likelihoods.Gaussian(recipe.noise / recipe.unit)
    model = bbb.BayesianModel(network, likelihood, num_data=recipe.memory)
    start = {"weights": network.he(seeds)}
    if bayesian:
        guide = bbb.AutoSoftplusNormal(model, init_loc=start, init_rho=recipe.init_rho)
    else:
        guide = bbb.guides.make("delta", model, init_loc=start)
    return model.to(device), guide.to(device)


def make_agent(
    config: Config, recipe: Recipe, model: Any, guide: Any, options: dict[str, Any]
) -> bandits.ThompsonAgent:
    """Make an agent."""
    options = options | {
        name: getattr(recipe, name) for name in ("memory", "batch_size", "num_batches")
    }
    if not config.compile or config.smoke:
        return bandits.ThompsonAgent(model, guide, encode, 2, **options)
    same_numbers = {"fallback_random": True}  # as without compiling
    return RecordedAgent(
        model,
        guide,
        encode,
        2,
        compiler=lambda record: torch.compile(record, options=same_numbers),
        **options,
    )


def play(config: Config, recipe: Recipe) -> Outcome:
    """Play all interactions; intermediate results are written every minute."""
    torch.manual_seed(config.seed)
    kinds = make_kinds(config, recipe)
    rounds, basket = Rounds([(k.agent, k.mushrooms) for k in kinds], config.device), recipe.basket
    written = time.monotonic()
    with tqdm(total=recipe.interactions, unit="mushroom", dynamic_ncols=True) as bar:
        while bar.n < recipe.interactions:
            rounds.play(min(bar.n + REPORTED, recipe.interactions) // basket)
            bar.update(rounds.done * basket - bar.n)
            regret = {k.names[0]: f"{k.mushrooms.regret.sum() / config.seeds:.0f}" for k in kinds}
            bar.set_postfix(regret, refresh=False)
            now = time.monotonic()
            if now - written > 60:
                results.save(config.output, tables(kinds, bar.n))
                written = now
    seeds = list(range(config.seed, config.seed + config.seeds))
    return Outcome(asdict(recipe), config.device, seeds, tables(kinds, bar.n))


def tables(kinds: list[Kind], done: int) -> Found:
    """Collect the regret so far by agent."""
    found: Found = {}
    for kind in kinds:
        both = (kind.mushrooms.regret, kind.mushrooms.realised)
        parts = (table[:done].cpu().chunk(len(kind.names), 1) for table in both)
        found |= dict(zip(kind.names, zip(*parts, strict=True), strict=True))
    return found


def recipe_of(config: Config) -> Recipe:
    """The preset's, with what the settings change."""
    recipe = RECIPES[config.preset]
    if config.smoke:
        recipe = replace(
            recipe, interactions=40, basket=10, num_batches=2, memory=32, batch_size=16
        )
    if config.interactions is not None:
        recipe = replace(recipe, interactions=config.interactions)
    return recipe


def main(config: Config) -> dict[str, Any]:
    """Offer mushrooms to all agents, print the table, write the results."""
    if not config.agents:
        raise ValueError(f"agents must be one or more of {list(AGENTS)}, got none")
    run = Run(config)
    outcome = results.joined(config.pieces) if config.pieces else play(config, recipe_of(config))
    run.started -= outcome.seconds
    results.save(config.output, outcome.found)
    summary, done, found = results.summarise(outcome), outcome.interactions, outcome.found
    figures = {"recipe": outcome.recipe, "device": outcome.device, "interactions": done, **summary}
    record = run.finish(figures)
    table = results.regret_table(summary)
    medians = {name: figures["regret"] for name, figures in summary["median"].items()}
    finding = f"After {done:,} mushrooms {min(medians, key=medians.get)} has the least regret"
    each = ", ".join(f"{name} {regret:,.0f}" for name, regret in medians.items())
    text = f"{finding} (medians: {each}). An oracle has none; eating none costs 2.6 each time."
    pictures = [results.draw_regret(run, found)]
    run.report("Mushroom bandit", text, record, [table], pictures)
    return record


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
