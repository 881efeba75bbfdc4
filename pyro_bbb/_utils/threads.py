# SPDX-License-Identifier: Apache-2.0
"""Number of processor threads within a context."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pyro_bbb._utils.locking import GLOBAL_LOCK


@contextmanager
def use_threads(n_jobs: int | None, default: int | None = 1) -> Iterator[None]:
    """Use ``n_jobs`` processor threads, all for -1, ``default`` for None, torch's where both are.

    Others wait, as the number is global to the process.
    """
    number = default if n_jobs is None else n_jobs if n_jobs > 0 else os.cpu_count() or 1
    with GLOBAL_LOCK:
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(number or before)
            yield
        finally:
            torch.set_num_threads(before)
