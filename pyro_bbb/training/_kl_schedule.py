# SPDX-License-Identifier: Apache-2.0
r"""The weights $\pi_i$ that minibatches give to the KL, and how they grow over the epochs.

Blundell et al. (2015), section 3.4 and equation 9.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import TypeAlias

from torch import Tensor

from pyro_bbb._utils.validation import at_least_zero, count, one_of, positive

BatchWeight: TypeAlias = Callable[[int, int], float]


def uniform(batch: int, num_batches: int, batch_size: int, num_data: int) -> float:
    r"""$\pi_i = |D_i| / N$: every example carries the same share of the KL."""
    return batch_size / num_data


def blundell(batch: int, num_batches: int, batch_size: int, num_data: int) -> float:
    r"""$\pi_i = 2^{M-i} / (2^M - 1)$: the first batches carry most (equation 9).

    Written as $2^{-i} / (1 - 2^{-M})$, which cannot overflow.
    """
    return math.ldexp(1.0, -batch) / -math.expm1(-num_batches * math.log(2))


_NAMED = {"uniform": uniform, "blundell": blundell}


@dataclass(frozen=True)
class KLSchedule:
    r"""The weights $\pi_i$ of the KL over the minibatches of training.

    Args:
        base: ``"uniform"``, ``"blundell"``, or a function of the batch's number in its epoch
            (from 1) and the number of batches per epoch.
        temperature: factor of every weight; below 1 it gives a "cold" posterior.
        warmup_epochs: over this many first epochs the weight grows linearly from 0 to its value.
        initial_temperature: where the temperature starts, if not where it ends.
        cooling_epochs: over this many first epochs the temperature goes, by equal factors, from
            ``initial_temperature`` to ``temperature``.

    Raises:
        ValueError: an unknown name, or a number out of range.
        TypeError: ``base`` is of another kind.
    """

    base: str | BatchWeight = "uniform"
    temperature: float = 1.0
    warmup_epochs: float = 0.0
    initial_temperature: float | None = None
    cooling_epochs: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.base, str):
            one_of("kl_schedule", self.base, sorted(_NAMED))
        elif not callable(self.base):
            raise TypeError(f"kl_schedule must be a name or a function, got {self.base!r}")
        positive("temperature", self.temperature)
        at_least_zero("warmup_epochs", self.warmup_epochs)
        at_least_zero("cooling_epochs", self.cooling_epochs)
        if self.initial_temperature is not None:
            positive("initial_temperature", self.initial_temperature)
        if (self.initial_temperature is None) != (self.cooling_epochs == 0):
            raise ValueError(
                "initial_temperature and cooling_epochs must be given together, got "
                f"{self.initial_temperature} and {self.cooling_epochs}"
            )

    def weight(
        self, *, batch: int, num_batches: int, batch_size: int, num_data: int, epoch: int = 0
    ) -> float:
        """Return the weight of one minibatch.

        Args:
            batch: its number in the epoch, from 1.
            num_batches: batches per epoch, M.
            batch_size: its number of examples.
            num_data: examples in the whole training set, N.
            epoch: number of the epoch, from 0.

        Raises:
            ValueError: a function of the user's gave a negative weight, or NaN; or a number is out
                of range.
            TypeError: the function gave no number.
        """
        count("batch", batch)
        count("num_batches", num_batches)
        count("batch_size", batch_size)
        count("num_data", num_data)
        count("epoch", epoch, least=0)
        if isinstance(self.base, str):
            weight = _NAMED[self.base](batch, num_batches, batch_size, num_data)
        else:
            weight = self.base(batch, num_batches)
            if not isinstance(weight, Real | Tensor):
                raise TypeError(f"kl_schedule must give numbers, got {weight!r}")
            weight = float(weight)
        if not 0 <= weight < math.inf:
            raise ValueError(f"kl_schedule must give weights of at least 0, got {weight}")
        epochs = epoch + batch / num_batches
        warmup = min(1.0, epochs / self.warmup_epochs) if self.warmup_epochs else 1.0
        return weight * self._temperature(epochs) * warmup

    def _temperature(self, epochs: float) -> float:
        if self.initial_temperature is None or epochs >= self.cooling_epochs:
            return self.temperature
        ratio = self.initial_temperature / self.temperature
        return self.temperature * ratio ** (1 - epochs / self.cooling_epochs)


def as_kl_schedule(schedule: str | BatchWeight | KLSchedule) -> KLSchedule:
    """Return a schedule from its name or a function."""
    return schedule if isinstance(schedule, KLSchedule) else KLSchedule(schedule)
