"""Which mushrooms to eat, learned by eating them: Thompson sampling against epsilon-greedy agents.

    python experiments/mushroom_bandit.py [--preset published] [--device cuda]

The bandit of Blundell et al. (2015, arXiv:1505.05424, section 5.3 and figure 6) on the mushrooms of
UCI. Each interaction offers a mushroom, 117 one-hot features, to eat or to pass. Eating an edible
one rewards by 5, a poisonous one by -35 or 5 with even odds, passing by 0. Regret is what an oracle
that eats the edible ones is expected to get, less what the agent's action is.

An agent is a ReLU network with two hidden layers of 100 from mushroom and action to reward, trained
on its latest 4,096 observations. Thompson sampling averages two networks drawn from the posterior
and takes the better action; the greedy agents have plain networks, and act at random in 0, 1 or 5 %
of the interactions.

- ``published``: 50,000 interactions, each followed by 64 steps on minibatches of 64, that is 3.2
  million steps per agent. On a GPU (``--device cuda``) one interaction is a CUDA graph. Prior,
  noise, initial scale and learning rates are not in the paper. Those of Bayes by Backprop were
  chosen on seeds 100 and 101, by the regret after 19,000 interactions, when the memory has turned
  over several times: what the agent only passes is forgotten, and the posterior returns to the
  prior there. With noise 10 and rate 1e-3, chosen earlier by the first 3,200, it then eats what it
  knew to be poisonous, and is behind the greedy agents.
- ``ours``: 8,000 mushrooms in baskets of 20, none of them forgotten, learning after each basket;
  minutes on one processor core. There Bayes by Backprop has the least regret. The smaller noise was
  chosen on seeds 100 and 101, by the regret after 12,000.

All seeds and agents of a kind learn side by side, each from its own mushrooms alone.
"""

import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
import torch
import tyro
from _bandit import Mushrooms, RecordedAgent, Rounds, SideBySide, encode
from _common import Picture, Run, Section, Table
from _outcome import Found, Outcome, joined, save
from _repeats import over
from torch import Tensor
from tqdm.auto import tqdm

import pyro_bbb as bbb
from pyro_bbb import bandits, plots, priors

BBB = "Bayes by Backprop"
GREEDY = {"greedy": 0.0, "1 % greedy": 0.01, "5 % greedy": 0.05}
AGENTS = dict(zip(("bbb", "greedy", "greedy1", "greedy5"), (BBB, *GREEDY), strict=True))
REPORTED = 500  # interactions between two looks at the device
MARKS = (1_000, 5_000, 20_000, 50_000)
LINES = dict(zip(AGENTS.values(), ("-", "--", "-.", ":"), strict=True))  # for grey print


@dataclass(frozen=True)
class Recipe:
    """Hyper-parameters of one preset."""

    prior: str
    """Name of the prior in `pyro_bbb.priors`."""
    options: dict[str, float]
    """Its arguments."""
    init_rho: float
    """Where the standard deviations softplus(rho) start."""
    noise: float
    """Standard deviation of the likelihood, in units of reward."""
    unit: float
    """Rewards are divided by it for the network."""
    weigh_by: str
    """Number of observations that the KL is shared among, see `bandits.ThompsonAgent`."""
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
    num_draws: int = 2
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
class Config:
    """Settings of one run."""

    preset: Literal["published", "ours"] = "ours"
    """Which recipe."""
    seed: int = 0
    """First seed of mushrooms, luck and initial values; draws depend on it too."""
    seeds: int = 5
    """How many consecutive seeds, side by side."""
    agents: tuple[Literal["bbb", "greedy", "greedy1", "greedy5"], ...] = (
        "bbb",
        "greedy",
        "greedy1",
        "greedy5",
    )
    """Who plays: Bayes by Backprop, and those that act at random in 0, 1 and 5 %."""
    interactions: int | None = None
    """Mushrooms offered; by default as the recipe says."""
    device: str = "cpu"
    """Where to learn: cpu or cuda."""
    compile: bool = True
    """Compile the steps, which takes a C++ compiler; without, they are Pyro's, and slower."""
    minutes: float | None = None
    """Stop after so many, with what there is."""
    pieces: tuple[Path, ...] = ()
    """Play nothing, but put earlier runs' results together, of some agents and seeds each."""
    data_root: Path | None = None
    """Folder that holds mushroom/agaricus-lepiota.data; by default $PYRO_BBB_DATA."""
    threads: int = 1
    """Processor threads."""
    output: Path = Path("results/mushroom_bandit")
    """Folder for results."""
    smoke: bool = False
    """A few interactions with made-up mushrooms, to see that it works."""


@dataclass
class Kind:
    """Agents that learn in one way, side by side, and their mushrooms."""

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
            {"lr": recipe.lr, "num_samples": recipe.num_draws, "weigh_by": recipe.weigh_by},
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
    """One network and posterior per seed; those of the plain networks are points."""
    prior = priors.make(recipe.prior, **recipe.options) if bayesian else priors.make("normal")
    network = SideBySide(len(seeds), [119, recipe.hidden, recipe.hidden, 1], prior)
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
    """What acts and learns."""
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
    """What the interactions came to; writes it on the way."""
    torch.manual_seed(config.seed)
    kinds = make_kinds(config, recipe)
    rounds, basket = Rounds([(k.agent, k.mushrooms) for k in kinds], config.device), recipe.basket
    began = written = time.monotonic()
    with tqdm(total=recipe.interactions, unit="mushroom", dynamic_ncols=True) as bar:
        while bar.n < recipe.interactions:
            rounds.play(min(bar.n + REPORTED, recipe.interactions) // basket)
            bar.update(rounds.done * basket - bar.n)
            regret = {k.names[0]: f"{k.mushrooms.regret.sum() / config.seeds:.0f}" for k in kinds}
            bar.set_postfix(regret, refresh=False)
            now = time.monotonic()
            if now - written > 60:
                save(config.output, tables(kinds, bar.n))
                written = now
            if config.minutes is not None and now - began > 60 * config.minutes:
                break
    seeds = list(range(config.seed, config.seed + config.seeds))
    return Outcome(asdict(recipe), config.device, seeds, tables(kinds, bar.n))


def tables(kinds: list[Kind], done: int) -> Found:
    """What the agents were told so far."""
    found: Found = {}
    for kind in kinds:
        both = (kind.mushrooms.regret, kind.mushrooms.realised)
        parts = (table[:done].cpu().chunk(len(kind.names), 1) for table in both)
        found |= dict(zip(kind.names, zip(*parts, strict=True), strict=True))
    return found


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


def summarise(outcome: Outcome) -> dict[str, Any]:
    """Figures by seed, and over the seeds their mean, sd, median, least and largest."""
    records = {
        str(seed): {
            name: score(regret[:, column], realised[:, column])
            for name, (regret, realised) in outcome.found.items()
        }
        for column, seed in enumerate(outcome.seeds)
    }
    kinds = {"mean": statistics.fmean, "median": statistics.median, "min": min, "max": max}
    if len(records) > 1:
        kinds["sd"] = statistics.stdev
    over_seeds = {name: over(kind, list(records.values())) for name, kind in kinds.items()}
    return {"seeds": records} | over_seeds


def regret_table(summary: dict[str, Any]) -> Table:
    """One row per agent: cumulative regret on the way, and what became of the mushrooms."""
    first = next(iter(summary["median"].values()))
    marks = [name for name in first if name.startswith("regret at")]
    rows = []
    for name, median in summary["median"].items():
        least, most = (summary[kind][name]["regret"] for kind in ("min", "max"))
        rows.append(
            (
                name,
                *(f"{median[mark]:,.0f}" for mark in marks),
                f"{median['regret']:,.0f} ({least:,.0f} to {most:,.0f})",
                f"{median['regret per interaction at the end']:.3f}",
                f"{median['poisonous eaten']:,.0f}",
                f"{median['edible passed']:,.0f}",
            )
        )
    end = ("at the end (range)", "per interaction in the last tenth")
    return Table(("agent", *marks, *end, "poisonous eaten", "edible passed"), rows)


def draw_regret(run: Run, found: Found, finding: str) -> Picture:
    """Cumulative regret, as figure 6 of the paper has it."""
    with plots.style():
        figure, ax = plt.subplots(figsize=(6.4, 4.2))
        for name, (regret, _) in found.items():
            total = regret.double().cumsum(0).clamp(min=1)  # a logarithm needs something to show
            at = np.unique(np.geomspace(10, len(total), 400).astype(int)) - 1
            (median,) = ax.plot(at + 1, total.median(1).values[at], LINES[name], label=name)
            low, high = total.min(1).values[at], total.max(1).values[at]
            ax.fill_between(at + 1, low, high, color=median.get_color(), alpha=0.15, lw=0)
        ax.set(xlabel="interactions", ylabel="cumulative regret", xscale="log", yscale="log")
        ax.set_title(finding)
        ax.legend(loc="lower right")
    caption = "Median and range over the seeds; regret is that of expected rewards."
    return run.picture(figure, "regret", caption)


def draw_mistakes(run: Run, found: Found) -> Picture:
    """What goes wrong in the course of time: poisonous eaten, edible passed."""
    count = len(next(iter(found.values()))[0])
    block = max(1, count // 50)
    with plots.style():
        figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.6), sharey=True)
        kinds = {"poisonous and eaten": 15, "edible and passed": 5}
        for ax, (what, cost) in zip(axes, kinds.items(), strict=True):
            for name, (regret, _) in found.items():
                share = (regret[: count // block * block] == cost).double()
                share = share.unflatten(0, (-1, block)).mean(1)  # [blocks, seeds]
                at = block * (torch.arange(len(share)) + 0.5)
                ax.plot(at, 100 * share.mean(1), LINES[name], label=name)
            ax.set(xlabel="interactions", title=what.capitalize())
            ax.set_yscale("symlog", linthresh=0.1)
        axes[0].set_ylabel("share of the mushrooms (%)")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    caption = f"Means over the seeds and over {block:,} interactions; linear below 0.1 %."
    return run.picture(figure, "mistakes", caption)


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
    torch.set_num_threads(config.threads)
    run = Run(config, config.output)
    outcome = joined(config.pieces) if config.pieces else play(config, recipe_of(config))
    run.started -= outcome.seconds
    save(config.output, outcome.found)
    summary, done, found = summarise(outcome), outcome.interactions, outcome.found
    figures = {"recipe": outcome.recipe, "device": outcome.device, "interactions": done, **summary}
    record = run.finish(figures)
    table = regret_table(summary)
    print(f"\n{table}")
    medians = {name: figures["regret"] for name, figures in summary["median"].items()}
    finding = f"After {done:,} mushrooms {min(medians, key=medians.get)} has the least regret"
    each = ", ".join(f"{name} {regret:,.0f}" for name, regret in medians.items())
    text = f"{finding} (medians: {each}). An oracle has none; eating none costs 2.6 each time."
    pictures = [draw_regret(run, found, finding), draw_mistakes(run, found)]
    source = "Runs put together" if config.pieces else f"Preset {config.preset}"
    run.report(
        "Which mushrooms to eat",
        f"{source}, {len(outcome.seeds)} seeds.",
        [Section("Regret", text, [table], pictures)],
        record,
    )
    return record


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
