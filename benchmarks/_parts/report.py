# SPDX-License-Identifier: Apache-2.0
"""Measurements of one run: printed tables, performance targets, pictures, and the JSON record."""

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch

from _parts import small
from _parts.budget import Budget
from _parts.memory import Peak
from _parts.methods import BATCH, FLOOR, OURS, OURS_GAUSSIAN, PLAIN, TORCHBNN
from _parts.suites import FIT, FIT_MANY, MANY, PREDICT, PREDICT_LOCAL, STEPS
from _parts.timing import Comparison, interquartile
from pyro_bbb import plots
from pyro_bbb._utils.tables import as_markdown

sys.path.append(str(Path(__file__).parents[2] / "experiments"))
from _helpers.run import commit, versions  # noqa: E402

PACKAGES = (
    "pyro-bbb", "pyro-ppl", "torch", "numpy", "torchbnn", "bayesian-torch",
    "blitz-bayesian-pytorch", "torch_blue",
)  # fmt: skip


@dataclass
class Results:
    """Measurements, suite by suite."""

    budget: Budget
    comparisons: list[Comparison] = field(default_factory=list)
    memory: dict[str, Peak] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # duration of each suite
    load_before: float | None = None
    """Load average before the run; None where the system does not report it."""

    def of(self, suite: str) -> list[Comparison]:
        """Return the comparisons of one suite."""
        return [each for each in self.comparisons if each.suite == suite]

    def widths(self) -> dict[int, Comparison]:
        """Return the comparisons of steps, by width."""
        titles = {f"width {width}, batch {BATCH}": width for width in self.budget.widths}
        return {titles[each.title]: each for each in self.of("steps") if each.title in titles}

    def memory_ratio(self, name: str, figure: str = "tensors") -> float | None:
        """Return the ratio of a method's peak to the floor's."""
        mine, floor = (getattr(self.memory.get(n), figure, 0) for n in (name, FLOOR))
        return mine / floor if mine and floor else None


# --- performance targets ---


@dataclass(frozen=True)
class Aim:
    """A figure that should not exceed a limit."""

    what: str
    limit: float
    value: float | None  # None where it was not measured

    @property
    def verdict(self) -> str:
        """Reached, not reached, or not measured."""
        if self.value is None:
            return "not measured"
        return "reached" if self.value <= self.limit else "not reached"


def aims(results: Results) -> Iterator[Aim]:
    """Yield every aim, in the order of the suites."""
    for each in results.of("small"):
        if "thread" in each.title:
            yield _aim(each, 0.5, small.OURS, small.HAND_WRITTEN, f"{each.title}: fit / {{}}")
        if "thread" in each.title and each.title.startswith(("1-20-20-1", "10-50-1")):
            yield _aim(each, 2.0, small.OURS, small.NUMPYRO, f"{each.title}: fit / NumPyro")
            yield _aim(each, 2.5, small.ENSEMBLE, small.OURS, f"{each.title}: ensemble of 8 / fit")
    for each in results.of("small"):
        if small.COLD in each.rounds:
            yield _aim(each, 1.0, small.OURS, small.COLD, f"{each.title}: fit / {{}}")
    for width, each in results.widths().items():
        pairs = [(OURS, PLAIN, 0.5), (OURS, TORCHBNN, 1.0), (OURS_GAUSSIAN, TORCHBNN, 1.0)]
        for name, to, limit in [*pairs, (OURS, FLOOR, 3.0)]:
            yield _aim(each, limit, name, to, f"step, width {width}: {name} / {{}}")
    one, many = (f"{OURS} x {draws}" for draws in (1, MANY))
    for each in results.of("steps"):
        if many in each.rounds:
            yield _aim(each, 8.0, many, one, f"step: {MANY} draws / 1 draw")
    for each in results.of("epoch"):
        yield _aim(each, 1.1, FIT, STEPS, f"epoch: {FIT} / {{}}")
        yield _aim(each, 8.0, FIT_MANY, FIT, f"epoch: {MANY} draws / 1 draw")
    samples = results.budget.samples
    counts = dict(zip(results.budget.predictions, results.of("predict"), strict=False))
    for name in (PREDICT, PREDICT_LOCAL):
        if 1 in counts:
            what = f"1 input, {samples} draws: {name}, in passes of 1 input"
            yield Aim(what, 50.0, samples * counts[1].ratio(name))
        for count in [max(counts)] if counts else []:
            each = counts[count]
            yield _aim(each, 1.3, name, each.floor, f"{count} inputs: {name} / {{}}")
    if results.memory:
        width = results.budget.memory_width
        what = f"tensors at the peak of training, width {width}: {OURS} / {FLOOR}"
        yield Aim(what, 3.5, results.memory_ratio(OURS))


def _aim(comparison: Comparison, limit: float, name: str, to: str, what: str) -> Aim:
    """Return the ratio of two methods, in words in which ``{}`` is the second."""
    there = {name, to} <= set(comparison.rounds)
    return Aim(what.format(to), limit, comparison.ratio(name, to) if there else None)


# --- tables ---


def times_table(comparison: Comparison) -> str:
    """Medians, quartiles and ratios of one comparison."""
    rows = []
    for name, found in summaries(comparison).items():
        (first, third), (low, high) = found["quartiles_ms"], found["ratio_quartiles"]
        cells = [f"{found['median_ms']:.4g}", f"{first:.4g} to {third:.4g}"]
        cells += [f"{found['ratio']:.2f}", f"{low:.2f} to {high:.2f}", str(found["repetitions"])]
        rows.append([name, *cells])
    head = ["", "median, ms", "quartiles, ms", f"/ {comparison.floor}", "quartiles", "times"]
    absent = [f"- {name}: {reason}" for name, reason in comparison.absent.items()]
    title = f"{comparison.suite}: {comparison.title}"
    return "\n".join([title, "", as_markdown(head, rows), *absent])


def memory_table(results: Results) -> str:
    """Peaks of training."""
    rows = []
    for name, peak in results.memory.items():
        cells = []
        for figure in ("tensors", "process"):
            size, ratio = getattr(peak, figure), results.memory_ratio(name, figure)
            cells += [f"{size / 2**20:.1f}" if size else "", f"{ratio:.2f}" if ratio else ""]
        rows.append([name, *cells])
    head = ["", "tensors, MiB", "/ floor", "process, MiB", "/ floor"]
    title = f"memory: training at width {results.budget.memory_width}, peak of a steady step"
    return f"{title}\n\n{as_markdown(head, rows)}"


def aims_table(results: Results) -> str:
    """Tabulate performance targets and measurements."""
    rows = [
        [aim.what, "" if aim.value is None else f"{aim.value:.2f}", f"{aim.limit:g}", aim.verdict]
        for aim in aims(results)
    ]
    return f"aims\n\n{as_markdown(['', 'measured', 'at most', ''], rows)}"


# --- pictures ---


def draw_widths(widths: dict[int, Comparison], path: Path) -> None:
    """Draw a bar for each method and width, the cheapest at the first width on top."""
    if not widths:
        return
    ratios = [{name: each.ratio(name) for name in each.rounds} for each in widths.values()]
    names = sorted({*ratios[0]} - {FLOOR}, key=ratios[0].__getitem__)
    height = 0.8 / len(widths)
    with plots.style():
        figure, ax = plt.subplots(figsize=(9.0, 5.0))
        for number, (width, found) in enumerate(zip(widths, ratios, strict=True)):
            rows = np.arange(len(names)) + (number - (len(widths) - 1) / 2) * height
            options = {"alpha": 1 - 0.3 * number, "label": f"width {width}"}
            bars = ax.barh(rows, [found[name] for name in names], height, **options)
            ax.bar_label(bars, fmt="%.3g", fontsize="x-small", padding=2)
        ax.set(xscale="log", yticks=range(len(names)), yticklabels=names)
        ax.set_title("time of a training step / deterministic one")
        ax.axvline(1, color="black", linewidth=0.8)
        ax.invert_yaxis()
        ax.legend()
        figure.savefig(path, dpi=150)
        plt.close(figure)


def draw_sizes(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draw time per step against the number of weights, if growing networks were measured."""
    of_sizes = [found for found in comparisons if found.title.endswith(small.OF_SIZE)]
    if not of_sizes:
        return
    figure, axes = plt.subplots(figsize=(7.0, 4.4), layout="constrained")
    for name in small.IN_A_PICTURE:
        found = [comparison for comparison in of_sizes if name in comparison.rounds]
        weights = [int(comparison.title.removesuffix(small.OF_SIZE)) for comparison in found]
        times = [1e3 * median(comparison.times(name)) for comparison in found]
        line = {small.OURS: "-", small.HAND_WRITTEN: "--"}.get(name, ":")
        axes.plot(weights, times, f"o{line}", markersize=4, label=name)
    axes.set(xscale="log", yscale="log", xlabel="weights and biases", ylabel="time per step, µs")
    axes.set_title("A step of a 10-H-H-1 network, 128 rows")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


# --- the record ---


def record(results: Results, config: dict[str, Any]) -> dict[str, Any]:
    """Collect all measurements, the machine and the versions."""
    return {
        "config": config,
        "effort": asdict(results.budget),
        "machine": machine(config["device"]) | {"load_before": results.load_before},
        "versions": versions(PACKAGES),
        "commit": commit(),
        "seconds": results.seconds,
        "comparisons": [
            {"suite": each.suite, "title": each.title, "floor": each.floor}
            | {"contenders": summaries(each), "absent": dict(each.absent)}
            for each in results.comparisons
        ],
        "training_memory": {
            name: asdict(peak) | {"tensors_ratio": results.memory_ratio(name)}
            for name, peak in results.memory.items()
        },
        "aims": [asdict(aim) | {"verdict": aim.verdict} for aim in aims(results)],
    }


def summaries(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """Medians and quartiles of each method's times and ratios."""
    return {
        name: {
            "median_ms": median(times := comparison.times(name)),
            "quartiles_ms": interquartile(times),
            "ratio": comparison.ratio(name),
            "ratio_quartiles": interquartile(comparison.ratios(name)),
            "repetitions": len(times),
            "rounds": len(comparison.rounds[name]),
        }
        for name in comparison.rounds
    }


def machine(device: str) -> dict[str, Any]:
    """Describe the machine."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": None if device == "cpu" else torch.cuda.get_device_name(device),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }
