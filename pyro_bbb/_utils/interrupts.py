# SPDX-License-Identifier: Apache-2.0
"""Interruption of training by Ctrl-C, after the step under way."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Interrupts:
    """While it is open, the first Ctrl-C is noted; a second one raises KeyboardInterrupt at once.

    Where Python's own handler is not installed, or in another thread than the main one, Ctrl-C does
    what it did before.
    """

    def __init__(self) -> None:
        self.noted = False  # Ctrl-C came in this process
        self.stop = False  # training is to end
        self._installed = False

    def __enter__(self) -> Interrupts:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._installed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.noted:
            signal.default_int_handler(number, frame)
        self.noted = True
        self._request()

    def _request(self) -> None:
        self.stop = True


class AgreedInterrupts(Interrupts):
    """`Interrupts` of several processes: ``stop`` is set once they have agreed on it."""

    def _request(self) -> None:
        """Leave it to the next step, which tells the other processes."""
