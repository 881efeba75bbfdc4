# SPDX-License-Identifier: Apache-2.0
"""Console output of a command: text for a person, or JSON for a program."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any


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

    def result(self, result: dict[str, Any]) -> None:
        """Print the result of the command, if JSON is wanted."""
        if self.as_json:
            print(json.dumps(result, indent=1, allow_nan=False))
