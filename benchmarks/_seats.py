"""Contenders in processes of their own, as their users run them.

In one process all would share the memory that the C library keeps: one that frees large blocks
teaches it to keep them for the others too, and who asks the system for memory anew in every step
depends on who else is there.
"""

import gc
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from _contenders import CONTENDERS
from _timing import Turn, no_collection, timed
from _work import Trainer, Work

SETTLE = 0.02  # seconds, in which the threads of the turn before stop to wait for work


class Seat:
    """Where one contender trains."""

    def __init__(self, contender: str) -> None:
        self._contender = CONTENDERS[contender]
        self._turns: dict[Work, Turn] = {}

    def prepare(self, works: Iterable[Work]) -> str | None:
        """Makes ready for some work, and forgets that of before; returns why it cannot."""
        self._turns.clear()
        for work in works:
            trainer = self._contender.prepare(work)
            if not isinstance(trainer, Trainer):
                return trainer
            self._turns[work] = timed(trainer.take, work.device)
        return None

    def take(self, work: Work, count: int) -> list[float]:
        """Takes so many steps: the seconds of each."""
        return self._turns[work](count)


class Elsewhere:
    """A `Seat` in another process."""

    def __init__(self, contender: str) -> None:
        context = get_context("spawn")
        self._pipe, other = context.Pipe()
        arguments = contender, torch.get_num_threads(), other
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        other.close()

    def prepare(self, works: Iterable[Work]) -> str | None:
        """As there."""
        absent: str | None = self._ask("prepare", list(works))
        return absent

    def take(self, work: Work, count: int) -> list[float]:
        """As there."""
        time.sleep(SETTLE)
        times: list[float] = self._ask("take", work, count)
        return times

    def leave(self) -> None:
        """Ends the process."""
        self._pipe.close()
        self._process.join()

    def _ask(self, *order: Any) -> Any:
        self._pipe.send(order)
        try:
            return self._pipe.recv()
        except EOFError:
            raise RuntimeError("the process of a contender failed; it says why above") from None


def _serve(contender: str, threads: int, pipe: Connection) -> None:
    """Does what it is told until nobody is left to tell it."""
    torch.set_num_threads(threads)
    seat = Seat(contender)
    with no_collection():
        while True:
            try:
                what, *arguments = pipe.recv()
            except EOFError:
                return
            answer = getattr(seat, what)(*arguments)
            gc.collect()
            pipe.send(answer)


@contextmanager
def seats(
    contenders: Iterable[str], *, one_process: bool
) -> Iterator[Mapping[str, Seat | Elsewhere]]:
    """A seat for each of some contenders, by its name."""
    names = dict.fromkeys(contenders)
    if one_process:
        yield {name: Seat(name) for name in names}
        return
    others = {name: Elsewhere(name) for name in names}
    try:
        yield others
    finally:
        for other in others.values():
            other.leave()
