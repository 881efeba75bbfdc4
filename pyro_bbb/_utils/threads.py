# SPDX-License-Identifier: Apache-2.0
"""Number of processor threads within a context."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pyro_bbb._utils.locking import GLOBAL_LOCK

ONE_THREAD = 2**16  # weights of a small network, for which one processor thread is fastest
_chosen = False  # whether an outer `use_threads` is in force


@contextmanager
def use_threads(n_jobs: int | None, default: int | None = 1) -> Iterator[None]:
    """Use ``n_jobs`` processor threads, all for -1, torch's number where it is None.

    ``n_jobs=None`` means the number of an outer context, or ``default`` without one. Other Python
    threads wait, as the number is global to the process.
    """
    global _chosen
    with GLOBAL_LOCK:
        outer, before = _chosen, torch.get_num_threads()
        if n_jobs is not None:
            number = n_jobs if n_jobs > 0 else os.cpu_count() or 1
        else:
            number = before if outer or default is None else default
        _chosen = True
        try:
            torch.set_num_threads(number)
            yield
        finally:
            _chosen = outer
            torch.set_num_threads(before)
