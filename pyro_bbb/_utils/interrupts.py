# SPDX-License-Identifier: Apache-2.0
"""Interruption of training by Ctrl-C, after the step under way."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """Inside, the first Ctrl-C is noted; a second one raises KeyboardInterrupt at once.

    Where Python's own handler is not installed, or in another thread than the main one, Ctrl-C does
    what it did before. ``agreed`` leaves ``stop`` to the next step, in which processes agree on it.
    """

    def __init__(self, *, agreed: bool = False) -> None:
        self.agreed = agreed
        self.noted = False  # Ctrl-C came in this process
        self.stop = False  # training is to end
        self._installed = False

    def __enter__(self) -> Interrupts:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._installed = True
        return self

    def __exit__(self, *_: Any) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.noted:
            signal.default_int_handler(number, frame)
        self.noted = True
        self.stop = not self.agreed
