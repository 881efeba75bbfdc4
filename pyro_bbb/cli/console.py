"""Console output of a command: text for a person, or JSON for a program."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from tqdm import tqdm

from pyro_bbb.cli.metrics import SCORE_NAMES

T = TypeVar("T")


@dataclass(frozen=True)
class Console:
    """Output of a command: lines, results and progress bars.

    Args:
        as_json: whether the results are one JSON object on the standard output, and words go to
            the standard error.
        quiet: whether to leave out words and progress.
    """

    as_json: bool
    quiet: bool

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

    def bar(self, steps: Iterable[T], total: int, words: str) -> Iterator[T]:
        """A progress bar around steps."""
        return iter(tqdm(steps, words, total, disable=not self.shows_progress, leave=False))
