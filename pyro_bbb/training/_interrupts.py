"""Ctrl-C during training: it ends after the step under way, which is not left half done."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Interrupts:
    """While it is open, the first Ctrl-C is noted; a second one raises KeyboardInterrupt at once.

    Where Python's own handler is not in place, or in another thread than the main one, Ctrl-C does
    what it did before.

    Attributes:
        noted: whether Ctrl-C came.
        asked: whether training is to end, which is the same where it is of one process.
    """

    def __init__(self) -> None:
        self.noted = self.asked = False
        self._placed = False

    def __enter__(self) -> Interrupts:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._placed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._placed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.noted:
            signal.default_int_handler(number, frame)
        self.noted = True
        self._ask()

    def _ask(self) -> None:
        self.asked = True


class AgreedInterrupts(Interrupts):
    """`Interrupts` of several processes: ``asked`` is set where they have agreed on it."""

    def _ask(self) -> None:
        """The next step tells the others."""
