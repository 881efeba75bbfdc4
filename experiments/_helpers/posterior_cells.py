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
from _helpers.posterior_training import BATCH, POINT_PRIOR, Method, Posterior, Task
from _helpers.repeats import resumed
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
    return resumed(folder, seeds, lambda seed: measure(task_of(seed), method, sets), method.label)


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
