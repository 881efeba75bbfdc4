# SPDX-License-Identifier: Apache-2.0
"""Progress bars that redraw twice a second, and every 30 seconds where they write to a file."""

from __future__ import annotations

import io
import sys
from typing import Any

from tqdm.auto import tqdm

REDRAWN, IN_FILES = 0.5, 30.0  # seconds from one drawing to the next


def progress_bar(total: int, *, initial: int = 0, unit: str, shown: bool) -> Any:
    """Return a bar on the standard error, or one that shows nothing."""
    to_file = isinstance(sys.stderr, io.TextIOWrapper) and not sys.stderr.isatty()
    pause = IN_FILES if to_file else REDRAWN
    options: dict[str, Any] = {"mininterval": pause, "dynamic_ncols": not to_file}
    return tqdm(total=total, initial=initial, unit=unit, disable=not shown, **options)
