# SPDX-License-Identifier: Apache-2.0
"""Progress bars that redraw twice a second, and write single lines where nothing can be redrawn."""

from __future__ import annotations

import io
import sys
from typing import Any, TextIO

from tqdm.auto import tqdm

REDRAWN = 0.5  # seconds from one drawing to the next, in a terminal or notebook
LINES = 30.0  # seconds from one line to the next, in a file or pipe


class _Lines(io.TextIOBase):
    """A stream that writes every drawing as a separate line."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        if line := text.strip("\r\n "):
            self.stream.write(f"{line}\n")
        return len(text)

    def flush(self) -> None:
        self.stream.flush()


def progress_bar(total: int, *, initial: int = 0, unit: str, shown: bool) -> Any:
    """Return a bar on the standard error, or one that shows nothing."""
    of_file = isinstance(sys.stderr, io.TextIOWrapper) and not sys.stderr.isatty()
    where: dict[str, Any] = {"mininterval": REDRAWN, "dynamic_ncols": True}
    if of_file:
        where = {"mininterval": LINES, "ncols": 100, "file": _Lines(sys.stderr)}
    return tqdm(total=total, initial=initial, unit=unit, disable=not shown, **where)
