"""Options that several commands share, and the base of commands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyro_bbb.cli.console import Console
from pyro_bbb.cli.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class Command:
    """Base of the commands, with the options that all of them take."""

    json: bool = False
    """Print the result as one JSON object; words and progress go to the standard error."""
    quiet: bool = False
    """Print no words and no progress."""

    def run(self, console: Console) -> dict[str, Any]:
        """Do the work, and return what is printed as JSON."""
        raise NotImplementedError


def fraction(option: str, value: float) -> float:
    """The value, if it is in (0, 1)."""
    if not 0 < value < 1:
        raise BadInput(f"{option} must be between 0 and 1, got {value}")
    return value
