# SPDX-License-Identifier: Apache-2.0
"""The options of one call of `fit`, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from pyro_bbb._utils.locking import cached_property
from pyro_bbb._utils.validation import as_float, as_number, count, function, one_of
from pyro_bbb.elbo import minibatch_elbo
from pyro_bbb.estimators import ESTIMATORS
from pyro_bbb.training._ivon import IVON, IVON_LR
from pyro_bbb.training._schedules import KLSchedule, as_kl_schedule, default_lr, lr_factor

NONFINITE = ("raise", "skip")
ENGINES = ("auto", "eager", "compiled")


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """Options of `fit`, under its names, with its meanings and its errors."""

    epochs: int
    batch_size: int
    lr: float | None
    optimizer: Any
    lr_schedule: str | Callable[[float], float]
    num_particles: int
    kl_schedule: Any
    estimator: str
    loss: Any
    callbacks: Iterable[Callable[[Any], bool | None]]
    checkpoint: str | PathLike[str] | None
    checkpoint_every: int | None
    nonfinite: str
    device: torch.device | str | None
    autocast: torch.dtype | None
    accumulate: int
    cuda_graph: bool
    engine: str
    progress: bool
    seed: int | None
    patience: int | None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_names()
        self._check_cuda_graph()
        lr_factor(self.lr_schedule)
        as_kl_schedule(self.kl_schedule)
        minibatch_elbo(self.loss, self.num_particles)

    @cached_property
    def ivon(self) -> IVON | None:
        """The options of IVON, if that is the optimiser."""
        named = isinstance(self.optimizer, str) and self.optimizer == "ivon"
        return IVON() if named else self.optimizer if isinstance(self.optimizer, IVON) else None

    @cached_property
    def schedule(self) -> KLSchedule:
        """The weights of the KL."""
        return as_kl_schedule(self.kl_schedule)

    def initial_lr(self, steps_per_epoch: int) -> float:
        """Learning rate at the start."""
        if self.lr is not None:
            return self.lr
        if self.ivon is not None:
            return IVON_LR
        return default_lr(self.epochs * steps_per_epoch) if self.optimizer is None else 1e-3

    def lr_factor(self, progress: float) -> float:
        """Factor of the learning rate after a fraction ``progress`` of the training."""
        return lr_factor(self.lr_schedule)(progress)

    def last_kl_weight(self, num_data: int) -> float:
        """Weight of the KL in the last epoch, as in one minibatch of all data."""
        sizes = {"batch_size": num_data, "num_data": num_data}
        return self.schedule.weight(batch=1, num_batches=1, epoch=self.epochs - 1, **sizes)

    def checked_callbacks(self) -> tuple[Callable[[Any], bool | None], ...]:
        """The callbacks, each of which can be called; an iterator is read once."""
        if not isinstance(self.callbacks, Iterable):
            raise TypeError(f"callbacks must be several functions, got {self.callbacks!r}")
        found = tuple(self.callbacks)
        for callback in found:
            function("each of callbacks", callback, "(EpochEnd) -> bool or None")
        return found

    def _check_numbers(self) -> None:
        count("epochs", self.epochs)
        lr = as_number(self.lr)
        if lr is None:
            return
        object.__setattr__(self, "lr", lr)
        number = isinstance(lr, (int, float)) and not isinstance(lr, bool)
        if not number or not 0 < as_float(lr) < math.inf:
            raise ValueError(f"lr must be a positive number, got {lr!r}")

    def _check_names(self) -> None:
        one_of("estimator", self.estimator, ESTIMATORS)
        if self.autocast is torch.float16:
            raise ValueError("autocast must be torch.bfloat16: torch.float16 needs loss scaling")
        if self.autocast not in (None, torch.bfloat16):
            raise ValueError(f"autocast must be None or torch.bfloat16, got {self.autocast!r}")
        one_of("nonfinite", self.nonfinite, NONFINITE)
        one_of("engine", self.engine, ENGINES)

    def _check_cuda_graph(self) -> None:
        count("accumulate", self.accumulate)
        if self.cuda_graph and self.engine == "eager":
            raise ValueError("engine must not be 'eager' with cuda_graph=True")
        if self.cuda_graph and self.accumulate > 1:
            raise ValueError("accumulate must be 1 with cuda_graph=True, which captures one step")
        if self.cuda_graph and self.nonfinite == "skip":
            raise ValueError(
                "nonfinite='skip' reads the loss of every step, which cuda_graph=True does not"
            )
