# SPDX-License-Identifier: Apache-2.0
"""Continual learning: one task after another, yesterday's posterior as today's prior.

    python experiments/continual.py [--protocols permuted split split_fashion] [--seeds 3]

After Nguyen et al. (2018), "Variational continual learning" (VCL), arXiv:1710.10628. Permuted
MNIST: ten tasks, all digits with the pixels in another order each time, 784-100-100-10, one last
layer. Split MNIST and split Fashion-MNIST: five tasks of two classes, 784-256-256-2, a last layer
for each task. Each task is seen once. The prior of its weights is the posterior after the tasks
before (`pyro_bbb.priors.from_guide`), where the guide starts, too. Beside it are diagonal Laplace
in sequence (what EWC, Kirkpatrick et al. 2017, approximates), Laplace with Kronecker factors
(Ritter et al. 2018, arXiv:1805.07810), fine-tuning, all tasks at once, and VCL with coresets:
images kept from each task (random, or by `pyro_bbb.data.k_center`), which it learns again before it
predicts. ``split_one_head`` is split MNIST where nothing tells the task.

``docs/development/experiments.md`` has the other settings, and those tried.
"""

import statistics
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib.pyplot as plt
import numpy as np
import torch
import tyro
from _helpers import repeats
from _helpers.continual_learning import (
    METHODS,
    PROTOCOLS,
    AllTasks,
    Learner,
    Method,
    Protocol,
    Task,
)
from _helpers.repeats import over_seeds, resumed
from _helpers.run import DataSettings, Picture, Run, Table, check_names, chosen
from matplotlib.ticker import LogLocator, MaxNLocator

import pyro_bbb as bbb
from pyro_bbb import metrics, plots

Summaries: TypeAlias = dict[str, dict[str, Any]]  # by method


def table(name: str, found: Summaries) -> Table:
    """Average accuracy after the last task, and forgetting; with published accuracies."""
    protocol = PROTOCOLS[name]
    columns = (
        ("accuracy (%)", "accuracy", 100, 2),
        ("forgetting (%)", "forgetting", 100, 2),
        ("NLL (nats)", "nll", 1, 3),
        ("ECE (%)", "ece", 100, 2),
    )
    published = {
        f"published: {method}": (f"{100 * average:.1f}", *("–",) * 3)
        for method, average in protocol.published.items()
    }
    labelled = {METHODS[name][method].label: summary for method, summary in found.items()}
    title = f"{protocol.title}, after the last task"
    return repeats.table(title, labelled, columns, published)


def draw_matrices(run: Run, name: str, found: Summaries) -> Picture:
    """Accuracy on every task after every task, a panel for each method."""
    first = {method: each["seeds"][0] for method, each in found.items()}
    matrices = {method: each["matrix"] for method, each in first.items() if "matrix" in each}
    rows = 1 if len(matrices) < 4 else 2
    columns = -(-len(matrices) // rows)
    with plots.style():
        figure, axes = plt.subplots(
            rows, columns, figsize=(3.3 * columns + 0.8, 3.1 * rows + 0.4), squeeze=False
        )
        for ax, (method, matrix) in zip(axes.flat, matrices.items(), strict=False):
            size = len(matrix)
            values = np.full((size, size), np.nan)
            for i, row in enumerate(matrix):
                values[i, : len(row)] = row
            picture = ax.imshow(100 * values, vmin=50, vmax=100, cmap="viridis")
            ax.set_title(METHODS[name][method].label, fontsize="small")
            ticks = range(0, size, 1 if size < 8 else 3)
            ax.set_xticks(ticks, [str(i + 1) for i in ticks])
            ax.set_yticks(ticks, [str(i + 1) for i in ticks])
            ax.set(xlabel="scored on task", ylabel="after task")
        for ax in axes.flat[len(matrices) :]:
            ax.set_axis_off()
        figure.colorbar(picture, ax=axes, label="accuracy (%)", shrink=0.8)
    return run.picture(figure, f"{name}_matrices", f"{PROTOCOLS[name].title}, the first seed.")


def draw_averages(run: Run, name: str, found: Summaries) -> Picture:
    """Errors on the tasks so far, by their number."""
    with plots.style():
        figure, ax = plt.subplots(figsize=(8, 4))
        for method, summary in found.items():
            label = METHODS[name][method].label
            if "matrix" in summary["seeds"][0]:
                right = np.array([record["averages"] for record in summary["seeds"]])
                errors = 100 * (1 - right.mean(0))
                ax.plot(np.arange(1, len(errors) + 1), errors, "o-", ms=4, label=label)
            else:
                error = 100 * (1 - summary["mean"]["accuracy"])
                ax.axhline(error, color="0.6", ls="--", label=label)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set(
            xlabel="tasks learned",
            ylabel="wrong on these tasks (%)",
            yscale="log",
            title=PROTOCOLS[name].title,
        )
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.tick_params(axis="y", which="minor", labelleft=False)
        ax.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return run.picture(figure, f"{name}_averages", "Means over seeds.")


def draw_capacity(run: Run, name: str, found: Summaries) -> Picture:
    """Plot the distribution of the weights' signal-to-noise ratio after each task."""
    method = next(m for m in found if "snr" in found[m]["seeds"][0])
    by_task = found[method]["seeds"][0]["snr"]
    with plots.style():
        figure, ax = plt.subplots(figsize=(6.4, 4))
        colors = plt.colormaps["viridis"](np.linspace(0, 0.9, len(by_task)))
        for i, (levels, color) in enumerate(zip(by_task, colors, strict=True), start=1):
            fractions = np.linspace(0, 1, len(levels))
            ax.plot(levels, 100 * (1 - fractions), color=color, label=f"task {i}")
        ax.set(
            xlim=(-40, 25),
            xlabel="signal-to-noise ratio |loc| / scale (dB)",
            ylabel="weights above it (%)",
            title=f"{PROTOCOLS[name].title}: {METHODS[name][method].label}",
        )
        ax.legend(fontsize="x-small")
    return run.picture(figure, f"{name}_capacity", "Weights of the layers that tasks share.")


Figures: TypeAlias = dict[str, Any]
LEVELS = 101  # quantiles of the signal-to-noise ratio


@dataclass(frozen=True)
class Config(DataSettings):
    """Settings of one run."""

    protocols: tuple[str, ...] = ("permuted", "split", "split_fashion", "split_one_head")
    """Protocols: permuted, split, split_fashion, split_one_head."""
    methods: tuple[str, ...] = ()
    """Methods, instead of all."""
    seeds: int = 3
    """Runs with consecutive seeds; tables show their means and standard deviations."""
    validation: bool = False
    """Score 5,000 held-out training images; settings were chosen on these."""
    output: Path = Path("results/continual")
    """Folder for results."""


def learn(protocol: Protocol, method: Method, tasks: list[Task], seed: int) -> Figures:
    """Learn the tasks one after the other; after each, score those so far."""
    learner = Learner(protocol, method.settings, seed)
    matrix, snr = [], []
    for i, task in enumerate(tasks):
        learner.learn(task)
        found = [score(learner.predict(each), each) for each in tasks[: i + 1]]
        matrix.append([each["accuracy"] for each in found])
        if method.settings.guide == "softplus_normal":
            snr.append(signal_to_noise(learner.latest[task.head]))
    averages = [statistics.fmean(row) for row in matrix]
    history = {"matrix": matrix, "averages": averages, "forgetting": forgetting(matrix)}
    return mean(found) | history | ({"snr": snr} if snr else {})


def learn_at_once(protocol: Protocol, method: Method, tasks: list[Task], seed: int) -> Figures:
    """Learn the images of all tasks together, and score every task."""
    together = AllTasks(protocol, tasks)
    learner = Learner(protocol, method.settings, seed, together.network)
    learner.learn(together.joined())
    return mean([score(learner.predict(each), each) for each in together.tasks])


def score(answer: bbb.ClassificationPrediction, task: Task) -> dict[str, float]:
    """Accuracy and ECE in [0, 1], and NLL in nats."""
    _, y = task.data(False)
    return {
        "accuracy": metrics.accuracy(answer.probs, y),
        "nll": -answer.log_prob(y).double().mean().item(),  # finite where a probability is 0
        "ece": metrics.ece(answer.probs, y),
    }


def mean(found: list[dict[str, float]]) -> Figures:
    """Means over the tasks."""
    means: Figures = over_seeds(found)["mean"]
    return means


def forgetting(matrix: list[list[float]]) -> float:
    """Mean over the tasks but the last of the best accuracy before it less the one after it.

    Chaudhry et al. (2018, arXiv:1801.10112), section 3.
    """
    *before, last = matrix
    best = [max(row[i] for row in before[i:]) for i in range(len(before))]
    return statistics.fmean(b - a for b, a in zip(best, last, strict=False)) if best else 0.0


def signal_to_noise(guide: Any) -> list[float]:
    """Quantiles of the ratio in decibel, over the weights of the layers that tasks share."""
    ratios = bbb.signal_to_noise(guide)
    shared = torch.cat([ratio.flatten() for name, ratio in ratios.items() if ".fc" in name])
    decibel = 10 * shared.clamp(min=1e-9).log10()
    levels = np.quantile(decibel.numpy(), np.linspace(0, 1, LEVELS))
    return [round(float(level), 2) for level in levels]


def compare(config: Config, folder: Path, name: str) -> dict[str, Figures]:
    """All methods on one protocol: the figures of the seeds, their means and deviations."""
    protocol = PROTOCOLS[name]

    def one(method: Method, seed: int) -> Figures:
        tasks = protocol.sequence(
            config.data_root, smoke=config.smoke, seed=seed, validation=config.validation
        )
        tasks = tasks[:2] if config.smoke else tasks
        return (learn_at_once if method.at_once else learn)(protocol, method, tasks, seed)

    found: dict[str, Figures] = {}
    for each in chosen(METHODS[name], config.methods):
        method = shortened(METHODS[name][each], config)
        seeds, what = range(config.seed, config.seed + config.seeds), f"{protocol.title}, {each}"
        found[each] = resumed(folder / name / each, seeds, partial(one, method), what)
    return found


def shortened(method: Method, config: Config) -> Method:
    """The method, in a smoke test with one epoch of a size that needs no compiled steps."""
    if not config.smoke:
        return method
    return replace(method, settings=replace(method.settings, epochs=1, engine="eager"))


def main(config: Config) -> dict[str, Any]:
    """Learns every sequence by every method, prints the tables and writes the results."""
    check_names("--protocols", config.protocols, PROTOCOLS)
    known = (name for protocol in config.protocols for name in METHODS[protocol])
    check_names("--methods", config.methods, known)
    if config.smoke:
        config = replace(config, seeds=1, protocols=config.protocols[:2])
    run = Run(config)
    folder = run.seeds("protocols", "methods", "seeds")
    results = {name: compare(config, folder, name) for name in config.protocols}
    tables = [table(name, found) for name, found in results.items()]
    pictures = []
    for name, found in results.items():
        pictures.append(draw_averages(run, name, found))
        if any("matrix" in method["seeds"][0] for method in found.values()):
            pictures.append(draw_matrices(run, name, found))
        if any("snr" in method["seeds"][0] for method in found.values()):
            pictures.append(draw_capacity(run, name, found))
    record = run.finish({"protocols": results})
    run.report("Continual learning", SUMMARY, record, tables, pictures)
    return record


SUMMARY = (
    "Tasks that come one after the other, each seen once: what is learned, what forgotten? Means "
    "over the tasks, after the last one; forgetting is the best accuracy on a task before it less "
    "the one after it. ± is the standard deviation over seeds."
)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
