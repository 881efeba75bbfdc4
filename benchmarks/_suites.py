"""Training: single steps over widths, minibatches, draws and estimators; whole epochs of `fit`."""

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from _contenders import (
    CONTENDERS,
    ESTIMATORS,
    FLOOR,
    IMAGES,
    LIBRARIES,
    OURS,
    OURS_GAUSSIAN,
    SEVERAL_DRAWS,
)
from _effort import Effort
from _pyro import guided
from _timing import Action, Comparison, interleave, repeated
from _work import Trainer, Work, fused_adam, images
from torch import Tensor

import pyro_bbb as bbb

MANY = 10  # draws of the slower epoch
BATCH = 128


def steps(effort: Effort, device: str) -> list[Comparison]:
    """Single training steps of all contenders."""
    widths = [Work(hidden=hidden, device=device) for hidden in effort.widths]
    cases = [(f"width {work.hidden}, batch {BATCH}", work, LIBRARIES) for work in widths]
    first = widths[0]
    for batch in effort.batches:
        work = replace(first, batch=batch)
        cases.append((f"width {first.hidden}, batch {batch}", work, LIBRARIES))
    ours = [FLOOR, OURS, OURS_GAUSSIAN, *ESTIMATORS]
    cases.append((f"gradient estimators of pyro_bbb, width {first.hidden}", first, ours))
    if effort.lenet5:
        lenet5 = Work(architecture="lenet5", device=device)
        cases.append((f"LeNet-5, batch {BATCH}", lenet5, IMAGES))
    measured = [
        _compare(effort, title, {name: (name, work) for name in names})
        for title, work, names in cases
    ]
    return [*measured, _several_draws(effort, first)]


def _several_draws(effort: Effort, work: Work) -> Comparison:
    entries = {FLOOR: (FLOOR, work)}
    for name in SEVERAL_DRAWS:
        for draws in effort.draws:
            entries[several(name, draws)] = (name, replace(work, draws=draws))
    return _compare(effort, f"draws per step, width {work.hidden}, batch {BATCH}", entries)


def several(name: str, draws: int) -> str:
    """What a contender with so many draws per step is called."""
    return f"{name} x {draws}"


def _compare(effort: Effort, title: str, entries: dict[str, tuple[str, Work]]) -> Comparison:
    """Steps of contenders, each with its work, by the name shown."""
    prepared = {shown: CONTENDERS[name].prepare(work) for shown, (name, work) in entries.items()}
    actions = {
        shown: Action(trainer.take, burst=effort.burst, unseen=1)
        for shown, trainer in prepared.items()
        if isinstance(trainer, Trainer)
    }
    device = entries[FLOOR][1].device
    limits: dict[str, Any] = {"seconds": effort.seconds, "min_rounds": effort.min_rounds}
    rounds = interleave(actions, **limits, warmup=3, device=device)
    absent = {shown: each for shown, each in prepared.items() if isinstance(each, str)}
    return Comparison("steps", title, FLOOR, rounds, absent)


LOOP = "deterministic loop"
STEPS = "pyro_bbb, median step x steps"
FIT = "pyro_bbb.fit"
FIT_MANY = f"pyro_bbb.fit, {MANY} draws per step"


def epoch(effort: Effort, device: str) -> list[Comparison]:
    """Whole epochs, beside the steps that they are made of."""
    x, y = _training_set(effort.rows, device)
    work = Work(hidden=effort.widths[0], device=device)
    trainer = CONTENDERS[OURS].prepare(work)
    assert isinstance(trainer, Trainer)
    count = math.ceil(len(x) / BATCH)
    actions = {
        LOOP: Action(repeated(_deterministic_epoch(work, x, y))),
        STEPS: Action(trainer.take, burst=min(count, 100), unseen=1),
        FIT: Action(repeated(_fit_epoch(work, x, y, 1))),
        FIT_MANY: Action(repeated(_fit_epoch(work, x, y, MANY))),
    }
    rounds = interleave(
        actions, seconds=0.0, min_rounds=effort.slow_rounds, warmup=0, device=device
    )
    rounds[STEPS] = [[count * seconds for seconds in turn] for turn in rounds[STEPS]]
    title = f"{len(x)} examples, width {work.hidden}, batch {BATCH}"
    return [Comparison("epoch", title, LOOP, rounds)]


def _training_set(rows: int, device: str) -> tuple[Tensor, Tensor]:
    """MNIST where ``PYRO_BBB_DATA`` names its folder, else random pixels of its shape."""
    if not os.environ.get("PYRO_BBB_DATA"):
        return images(rows, device=device)
    x, y = bbb.data.load_images("mnist", device=device)
    return x[:rows].flatten(1), y[:rows]


def _fit_epoch(work: Work, x: Tensor, y: Tensor, draws: int) -> Callable[[], Any]:
    model, guide = guided(work, num_data=len(x))
    options: dict[str, Any] = {"batch_size": BATCH, "num_particles": draws, "progress": False}
    return lambda: bbb.fit(model, guide, (x, y), epochs=1, **options)


def _deterministic_epoch(work: Work, x: Tensor, y: Tensor) -> Callable[[], None]:
    network = work.network()
    adam = fused_adam(network.parameters(), work.lr)

    def run() -> None:
        for rows in _shuffled(len(x), x.device):
            adam.zero_grad()
            F.cross_entropy(network(x[rows]), y[rows]).backward()
            adam.step()

    return run


def _shuffled(count: int, device: torch.device) -> Iterable[Tensor]:
    return torch.randperm(count, device=device).split(BATCH)
