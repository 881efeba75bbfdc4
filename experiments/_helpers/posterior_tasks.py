# SPDX-License-Identifier: Apache-2.0
"""Trainings that `posteriors` and `shift` have in common: their images, folders and tasks."""

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from _helpers.images import images, train_and_validation
from _helpers.posterior_methods import METHODS, PROBLEMS
from _helpers.posterior_training import Clock, Method, Problem, Task, tiny
from _helpers.run import Data, fingerprint

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
