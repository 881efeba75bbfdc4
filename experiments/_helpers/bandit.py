# SPDX-License-Identifier: Apache-2.0
"""Batched bandit agents as one network, and the mushroom environment.

The weights of A networks are one tensor; each row of inputs holds one input for each of them. The
ELBO is a sum over the agents and Adam works on every weight by itself, so they learn as if each
were alone, in one step instead of A. Nothing is read from the device, so that on a GPU an
interaction with all its training steps is one CUDA graph.
"""

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from pyro.nn import PyroModule
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from _helpers.repeats import over
from _helpers.run import Picture, Run, Table
from pyro_bbb import bandits, priors
from pyro_bbb.training._captured import CudaDevice

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


Found: TypeAlias = dict[str, tuple[Tensor, Tensor]]
"""Regret and realised regret of every interaction, each ``[interactions, seeds]``, by agent."""
WHAT = ("regret", "realised")


@dataclass(frozen=True)
class Outcome:
    """Regret by agent, and the settings of its run."""

    recipe: dict[str, Any]
    device: str
    seeds: list[int]
    found: Found
    seconds: float = 0.0
    """Run time of merged runs."""

    @property
    def interactions(self) -> int:
        """Mushrooms offered."""
        return len(next(iter(self.found.values()))[0])


def save(folder: Path, found: Found) -> None:
    """Keeps every interaction's regret so far."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        f"{name}, {what}": table.to(torch.int8).numpy()
        for name, both in found.items()
        for what, table in zip(WHAT, both, strict=True)
    }
    np.savez_compressed(folder / "regret.npz", **arrays)


def joined(folders: Sequence[Path]) -> Outcome:
    """Merge the results in the folders of several runs.

    Raises:
        FileNotFoundError: a folder holds no results.
        ValueError: the runs differ in their recipe or length, two have an agent with the same seed,
            or an agent lacks a seed that others have.
    """
    pieces = [_read(folder) for folder in folders]
    first, columns = pieces[0], dict[str, dict[int, list[Tensor]]]()
    for folder, piece in zip(folders, pieces, strict=True):
        if (piece.recipe, piece.interactions) != (first.recipe, first.interactions):
            raise ValueError(f"pieces must have one recipe and length, {folder} has another")
        for name, both in piece.found.items():
            mine = columns.setdefault(name, {})
            if again := sorted(mine.keys() & set(piece.seeds)):
                raise ValueError(f"pieces must not overlap, {folder} has {name} again with {again}")
            mine |= dict(
                zip(piece.seeds, zip(*(x.unbind(1) for x in both), strict=True), strict=True)
            )
    seeds = {name: sorted(mine) for name, mine in columns.items()}
    if len(set(map(tuple, seeds.values()))) > 1:
        raise ValueError(f"pieces must have the same seeds of each agent, got {seeds}")
    (common, *_), device = seeds.values(), ", ".join(dict.fromkeys(p.device for p in pieces))
    found = {
        name: tuple(torch.stack(tables, 1) for tables in zip(*map(mine.get, common), strict=True))
        for name, mine in columns.items()
    }
    return Outcome(first.recipe, device, common, found, sum(piece.seconds for piece in pieces))


def _read(folder: Path) -> Outcome:
    """Read the results of one run."""
    record = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    with np.load(folder / "regret.npz", allow_pickle=False) as arrays:
        tables = {key: torch.from_numpy(arrays[key]).double() for key in arrays}
    names = dict.fromkeys(key.rpartition(", ")[0] for key in tables)
    found: Any = {name: tuple(tables[f"{name}, {what}"] for what in WHAT) for name in names}
    seeds = [int(seed) for seed in record["seeds"]]
    return Outcome(record["recipe"], record["device"], seeds, found, record["seconds"])


BBB = "Bayes by Backprop"
GREEDY = {"greedy": 0.0, "1 % greedy": 0.01, "5 % greedy": 0.05}
AGENTS = dict(zip(("bbb", "greedy", "greedy1", "greedy5"), (BBB, *GREEDY), strict=True))
MARKS = (1_000, 5_000, 20_000, 50_000)


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
