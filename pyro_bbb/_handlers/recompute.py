# SPDX-License-Identifier: Apache-2.0
"""Second runs of a part of a forward pass, during the backward pass: `torch.utils.checkpoint`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch.overrides import _get_current_function_mode_stack

from pyro_bbb._handlers.param_store import own_store
from pyro_bbb._utils.locking import GLOBAL_LOCK


def same_draws(root: Any) -> AbstractContextManager[None]:
    """Return a context in which the running `PyroModule` has the weights and noise of now."""
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
