# SPDX-License-Identifier: Apache-2.0
"""Second runs of a part of a forward pass, during the backward pass: `torch.utils.checkpoint`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack

from pyro_bbb._handlers.param_store import own_store
from pyro_bbb._utils.locking import GLOBAL_LOCK


def is_backward() -> bool:
    """Return whether the backward pass is under way, in which nothing is drawn."""
    return bool(torch._C._current_graph_task_id() != -1)


def same_draws(root: Any) -> AbstractContextManager[None]:
    """A context in which a `PyroModule`, run later, has the weights and the noise of this moment.

    Args:
        root: the outermost module, which is running.
    """
    modes = list(_get_current_function_mode_stack())  # such as a gradient estimator
    noise = [mode.as_now() for mode in modes if hasattr(mode, "as_now")]
    return _as_then(root, dict(root._pyro_context.cache), modes, noise, threading.get_ident())


@contextmanager
def _as_then(
    root: Any,
    values: dict[str, Any],
    modes: list[Any],
    noise: list[AbstractContextManager[None]],
    thread: int,
) -> Iterator[None]:
    active = _get_current_function_mode_stack()
    with ExitStack() as stack:
        for context in [*(mode for mode in modes if mode not in active), *noise]:
            stack.enter_context(context)
        # a thread of autograd's cannot wait: the training that waits for it has lock and store
        if GLOBAL_LOCK.acquire(blocking=threading.get_ident() == thread):
            stack.callback(GLOBAL_LOCK.release)
            stack.enter_context(own_store(root))
        stack.enter_context(root._pyro_context)
        root._pyro_context.cache.update(values)
        yield
