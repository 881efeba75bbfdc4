# SPDX-License-Identifier: Apache-2.0
"""Trainings that `posteriors` and `shift` share, and the scores and costs of one.

Costs are multiples of the deterministic network's, in processor seconds of one process: other
programs share the machine, and its speed changes during the hours of a run. So the deterministic
network is measured with each training: some of its steps, right before and after it, and its
prediction of the same images.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

import pyro_bbb as bbb
from _helpers.images import images, train_and_validation
from _helpers.posterior_methods import METHODS, PROBLEMS
from _helpers.posterior_training import (
    BATCH,
    POINT_PRIOR,
    Clock,
    Method,
    Posterior,
    Problem,
    Task,
    tiny,
)
from _helpers.repeats import resumed
from _helpers.run import Data, fingerprint
from _helpers.scores import detect, scores
from pyro_bbb import guides, metrics

HELD_OUT = 1 / 12  # of the training images: 5,000


@dataclass(frozen=True)
class Sets:
    """Inputs, such as images ``[n, 1, 28, 28]``, and labels ``[n]``."""

    train: Data
    valid: Data
    scored: Data
    ood: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Trainings:
    """Trainings of the current commit, each in a folder of its own."""

    root: Path
    """The folder of them all."""
    data_root: Path | None
    """Folder of the data sets, see `images`."""
    smoke: bool
    """Train a tiny network on a few images."""
    epochs: int | None = None
    """Passes over the images, instead of the methods' own."""

    def problem(self, name: str) -> Problem:
        """A problem of `PROBLEMS`; in a smoke test with a tiny network."""
        problem = PROBLEMS[name]
        return replace(problem, network=tiny) if self.smoke else problem

    def method(self, name: str) -> Method:
        """A method of `METHODS`; in a smoke test with few draws."""
        method = METHODS[name]
        return replace(method, draws=min(method.draws, 2)) if self.smoke else method

    def sets(self, name: str, *, testing: bool = True, unknown: int | None = None) -> Sets:
        """The problem's images: scored are test images or those of validation.

        The out-of-distribution images are so many, or all.
        """
        problem = PROBLEMS[name]
        train, valid = train_and_validation(self._images(problem.dataset, True), HELD_OUT)
        scored = self._images(problem.dataset, False) if testing else valid
        return Sets(train, valid, scored, self._images(problem.ood, not testing)[0][:unknown])

    def task(self, name: str, method: str, seed: int, sets: Sets) -> Task:
        """One training, which goes on from what is in its folder."""
        settings = {"epochs": self.epochs, "smoke": self.smoke}
        folder = self.root / fingerprint(settings) / name / method / str(seed)
        return Task(
            problem=self.problem(name),
            data=sets.train,
            valid=sets.valid,
            seed=seed,
            folder=folder,
            clock=Clock(folder / "seconds.json"),
            engine="eager" if self.smoke else "compiled",
            epochs=self.epochs,
        )

    def _images(self, dataset: str, train: bool) -> Data:
        return images(dataset, self.data_root, train=train, smoke=self.smoke)


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
