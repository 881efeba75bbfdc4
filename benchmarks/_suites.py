"""Training: single steps over widths, minibatches, draws and estimators; whole epochs of `fit`."""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

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
from _seats import Elsewhere, Seat, seats
from _timing import Action, Comparison, interleave, repeated, timed
from _work import Trainer, Work, fused_adam, images
from torch import Tensor

import pyro_bbb as bbb

MANY = 10  # draws of the slower epoch
BATCH = 128

Entries: TypeAlias = dict[str, tuple[str, Work]]  # contender and its work, by the name shown


def steps(effort: Effort, device: str) -> list[Comparison]:
    """Single training steps of all contenders, each in a process of its own."""
    widths = [Work(hidden=hidden, device=device) for hidden in effort.widths]
    cases = [(f"width {work.hidden}, batch {BATCH}", _all(work, LIBRARIES)) for work in widths]
    first = widths[0]
    for batch in effort.batches:
        work = replace(first, batch=batch)
        cases.append((f"width {first.hidden}, batch {batch}", _all(work, LIBRARIES)))
    ours = [FLOOR, OURS, OURS_GAUSSIAN, *ESTIMATORS]
    title = f"gradient estimators of pyro_bbb, width {first.hidden}"
    cases.append((title, _all(first, ours)))
    if effort.lenet5:
        lenet5 = Work(architecture="lenet5", device=device)
        cases.append((f"LeNet-5, batch {BATCH}", _all(lenet5, IMAGES)))
    title = f"draws per step, width {first.hidden}, batch {BATCH}"
    cases.append((title, _several_draws(effort, first)))
    names = [name for _, entries in cases for name, _ in entries.values()]
    with seats(names, one_process=effort.one_process) as places:
        return [_compare(effort, title, entries, places) for title, entries in cases]


def _all(work: Work, names: Iterable[str]) -> Entries:
    return {name: (name, work) for name in names}


def _several_draws(effort: Effort, work: Work) -> Entries:
    entries = {FLOOR: (FLOOR, work)}
    for name in SEVERAL_DRAWS:
        for draws in effort.draws:
            entries[several(name, draws)] = (name, replace(work, draws=draws))
    return entries


def several(name: str, draws: int) -> str:
    """What a contender with so many draws per step is called."""
    return f"{name} x {draws}"


def _compare(
    effort: Effort, title: str, entries: Entries, places: Mapping[str, Seat | Elsewhere]
) -> Comparison:
    """Steps of contenders, each with its work."""
    works: dict[str, list[Work]] = {}
    for name, work in entries.values():
        works.setdefault(name, []).append(work)
    reasons = {name: places[name].prepare(its) for name, its in works.items()}
    absent = {
        shown: reason
        for shown, (name, _) in entries.items()
        if (reason := reasons[name]) is not None
    }
    actions = {
        shown: Action(partial(places[name].take, work), burst=effort.burst, unseen=effort.unseen)
        for shown, (name, work) in entries.items()
        if shown not in absent
    }
    limits: dict[str, Any] = {"seconds": effort.seconds, "min_rounds": effort.min_rounds}
    rounds = interleave(actions, **limits, warmup=3)
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
        LOOP: Action(timed(repeated(_deterministic_epoch(work, x, y)), device)),
        STEPS: Action(timed(trainer.take, device), burst=min(count, 100), unseen=1),
        FIT: Action(timed(repeated(_fit_epoch(work, x, y, 1)), device)),
        FIT_MANY: Action(timed(repeated(_fit_epoch(work, x, y, MANY)), device)),
    }
    rounds = interleave(actions, seconds=0.0, min_rounds=effort.slow_rounds, warmup=0)
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
