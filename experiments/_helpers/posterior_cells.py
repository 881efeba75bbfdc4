# SPDX-License-Identifier: Apache-2.0
"""One cell of `posteriors`: a method trained from a seed, its scores and its cost.

Costs are multiples of the deterministic network's, of processor seconds in one process: other
programs share the machine, and its speed changes during the hours of a run. So every cell measures
the deterministic network too: some of its steps, right before and after the training, and its
prediction of the same images, right before the method's.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import pyro_bbb as bbb
from _helpers.posterior_tasks import Sets
from _helpers.posterior_training import BATCH, POINT_PRIOR, Method, Posterior, Problem, Task
from _helpers.repeats import over_seeds
from _helpers.run import read_json, write_json
from _helpers.scores import detect, scores
from pyro_bbb import guides, metrics

Scores: TypeAlias = dict[str, Any]
REFERENCE = 64 * BATCH  # images of an epoch that times the deterministic network's step


def over_cells(
    folder: Path, task_of: Callable[[int], Task], method: Method, sets: Sets, seeds: Iterable[int]
) -> Scores:
    """The figures of several seeds, each from its file if it is known, their means and deviations.

    Prints a line on each.
    """
    records = []
    for seed in seeds:
        task = task_of(seed)
        records.append(cell(folder / f"{seed}.json", task, method, sets))
        print(summary_line(task.problem, method, seed, records[-1]), flush=True)
    return {"seeds": records} | over_seeds(records)


def summary_line(problem: Problem, method: Method, seed: int, figures: Scores) -> str:
    """One line on a cell that is done."""
    return (
        f"{problem.title}, {method.label}, seed {seed}: accuracy {figures['accuracy']:.4f}, "
        f"NLL {figures['nll']:.4f}, ECE {figures['ece']:.4f}, training x "
        f"{figures['training']:.2f}, {figures['seconds']['training']:.0f} s"
    )


def cell(path: Path, task: Task, method: Method, sets: Sets) -> Scores:
    """The figures of a training, from their file if they are known."""
    if not path.exists():
        write_json(path, measure(task, method, sets))
    return read_json(path)


def measure(task: Task, method: Method, sets: Sets) -> Scores:
    """Train and predict; compute the scores, and the costs."""
    plain, before = plain_step(task)
    task.clock.start()
    posterior = method.train(task)
    task.clock.note()
    seconds = task.clock.seconds
    step = statistics.fmean([before, plain_step(task)[1]])
    (x, y), seed = sets.scored, task.seed
    plain_seconds, _ = timed(lambda: bbb.predict(*plain, x, num_samples=1, seed=seed))
    predicting, answer = timed(lambda: method.prediction(posterior, x, seed))
    right = (answer.label == y).flatten()
    found = {
        **scores(answer.probs, y),
        "area_under_risk_coverage": metrics.area_under_risk_coverage(
            answer.confidence.flatten(), right
        ),
        "training": seconds / (step * plain_steps(task)),
        "prediction": predicting / plain_seconds,
        "seconds": {"training": seconds, "plain_step": step, "prediction": predicting},
        "draws": method.draws,
    }
    if sets.ood is not None:
        found["ood"] = detect(method.prediction(posterior, sets.ood, seed), answer)
    return found


def plain_steps(task: Task) -> int:
    """Steps of the deterministic network's training."""
    return (task.epochs or task.problem.epochs) * -(-len(task.data[0]) // BATCH)


def plain_step(task: Task) -> tuple[Posterior, float]:
    """A deterministic network, trained for three short epochs, and the median seconds of a step.

    The first epoch, which has the set-up, does not count.
    """
    ends: list[float] = []
    x, y = (part[:REFERENCE] for part in task.data)
    model = task.model(POINT_PRIOR, num_data=len(x))
    guide = guides.make("delta", model)
    options = {"epochs": 3, "engine": task.engine, "seed": task.seed, "progress": False}
    bbb.fit(model, guide, (x, y), callbacks=[lambda _: ends.append(time.process_time())], **options)
    epochs = [end - begin for begin, end in pairwise(ends)]
    return (model, guide), statistics.median(epochs) / -(-len(x) // BATCH)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Processor seconds of a call, and its result."""
    begin = time.process_time()
    result = function()
    return time.process_time() - begin, result
