# SPDX-License-Identifier: Apache-2.0
"""Wheel bandit: exploration that pays only where few contexts are.

    python experiments/wheel_bandit.py [--agents "last layer"] [--seeds 5]

After Riquelme, Tucker and Snoek (2018), "Deep Bayesian bandits showdown", arXiv:1802.09127: 80,000
contexts, uniform in the unit disk, and five actions. One pays 1.2 everywhere, the others 1.0; but
beyond the radius delta one of these, by the quadrant, pays 50 (noise of standard deviation 0.01).
The larger delta, the rarer the contexts in which exploring pays. Scores are the cumulative regret
in per cent of what uniformly random actions are expected to have on the same contexts.

``docs/development/experiments.md`` has the other settings, and those tried.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from _helpers.repeats import over_seeds, resumed, shown
from _helpers.run import Picture, Run, Settings, Table, check_names
from _helpers.wheel import AGENTS, Learning, Wheel, play

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
    seeds, found = range(config.seed, config.seed + config.seeds), {}
    for agent in config.agents:
        one = partial(run_one, config, learning, agent)
        records = resumed(folder / agent, seeds, one, agent)["seeds"]
        by_delta = {delta: [record[delta] for record in records] for delta in records[0]}
        found[agent] = {d: {"seeds": runs} | over_seeds(runs) for d, runs in by_delta.items()}
    return found


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
    steps = np.linspace(config.steps / CURVE, config.steps, CURVE) / 1000
    panels: dict[str, Any] = {f"delta {delta}": {} for delta in config.deltas}
    for agent, by_delta in found.items():
        for lines, delta in zip(panels.values(), config.deltas, strict=True):
            curves = np.array([record["curve"] for record in by_delta[str(delta)]["seeds"]])
            lines[agent] = steps, curves.mean(0), curves.min(0), curves.max(0)
    caption = "Means over seeds; bands are from the best to the worst."
    axes = {"xlabel": "thousands of steps", "ylabel": "regret (% of uniform's)"}
    return run.curves("curves", caption, panels, **axes)


def main(config: Config) -> dict[str, Any]:
    """Plays every bandit by every agent, prints the table and writes the results."""
    check_names("--agents", config.agents, AGENTS)
    if config.smoke:
        config = replace(config, steps=200, seeds=1, deltas=config.deltas[:2])
    run = Run(config)
    found = compare(config, run.seeds("agents", "seeds"))
    record = run.finish({"agents": found})
    pictures = [draw_curves(run, config, found)]
    run.report("Wheel bandit", SUMMARY, record, [table(found, config.deltas)], pictures)
    return record


SUMMARY = (
    "Which agent finds what pays where few contexts are? Cumulative regret in per cent of what "
    "uniformly random actions are expected to have; ± is the standard deviation over seeds."
)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
