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
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_bbb._utils.extras import extra
from pyro_bbb.apps.bad_input import BadInput
from pyro_bbb.apps.command_line import Console, Play
from pyro_bbb.apps.digit_classifier import (
    DETERMINISTIC,
    Classifier,
    open_saved,
    train,
    unseen_digits,
)
from pyro_bbb.data.cache import cache_folder

ERRORS = (OSError, ValueError, RuntimeError)  # of data, files and trainings
_SUBFOLDER = "deterministic"  # of the folder of the Bayesian network


@dataclass(frozen=True)
class Networks:
    """The networks of the page, and digits to show them."""

    bayesian: Classifier
    deterministic: Classifier | None  # None for a user's model
    digits: dict[str, Tensor]  # not trained on, flat, by name


@dataclass
class Loading:
    """The networks of a folder, or the progress of their training, or its error."""

    folder: Path
    progress: float = 0.0
    networks: Networks | None = None
    error: str | None = None

    def is_saved(self, *, both: bool) -> bool:
        """Return whether the folder holds a Bayesian network, or that and the deterministic one."""
        folders = [self.folder, self.folder / _SUBFOLDER] if both else [self.folder]
        return all((folder / "spec.json").exists() for folder in folders)

    def open(self) -> None:
        """Open the saved networks; one of `ERRORS` if that fails."""
        bayesian = open_saved(self.folder)
        plain = open_saved(self.folder / _SUBFOLDER, draws=1) if self.is_saved(both=True) else None
        alike = plain if plain is not None and plain.shape == bayesian.shape else None
        self.networks = Networks(bayesian, alike, unseen_digits(bayesian.side))

    def train(self) -> None:
        """Train in a new process, follow it to its end, and open the saved networks."""
        context = multiprocessing.get_context("spawn")  # a fork would inherit locked threads
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_train, args=(sender, self.folder), daemon=True)
        process.start()
        sender.close()  # so that the messages end with the process
        with suppress(EOFError):
            while True:
                message = receiver.recv()
                if isinstance(message, str):
                    self.error = message
                else:
                    self.progress = message
        process.join()
        if process.exitcode == -signal.SIGTERM:
            return  # this process is at its end, and ended that one
        if process.exitcode:
            self.error = f"the training ended with exit code {process.exitcode}"
        if self.error is None:
            try:
                self.open()
            except ERRORS as error:
                self.error = str(error)


def play(options: Play, console: Console) -> dict[str, Any]:
    """Open the networks, or train them behind the page; serve until Ctrl-C."""
    with extra("play"):
        from pyro_bbb.apps.play_page import serve
    _require_free(options.host, options.port)
    loading = Loading(options.model or cache_folder() / "play-digits")
    try:
        if loading.is_saved(both=options.model is None):
            loading.open()
        else:
            threading.Thread(target=_follow, args=(loading, console), daemon=True).start()
    except ERRORS as error:
        raise BadInput(str(error)) from error
    console.print(f"http://{options.host}:{options.port}/ (Ctrl-C ends)")
    with suppress(KeyboardInterrupt):
        serve(loading, host=options.host, port=options.port, show=not options.no_browser)
    if loading.error is not None:
        raise BadInput(loading.error)
    return {}


def _follow(loading: Loading, console: Console) -> None:
    console.print("training on 1,797 digits of 8x8 pixels; the page shows the progress")
    loading.train()
    if loading.networks is not None:
        console.print(f"saved in {loading.folder}")
    elif loading.error is not None:
        console.print(loading.error)


def _require_free(host: str, port: int) -> None:
    try:
        with socket.create_server((host, port)):
            pass
    except (OSError, OverflowError) as error:
        raise BadInput(f"cannot answer at {host}:{port}: {error}; try another --port") from error


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
