"""Options that several commands share, and the base of commands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
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


@dataclass(frozen=True, kw_only=True)
class WritingCommand(Command):
    """Base of the commands that write a file or a folder at ``out``."""

    out: Path
    force: bool = False
    """Replace what is at --out already."""

    def check_out(self, *inputs: Path | None) -> None:
        """Check, before any work, that ``--out`` is no input and that nothing is lost there."""
        out = self.out.resolve()
        if out in [path.resolve() for path in inputs if path is not None]:
            raise BadInput(f"--out must not be the input {self.out}, choose another name")
        occupied = any(out.iterdir()) if out.is_dir() else out.exists()
        if occupied and not self.force:
            raise BadInput(
                f"--out {self.out} exists; choose another name, or --force to replace it"
            )


def fraction(option: str, value: float) -> float:
    """The value, if it is in (0, 1)."""
    if not 0 < value < 1:
        raise BadInput(f"{option} must be between 0 and 1, got {value}")
    return value
