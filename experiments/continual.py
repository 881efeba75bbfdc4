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

Settings were tried on five held-out thousands and other permutations (seed 100) by average
accuracy. Permuted MNIST, VCL, after four tasks of 20,000 images, 10 epochs each: the prior N(0, 1)
0.841 at temperature 1, 0.917 at 0.1; by fan-in (variance 2 / inputs) 0.935 at 0.1, 0.923 at 0.3;
`reparam` 0.896 where `local_reparam` has 0.933. After ten tasks of 55,000 images, 6 epochs each, at
strength 10, temperature 0.3 and learning rate 5e-3: 0.934 from initial rho -2.5, 0.925 from -3.5,
0.919 from -2; from -3.5 0.891 with 20 epochs, 0.908 with learning rate 2e-3, 0.910 with 1e-2, 0.926
at temperature 0.5, 0.922 at 1, 0.901 with strength 30; at temperature 0.1 0.910 with strength 30,
0.853 with 100. EWC after six tasks: 0.933 with strength 3, 0.918 with 30. Kronecker factors, in
a version that held the weights at 0, too: 0.925 with strength 3 and 0.916 with 20 (6 epochs,
learning rate 3e-3), 0.945 with 6 (12 epochs, 2e-3).

Split MNIST, after its five tasks: with the prior by fan-in and temperature 0.3 VCL had 0.739 at
strength 3 and 0.938 at 300 (10 epochs). That prior draws weights that a task does not need to 0,
and later tasks lack them: fine-tuning (4 epochs, batches of 128) had 0.659 with it, 0.880 with
N(0, 1), and 0.604 where all last layers start alike. With N(0, 1), strength 100, temperature
0.01 and learning rate 1e-3 VCL had 0.958 from initial rho -4, 0.971 from -3, 0.980 from -2.5, 0.975
from -2, with 4 to 6 epochs; from -2.5 0.983 with 10 epochs, 0.987 with 20. Strength 300 with 10
epochs had 0.983; temperature 0.03 at strength 30, from -3, 0.968; strength and temperature 1, from
-5, 0.929. EWC, which predicts with its means, had 0.868 at strength 1, 0.973 at 100 and 0.989 at
10,000; Kronecker factors 0.992 at strength 6, 0.993 at 100. The other split protocols have these
settings, too.

Each (protocol, method, seed) is a file in the folder of results as soon as it is done; an
interrupted run goes on there.
"""

import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import tyro
from _helpers import continual_report as report
from _helpers.continual_learners import AllTasks, Learner
from _helpers.continual_methods import METHODS, Method
from _helpers.continual_tasks import PROTOCOLS, Protocol, Task
from _helpers.repeats import over_seeds
from _helpers.run import DataSettings, Run, Section, check_names, chosen, read_json, write_json

import pyro_bbb as bbb
from pyro_bbb import metrics

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
    found: dict[str, Figures] = {}
    for each in chosen(METHODS[name], config.methods):
        method = METHODS[name][each]
        records = []
        for seed in range(config.seed, config.seed + config.seeds):
            path = folder / name / each / f"{seed}.json"
            if not path.exists():
                tasks = protocol.sequence(
                    config.data_root, smoke=config.smoke, seed=seed, validation=config.validation
                )
                tasks = tasks[:2] if config.smoke else tasks
                learned = learn_at_once if method.at_once else learn
                write_json(path, learned(protocol, shortened(method, config), tasks, seed))
            records.append(read_json(path))
            print(summary_line(protocol, method, seed, records[-1]), flush=True)
        found[each] = {"seeds": records} | over_seeds(records)
    return found


def shortened(method: Method, config: Config) -> Method:
    """The method, in a smoke test with one epoch of a size that needs no compiled steps."""
    if not config.smoke:
        return method
    return replace(method, settings=replace(method.settings, epochs=1, engine="eager"))


def summary_line(protocol: Protocol, method: Method, seed: int, figures: Figures) -> str:
    """One line on a run that is done."""
    return (
        f"{protocol.title}, {method.label}, seed {seed}: accuracy {figures['accuracy']:.4f}, "
        f"NLL {figures['nll']:.4f}"
    )


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
    sections = [section(run, name, found) for name, found in results.items()]
    record = run.finish({"protocols": results})
    run.report("Continual learning", SUMMARY, sections, record)
    return record


def section(run: Run, name: str, found: dict[str, Figures]) -> Section:
    """Table and pictures of one protocol."""
    pictures = [report.draw_averages(run, name, found)]
    if any("matrix" in each["seeds"][0] for each in found.values()):
        pictures.append(report.draw_matrices(run, name, found))
    if any("snr" in each["seeds"][0] for each in found.values()):
        pictures.append(report.draw_capacity(run, name, found))
    return Section(PROTOCOLS[name].title, EXPLANATION, [report.table(name, found)], pictures)


SUMMARY = "Tasks that come one after the other, each seen once: what is learned, what forgotten?"
EXPLANATION = (
    "Means over the tasks, after the last one. Forgetting is the best accuracy on a task "
    "before the last task less the one after it; ± is the standard deviation over seeds. NLL "
    "is the negative log-probability of the true class per image, ECE the gap between confidence "
    "and accuracy."
)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
