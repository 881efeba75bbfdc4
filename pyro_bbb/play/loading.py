# SPDX-License-Identifier: Apache-2.0
"""The networks that the page waits for: opened from a folder, or trained and saved there first.

The training has a process of its own. In a thread it would hold the lock of `fit` from its first
step to its last, and the page's own predictions would wait.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from pyro_bbb.data import load_images
from pyro_bbb.play.classifier import Classifier, open_saved
from pyro_bbb.play.train import DETERMINISTIC, train_mnist, train_small, unseen_digits

ERRORS = (OSError, ValueError, RuntimeError)  # of data, files and trainings
_SUBFOLDER = "deterministic"  # of the folder of the Bayesian network


@dataclass(frozen=True)
class Networks:
    """The networks of the page, and digits to show them."""

    bayesian: Classifier
    deterministic: Classifier | None  # trained alike; beside a user's own model there is none
    digits: dict[str, Tensor]  # not trained on, flat, by name


@dataclass
class Loading:
    """The networks of a folder, or how far their training is, or its error."""

    folder: Path
    data_root: Path | None = None
    progress: float = 0.0
    networks: Networks | None = None
    error: str | None = None

    def is_saved(self, *, both: bool) -> bool:
        """Tell whether the folder holds a Bayesian network, or that and the deterministic one."""
        folders = [self.folder, self.folder / _SUBFOLDER] if both else [self.folder]
        return all((folder / "spec.json").exists() for folder in folders)

    def require_data(self) -> None:
        """Read the data of a training once, so that its errors come before the page.

        Raises:
            OSError, RuntimeError: a file is missing or damaged.
        """
        if self.data_root is not None:
            for train in (True, False):
                load_images("mnist", root=self.data_root, train=train)

    def open(self) -> None:
        """Open what is saved.

        Raises:
            OSError, ValueError, RuntimeError: it, or the data, cannot be read or is of no use.
        """
        bayesian = open_saved(self.folder)
        found = open_saved(self.folder / _SUBFOLDER, draws=1) if self.is_saved(both=True) else None
        alike = found if found is not None and found.shape == bayesian.shape else None
        self.networks = Networks(bayesian, alike, unseen_digits(bayesian.side, self.data_root))

    def train(self) -> None:
        """Train in a new process, follow it to its end, and open what it saved."""
        context = multiprocessing.get_context("spawn")  # a fork would inherit locked threads
        receiver, sender = context.Pipe(duplex=False)
        arguments = (sender, self.folder, self.data_root)
        process = context.Process(target=_train, args=arguments, daemon=True)
        process.start()
        sender.close()  # so that the messages end with the process
        with suppress(EOFError):
            while True:
                self._receive(receiver.recv())
        process.join()
        if process.exitcode == -signal.SIGTERM:
            return  # this process is at its end, and ended that one
        if process.exitcode:
            self.error = f"the training ended with exit code {process.exitcode}"
        if self.error is None:
            self._open_trained()

    def _open_trained(self) -> None:
        try:
            self.open()
        except ERRORS as error:
            self.error = str(error)

    def _receive(self, message: float | str) -> None:
        if isinstance(message, str):
            self.error = message
        else:
            self.progress = message


def _train(sender: Connection, folder: Path, data_root: Path | None) -> None:
    """Train in the new process; send the fraction done, or the error."""
    torch.set_num_threads(1)  # the other processors are the page's
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process of the page, and so this
    try:
        _train_both(sender.send, folder, data_root)
    except ERRORS as error:
        sender.send(str(error))


def _train_both(send: Callable[[float], None], folder: Path, data_root: Path | None) -> None:
    """The deterministic network takes about a third of the time; the other one is saved last."""
    learn = train_small if data_root is None else partial(train_mnist, data_root)
    plain = learn(guide=DETERMINISTIC, report=lambda part: send(part / 3))
    plain.save(folder / _SUBFOLDER)
    learn(report=lambda part: send((1 + 2 * part) / 3)).save(folder)
