# SPDX-License-Identifier: Apache-2.0
"""Training: single steps over widths, minibatches, draws and estimators; epochs of `fit`."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

import pyro_bbb as bbb
from _parts import methods
from _parts.budget import Budget
from _parts.isolated_workers import Entry, Make, compare, start_workers
from _parts.methods import FLOOR, LIBRARIES, OURS, training
from _parts.pyro_methods import guided, metered_steps
from _parts.tasks import Work, fused_adam, images
from _parts.timing import Comparison, Meter, Take, repeated

MANY = 10  # draws of the slower epoch
BATCH = 128

Entries: TypeAlias = dict[str, Entry]  # by the name shown


def steps(budget: Budget, device: str) -> list[Comparison]:
    """Time training steps of all methods, each in a process of its own."""
    widths = [Work(hidden=hidden, device=device) for hidden in budget.widths]
    of = partial(_entries, budget)
    cases = [(f"width {work.hidden}, batch {BATCH}", of(work, LIBRARIES)) for work in widths]
    first = widths[0]
    for batch in budget.batches:
        work = replace(first, batch=batch)
        cases.append((f"width {first.hidden}, batch {batch}", of(work, LIBRARIES)))
    ours = [FLOOR, OURS, methods.OURS_GAUSSIAN, *methods.ESTIMATORS]
    title = f"gradient estimators of pyro_bbb, width {first.hidden}"
    cases.append((title, of(first, ours)))
    if budget.lenet5:
        lenet5 = Work(architecture="lenet5", device=device)
        cases.append((f"LeNet-5, batch {BATCH}", of(lenet5, methods.IMAGES)))
    title = f"draws per step, width {first.hidden}, batch {BATCH}"
    cases.append((title, _several_draws(budget, first)))
    names = {entry.method for _, entries in cases for entry in entries.values()}
    limits: dict[str, Any] = {"seconds": budget.seconds, "min_rounds": budget.min_rounds}
    makes = {name: partial(training, name) for name in names}
    with start_workers(makes, one_process=budget.one_process) as workers:
        return [
            Comparison("steps", title, FLOOR, *compare(entries, workers, **limits, warmup=3))
            for title, entries in cases
        ]


def _entries(budget: Budget, work: Work, names: Iterable[str]) -> Entries:
    return {name: _entry(budget, name, work) for name in names}


def _entry(budget: Budget, name: str, work: Work) -> Entry:
    return Entry(name, work, burst=budget.burst, unseen=budget.unseen)


def _several_draws(budget: Budget, work: Work) -> Entries:
    entries = {FLOOR: _entry(budget, FLOOR, work)}
    for name in methods.SEVERAL_DRAWS:
        for draws in budget.draws:
            entries[several(name, draws)] = _entry(budget, name, replace(work, draws=draws))
    return entries


def several(name: str, draws: int) -> str:
    """Name a method with several draws per step."""
    return f"{name} x {draws}"


LOOP = "deterministic loop"
STEPS = "pyro_bbb, sum of its steps"
FIT = "pyro_bbb.fit"
FIT_MANY = f"pyro_bbb.fit, {MANY} draws per step"


@dataclass(frozen=True)
class Epoch:
    """One pass over a training set."""

    work: Work
    rows: int
    """Examples of the set."""

    @property
    def device(self) -> str:
        """Device of the training."""
        return self.work.device


def epoch(budget: Budget, device: str) -> list[Comparison]:
    """Time epochs, each in a process of its own, and the sum of the steps of `fit`."""
    once = Epoch(Work(hidden=budget.widths[0], device=device), budget.rows)
    entries = {name: Entry(name, once) for name in EPOCHS}
    with start_workers(EPOCHS, one_process=budget.one_process) as workers:
        found = compare(entries, workers, seconds=0.0, min_rounds=budget.epochs, warmup=0)
    rounds, absent = found
    turns = rounds[FIT]  # its steps, and it
    rounds[STEPS] = [[sum(steps)] for *steps, _ in turns]
    rounds[FIT] = [[total] for *_, total in turns]
    title = f"{once.rows} examples, width {once.work.hidden}, batch {once.work.batch}"
    return [Comparison("epoch", title, LOOP, rounds, absent)]


def _training_set(rows: int, device: str) -> tuple[Tensor, Tensor]:
    """Load MNIST from ``PYRO_BBB_DATA``, else make random pixels of its shape."""
    if not os.environ.get("PYRO_BBB_DATA"):
        return images(rows, device=device)
    x, y = bbb.data.load_images("mnist", device=device)
    return x[:rows].flatten(1), y[:rows]


def _fit_epoch(draws: int, once: Epoch) -> Callable[[], Any]:
    training(OURS, once.work)  # loads what a first optimiser has torch import
    x, y = _training_set(once.rows, once.device)
    model, guide = guided(once.work, num_data=len(x))
    options: dict[str, Any] = {"batch_size": once.work.batch, "num_particles": draws}
    return lambda: bbb.fit(model, guide, (x, y), epochs=1, progress=False, **options)


def _epoch_and_its_steps(once: Epoch) -> Take:
    fit = _fit_epoch(1, once)

    def take(count: int, meter: Meter) -> None:
        for _ in range(count):
            with metered_steps(meter):
                meter(fit)

    return take


def _epoch_of_many(once: Epoch) -> Take:
    return repeated(_fit_epoch(MANY, once))


def _deterministic_epoch(once: Epoch) -> Take:
    x, y = _training_set(once.rows, once.device)
    network = once.work.network()
    adam = fused_adam(network.parameters(), once.work.lr)

    def run() -> None:
        for rows in torch.randperm(len(x), device=x.device).split(once.work.batch):
            adam.zero_grad()
            F.cross_entropy(network(x[rows]), y[rows]).backward()
            adam.step()

    return repeated(run)


EPOCHS: dict[str, Make] = {
    LOOP: _deterministic_epoch,
    FIT: _epoch_and_its_steps,
    FIT_MANY: _epoch_of_many,
}
