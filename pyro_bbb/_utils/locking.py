# SPDX-License-Identifier: Apache-2.0
"""Global lock around code that changes global state of Pyro and torch.

Pyro has one stack of effect handlers, one parameter store and one validation switch for all
threads, torch one generator and one number of threads. Every public function that uses one of them
holds the lock, so that calls in threads run one after the other. It is reentrant: a callback of one
training may run another one.

A process that is forked while another thread holds the lock gets a new one, and the functions in
`AFTER_FORK` undo the changes of that thread, which the new process lacks.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

Args = ParamSpec("Args")
Result = TypeVar("Result")
GLOBAL_LOCK = threading.RLock()
AFTER_FORK: list[Callable[[], None]] = []


def locked(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Decorate a function to hold the global lock until it returns or raises."""

    @functools.wraps(function)
    def locked_call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        with GLOBAL_LOCK:
            return function(*args, **kwargs)

    return locked_call


def lock_methods(cls: type[Result], *others: str) -> type[Result]:
    """Decorate a class: lock its constructor, the public methods that it defines, and others."""
    for name, value in list(vars(cls).items()):
        public = name in ("__init__", *others) or not name.startswith("_")
        if public and inspect.isfunction(value):
            setattr(cls, name, locked(value))
    return cls


class cached_property(Generic[Result]):  # noqa: N801
    """A `functools.cached_property` without lock: that of Python 3.11 stops compilers and forks."""

    def __init__(self, function: Callable[[Any], Result]) -> None:
        self.function: Callable[[Any], Result] = function
        self.__doc__ = function.__doc__

    @overload
    def __get__(self, instance: None, owner: Any) -> cached_property[Result]: ...
    @overload
    def __get__(self, instance: object, owner: Any) -> Result: ...
    def __get__(self, instance: Any, owner: Any) -> Any:
        if instance is None:
            return self
        value = instance.__dict__[self.function.__name__] = self.function(instance)
        return value


def _renew_after_fork() -> None:
    if GLOBAL_LOCK.acquire(blocking=False):
        GLOBAL_LOCK.release()
        return
    GLOBAL_LOCK._at_fork_reinit()  # type: ignore[attr-defined]
    for recover in AFTER_FORK:
        recover()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)
