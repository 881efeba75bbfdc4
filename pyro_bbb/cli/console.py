"""Console output of a command: text for a person, or JSON for a program."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from pyro_bbb.cli.metrics import SCORE_NAMES
from pyro_bbb.cli.model import ROWS, Answers, Model


@dataclass(frozen=True)
class Console:
    """Output of a command: lines, results and progress bars."""

    as_json: bool  # results to the standard output, words to the standard error
    quiet: bool  # without words and progress

    @property
    def shows_progress(self) -> bool:
        """Return whether the output is a terminal, which shows a bar."""
        return not self.quiet and sys.stderr.isatty()

    def print(self, words: str) -> None:
        """A line for a person."""
        if not self.quiet:
            print(words, file=sys.stderr if self.as_json else sys.stdout)

    def scores(self, scores: dict[str, float]) -> None:
        """Scores, a line each."""
        width = max(map(len, scores))
        for name, value in scores.items():
            self.print(f"  {name:{width}}  {value:10.4g}  {SCORE_NAMES[name]}")

    def result(self, result: dict[str, Any]) -> None:
        """Print the result of the command, if JSON is wanted."""
        if self.as_json:
            print(json.dumps(result, indent=1, allow_nan=False))

    def answers(self, model: Model, inputs: NDArray[np.float64]) -> Iterator[Answers]:
        """Answers of a model for all rows, under a progress bar."""
        total, hidden = math.ceil(len(inputs) / ROWS), not self.shows_progress
        return iter(tqdm(model.ask(inputs), "predicting", total, disable=hidden, leave=False))
