# SPDX-License-Identifier: Apache-2.0
"""``pyro-bbb play``: a page to draw digits, to place points and to rotate digits.

The networks are opened from a folder, or trained and saved there first, in a process: in a thread
the training would hold the lock of `fit`, and the page's predictions would wait.
"""

from __future__ import annotations

import multiprocessing
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from pyro_bbb._utils.extras import extra
from pyro_bbb.apps.command_line import BadInput, Play
from pyro_bbb.apps.digit_classifier import DETERMINISTIC, Classifier, open_saved, train
from pyro_bbb.data.cache import cache_folder

ERRORS = (OSError, ValueError, RuntimeError)  # of data, files and trainings
_SUBFOLDER = "deterministic"  # of the folder of the Bayesian neural network


@dataclass
class Networks:
    """The networks of a folder, or the progress of their training, or its error."""

    folder: Path
    progress: float = 0.0
    trained: tuple[Classifier, Classifier] | None = None  # Bayesian and deterministic
    error: str | None = None

    def open(self) -> None:
        """Open the saved networks; one of `ERRORS` if that fails."""
        self.trained = open_saved(self.folder), open_saved(self.folder / _SUBFOLDER, draws=1)

    @contextmanager
    def training(self, say: Callable[[str], None]) -> Iterator[None]:
        """Train in a new process while the block runs; its end stops the training.

        The thread that follows the process ends with the block too: one that is still inside
        torch when the interpreter ends aborts this process.
        """
        say("training on 1,797 digits of 8x8 pixels; the page shows the progress")
        context = multiprocessing.get_context("spawn")  # a fork would inherit locked threads
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_train, args=(sender, self.folder), daemon=True)
        process.start()
        sender.close()  # so that the messages end with the process
        follower = threading.Thread(target=self._follow, args=(process, receiver, say))
        follower.start()
        try:
            yield
        finally:
            process.terminate()
            follower.join()

    def _follow(
        self, process: BaseProcess, receiver: Connection, say: Callable[[str], None]
    ) -> None:
        """Read the progress of the training to its end, and open the saved networks."""
        with suppress(EOFError):
            while not isinstance(message := receiver.recv(), str):
                self.progress = message
            self.error = message
        process.join()
        if process.exitcode == -signal.SIGTERM:
            return  # the page is closed
        if process.exitcode:
            self.error = f"the training ended with exit code {process.exitcode}"
        if self.error is None:
            try:
                self.open()
            except ERRORS as error:
                self.error = str(error)
        say(self.error or f"saved in {self.folder}")


def play(options: Play) -> dict[str, Any]:
    """Open the networks, or train them behind the page; serve until Ctrl-C."""
    with extra("play"):
        from pyro_bbb.apps.play_page import serve
    try:
        with socket.create_server((options.host, options.port)):
            pass
    except (OSError, OverflowError) as error:
        place = f"{options.host}:{options.port}"
        raise BadInput(f"cannot answer at {place}: {error}; try another --port") from error
    networks = Networks(options.model or cache_folder() / "play-digits")
    training: AbstractContextManager[None] = nullcontext()
    if (networks.folder / "spec.json").exists():  # the Bayesian neural network is saved last
        try:
            networks.open()
        except ERRORS as error:
            raise BadInput(str(error)) from error
    else:
        training = networks.training(options.say)
    with suppress(KeyboardInterrupt), training:
        options.say(f"http://{options.host}:{options.port}/ (Ctrl-C ends)")
        serve(networks, host=options.host, port=options.port, show=not options.no_browser)
    if networks.error is not None:
        raise BadInput(networks.error)
    return {}


def _train(sender: Connection, folder: Path) -> None:
    """Train both networks in the new process; send the fraction done, or the error.

    The deterministic network takes a third of the time.
    """
    torch.set_num_threads(1)  # the other processors are the page's
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process of the page, and so this
    try:
        plain = train(guide=DETERMINISTIC, report=lambda done: sender.send(done / 3))
        plain.save(folder / _SUBFOLDER)
        train(report=lambda done: sender.send((1 + 2 * done) / 3)).save(folder)
    except ERRORS as error:
        sender.send(str(error))
