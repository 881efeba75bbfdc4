# SPDX-License-Identifier: Apache-2.0
"""Global lock around code that changes global state of Pyro and torch.

Pyro has one stack of effect handlers, one parameter store and one validation switch for all
threads, torch one generator. The lock runs trainings in threads one after the other. It is
reentrant: a callback of one training may run another one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Args = ParamSpec("Args")
Result = TypeVar("Result")
GLOBAL_LOCK = threading.RLock()


def locked(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Decorate a function to hold the global lock until it returns or raises."""

    @functools.wraps(function)
    def locked_call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        with GLOBAL_LOCK:
            return function(*args, **kwargs)

    return locked_call
