# SPDX-License-Identifier: Apache-2.0
"""Sizes and times of a default, a quick and a smoke run."""

from dataclasses import dataclass, field

from _parts.methods import FLOOR, LIBRARIES, OURS, OURS_GAUSSIAN, PLAIN


@dataclass(frozen=True)
class Budget:
    """Sizes and durations of the measurements."""

    seconds: float = 80.0
    """Time of one comparison of training steps; rounds begin until it has passed."""
    min_rounds: int = 5
    """Rounds of steps, at least."""
    burst: int = 8
    """Steps timed per turn."""
    unseen: int = 8
    """Steps before them that are not timed: the first ones of a turn take longer."""
    widths: tuple[int, ...] = (400, 800, 1200)
    """Hidden units, at 128 examples per step."""
    batches: tuple[int, ...] = (32, 1024)
    """Other numbers of examples, at the first width."""
    draws: tuple[int, ...] = (1, 2, 10)
    """Draws of the weights per step."""
    lenet5: bool = True
    """Measure LeNet-5, too."""
    rows: int = 60_000
    """Examples of an epoch."""
    epochs: int = 5
    """Rounds of epochs."""
    slow_rounds: int = 3
    """Rounds of predictions, at least."""
    predictions: tuple[int, ...] = (1, 100, 10_000)
    """Inputs of one prediction."""
    samples: int = 100
    """Posterior draws of one prediction."""
    memory_width: int = 1200
    """Hidden units where memory is measured."""
    memory_of: tuple[str, ...] = tuple(LIBRARIES)
    """Methods whose memory is measured."""
    memory_predictions: tuple[tuple[int, int], ...] = (
        (100, 1000),
        (100, 10_000),
        (1000, 1000),
        (1000, 10_000),
    )
    """Posterior draws and inputs of the predictions whose memory is measured."""
    small_steps: int = 1200
    """Steps of a run of a small network."""
    small_rounds: int = 3
    """Rounds of such runs."""
    small_networks: int = 5
    """Such networks, the smallest first."""
    small_threads: tuple[int, ...] = (1, 2)
    """Threads of the processes that run them."""
    cold_steps: int = 4000
    """Steps of a run whose compilation counts."""
    small_widest: int = 4000
    """Hidden units of the largest network in the picture of all sizes."""
    guide_tasks: int = 3
    """Networks that guides are compared on."""
    guides: dict[str, int] = field(default_factory=dict)
    """Their rows and steps, if other than their own."""
    table_rows: tuple[int, ...] = (353, 5000, 100_000)
    """Rows of the tables that estimators are fitted to."""
    table_epochs: int | None = None
    """Epochs of our fits to them; by default the estimator decides."""
    one_process: bool = False
    """Whether all is measured in one process: quicker, but methods then use one heap."""


DEFAULT = Budget()
QUICK = Budget(
    seconds=2.0,
    min_rounds=3,
    burst=4,
    unseen=3,
    widths=(400, 1200),
    batches=(32,),
    draws=(1, 10),
    rows=2560,
    epochs=2,
    slow_rounds=2,
    predictions=(1, 100, 1000),
    memory_of=(FLOOR, OURS, OURS_GAUSSIAN, PLAIN),
    memory_predictions=((100, 1000),),
    small_steps=300,
    small_rounds=2,
    small_threads=(1,),
    small_widest=400,
    table_rows=(353, 5000),
)
SMOKE = Budget(
    seconds=0.0,
    min_rounds=2,
    burst=1,
    unseen=1,
    widths=(8,),
    batches=(),
    draws=(1, 10),
    lenet5=False,
    rows=256,
    epochs=1,
    slow_rounds=1,
    predictions=(1, 3),
    samples=3,
    memory_width=8,
    memory_of=(FLOOR, OURS),
    memory_predictions=((3, 5),),
    small_steps=2,
    small_rounds=1,
    small_networks=2,
    small_threads=(1,),
    cold_steps=3,
    small_widest=6,
    guide_tasks=1,
    guides={"rows": 256, "steps": 2},
    table_rows=(20,),
    table_epochs=2,
    one_process=True,
)
