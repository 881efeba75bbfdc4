# SPDX-License-Identifier: Apache-2.0
"""Sizes and times of a run, and of a smoke run."""

from dataclasses import dataclass

from _parts.methods import FLOOR, LIBRARIES, OURS


@dataclass(frozen=True)
class Budget:
    """Sizes and durations of the measurements."""

    seconds: float = 80.0  # of one comparison of training steps, at least
    min_rounds: int = 5
    burst: int = 8  # steps timed per turn
    unseen: int = 8  # steps before them
    widths: tuple[int, ...] = (400, 800, 1200)
    draws: tuple[int, ...] = (1, 10)  # of the weights per step
    rows: int = 60_000  # examples of an epoch
    epochs: int = 5  # rounds of epochs
    slow_rounds: int = 3  # rounds of predictions, at least
    predictions: tuple[int, ...] = (1, 100, 10_000)  # inputs of one
    samples: int = 100  # draws of a prediction
    memory_width: int = 1200
    memory_of: tuple[str, ...] = tuple(LIBRARIES)
    small_steps: int = 1200  # of a run of a small network
    small_rounds: int = 3
    small_networks: int = 5  # the smallest first
    small_threads: tuple[int, ...] = (1, 2)
    cold_steps: int = 4000  # of a run whose compilation counts
    small_widest: int = 4000  # units of the largest network in the picture of all sizes
    table_rows: tuple[int, ...] = (353, 5000, 100_000)
    table_epochs: int | None = None  # of our fits; by default the estimator decides
    one_process: bool = False  # quicker, but methods then use one heap


SMOKE = Budget(
    seconds=0.0,
    min_rounds=2,
    burst=1,
    unseen=1,
    widths=(8,),
    rows=256,
    epochs=1,
    slow_rounds=1,
    predictions=(1, 3),
    samples=3,
    memory_width=8,
    memory_of=(FLOOR, OURS),
    small_steps=2,
    small_rounds=1,
    small_networks=2,
    small_threads=(1,),
    cold_steps=3,
    small_widest=6,
    table_rows=(20,),
    table_epochs=2,
    one_process=True,
)
