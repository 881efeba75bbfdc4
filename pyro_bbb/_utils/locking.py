"""One thread at a time: the others wait until the global state that one has changed is back.

Pyro keeps its effect handlers, its parameters and whether it validates, and torch its generator,
in places that all threads share. Two trainings in threads so run one after the other, and each
gives what it gives alone. A thread that already has its turn may go on: a callback of one training
can run another one.
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
    """A function that waits for its turn, and has it until it returns or raises."""

    @functools.wraps(function)
    def locked_call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        with GLOBAL_LOCK:
            return function(*args, **kwargs)

    return locked_call
