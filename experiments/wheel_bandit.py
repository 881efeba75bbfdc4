# SPDX-License-Identifier: Apache-2.0
"""Wheel bandit: exploration that pays only where few contexts are.

    python experiments/wheel_bandit.py [--agents "last layer"] [--seeds 5]

After Riquelme, Tucker and Snoek (2018), "Deep Bayesian bandits showdown", arXiv:1802.09127: 80,000
contexts, uniform in the unit disk, and five actions. One pays 1.2 everywhere, the others 1.0; but
beyond the radius delta one of these, by the quadrant, pays 50 (noise of standard deviation 0.01).
The larger delta, the rarer the contexts in which exploring pays. Scores are the cumulative regret
in per cent of what uniformly random actions are expected to have on the same contexts.

Agents: Thompson sampling by exact Bayesian linear regression on learned features
(`bandits.LastLayerAgent`; the paper's NeuralLinear), by Bayes by Backprop over all weights, and by
three networks each of which sees half of the observations twice. All are two layers of 100 units
and learn alike; the wheels of all radii have the same contexts and are played at once. Published
scores are those of Garnelo et al. (2018, arXiv:1807.01622, Table 1, 100 trials).

Networks learn after 50 observations or 2 % more, which was chosen with seed 100: the last-layer
agent's regret was 0.57, 0.77, 2.66, 4.29 and 47.9 % from the smallest delta to the largest, and
1.05, 1.66, 3.37, 6.40 and 61.7 % where it learned after every 400, about as often in all. Widths
and learning rates were not tuned.

Every (agent, seed) is a file in the folder of results as soon as it is done; an interrupted
run goes on there.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import tyro
from _helpers.repeats import over_seeds, shown
from _helpers.run import Picture, Run, Section, Settings, Table, check_names, read_json, write_json
from _helpers.wheel import AGENTS, Learning, Wheel, play

from pyro_bbb import plots

PUBLISHED = {  # means, by delta
    "published: NeuralLinear": (0.95, 1.60, 4.65, 9.56, 49.63),
    "published: Bayes by Backprop": (1.37, 3.32, 34.42, 59.04, 97.38),
}
DELTAS = (0.5, 0.7, 0.9, 0.95, 0.99)
CURVE = 100  # points of a curve


@dataclass(frozen=True)
class Config(Settings):
    """Settings of one run."""

    agents: tuple[str, ...] = tuple(AGENTS)
    """Agents to compare."""
    deltas: tuple[float, ...] = DELTAS
    """Radii beyond which exploring pays."""
    seeds: int = 5
    """Runs with consecutive seeds; tables show their means and standard deviations."""
    steps: int = 80_000
    """Contexts."""
    output: Path = Path("results/wheel_bandit")
    """Folder for results."""


def run_one(config: Config, learning: Learning, agent: str, seed: int) -> dict[str, Any]:
    """Regret of one agent by radius, in per cent of the uniform agent's."""
    wheel = Wheel(config.deltas, config.steps, seed)
    torch.manual_seed(seed)
    actions = play(wheel, AGENTS[agent](len(config.deltas), learning), f"{agent}, seed {seed}")
    uniform = wheel.uniform_regret.double().sum(0)
    regret = 100 * wheel.regret(actions).double().cumsum(0) / uniform
    at = torch.linspace(config.steps / CURVE, config.steps, CURVE).long() - 1
    return {
        str(delta): {"regret": curve[-1].item(), "curve": curve[at].tolist()}
        for delta, curve in zip(config.deltas, regret.unbind(1), strict=True)
    }


def compare(config: Config, folder: Path) -> dict[str, dict[str, Any]]:
    """All agents at all radii: figures of the seeds, their means and deviations."""
    learning = Learning(num_batches=2, batch_size=16) if config.smoke else Learning()
    return {agent: by_radius(config, learning, agent, folder / agent) for agent in config.agents}


def by_radius(config: Config, learning: Learning, agent: str, folder: Path) -> dict[str, Any]:
    """One agent at all radii."""
    records = []
    for seed in range(config.seed, config.seed + config.seeds):
        path = folder / f"{seed}.json"
        if not path.exists():
            write_json(path, run_one(config, learning, agent, seed))
        records.append(read_json(path))
        regrets = ", ".join(f"{d}: {each['regret']:.2f} %" for d, each in records[-1].items())
        print(f"{agent}, seed {seed}, regret by delta: {regrets}", flush=True)
    found = {delta: [each[delta] for each in records] for delta in records[0]}
    return {delta: {"seeds": seeds} | over_seeds(seeds) for delta, seeds in found.items()}


def table(found: dict[str, dict[str, Any]], deltas: tuple[float, ...]) -> Table:
    """Regret by radius, with published ones."""
    rows = [
        (agent, *(shown(by_delta[str(d)], "regret", factor=1) for d in deltas))
        for agent, by_delta in found.items()
    ]
    rows += [
        (name, *(f"{dict(zip(DELTAS, values, strict=True))[d]:.2f}" for d in deltas))
        for name, values in PUBLISHED.items()
        if set(deltas) <= set(DELTAS)
    ]
    return Table(("regret (% of uniform's)", *(f"delta {d}" for d in deltas)), rows)


def draw_curves(run: Run, config: Config, found: dict[str, dict[str, Any]]) -> Picture:
    """Plot cumulative regret against steps, a panel for each radius."""
    with plots.style():
        figure, axes = plt.subplots(
            1, len(config.deltas), figsize=(3.0 * len(config.deltas), 3.2), squeeze=False
        )
        steps = np.linspace(config.steps / CURVE, config.steps, CURVE) / 1000
        for ax, delta in zip(axes[0], config.deltas, strict=True):
            for agent, by_delta in found.items():
                curves = np.array([record["curve"] for record in by_delta[str(delta)]["seeds"]])
                (line,) = ax.plot(steps, curves.mean(0), label=agent)
                band = curves.min(0), curves.max(0)
                ax.fill_between(steps, *band, color=line.get_color(), alpha=0.2, lw=0)
            ax.set(title=f"delta {delta}", xlabel="thousands of steps", ylim=(0, None))
        axes[0][0].set_ylabel("regret (% of uniform's)")
        axes[0][0].legend(fontsize="small")
    return run.picture(figure, "curves", "Means over seeds; bands are from the best to the worst.")


def main(config: Config) -> dict[str, Any]:
    """Plays every bandit by every agent, prints the table and writes the results."""
    check_names("--agents", config.agents, AGENTS)
    if config.smoke:
        config = replace(config, steps=200, seeds=1, deltas=config.deltas[:2])
    run = Run(config)
    found = compare(config, run.seeds("agents", "seeds"))
    record = run.finish({"agents": found})
    pictures = [draw_curves(run, config, found)]
    section = Section("Cumulative regret", TEXT, [table(found, config.deltas)], pictures)
    run.report("Wheel bandit", SUMMARY, [section], record)
    return record


SUMMARY = "Which agent finds what pays where few contexts are?"
TEXT = (
    "Cumulative regret after the last step, in per cent of the regret that uniformly random "
    "actions are expected to have; ± is the standard deviation over seeds."
)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
