# SPDX-License-Identifier: Apache-2.0
"""Measurements of one run, and performance targets."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from _parts import guides, small
from _parts.budget import Budget
from _parts.memory import Peak
from _parts.methods import FLOOR, OURS, OURS_GAUSSIAN, PLAIN, TORCHBNN
from _parts.predict import LOCAL
from _parts.predict import OURS as PREDICT
from _parts.suites import BATCH, FIT, FIT_MANY, MANY, STEPS, several
from _parts.timing import Comparison


@dataclass
class Results:
    """Measurements, suite by suite."""

    budget: Budget
    comparisons: list[Comparison] = field(default_factory=list)
    training_memory: dict[str, Peak] = field(default_factory=dict)
    prediction_memory: dict[tuple[int, int], Peak] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration of each suite."""
    load_before: float | None = None
    """Load average before the run; None where the system does not report it."""

    def of(self, suite: str) -> list[Comparison]:
        """The comparisons of one suite."""
        return [each for each in self.comparisons if each.suite == suite]

    def widths(self) -> dict[int, Comparison]:
        """The comparisons of steps at 128 examples, by width."""
        titles = {f"width {width}, batch {BATCH}": width for width in self.budget.widths}
        return {titles[each.title]: each for each in self.of("steps") if each.title in titles}

    def predictions(self) -> dict[int, Comparison]:
        """The comparisons of predictions, by number of inputs."""
        return dict(zip(self.budget.predictions, self.of("predict"), strict=False))

    def memory_ratio(self, name: str, figure: str = "tensors") -> float | None:
        """Return the ratio of a method's peak to the floor's."""
        mine, floor = (getattr(self.training_memory.get(n), figure, 0) for n in (name, FLOOR))
        return mine / floor if mine and floor else None


@dataclass(frozen=True)
class Aim:
    """A figure that should not exceed a limit."""

    what: str
    limit: float
    value: float | None
    """None where it was not measured."""

    @property
    def verdict(self) -> str:
        """Reached, not reached, or not measured."""
        if self.value is None:
            return "not measured"
        return "reached" if self.value <= self.limit else "not reached"


def aims(results: Results) -> list[Aim]:
    """Every aim, in the order of the suites."""
    return [Aim(*each) for part in _PARTS for each in part(results)]


Found = Iterator[tuple[str, float, float | None]]
_SMALLEST = ("1-20-20-1", "10-50-1")  # networks that NumPyro and ensembles are compared on


def _ratio(comparison: Comparison, name: str, to: str) -> float | None:
    return comparison.ratio(name, to) if {name, to} <= set(comparison.rounds) else None


def _of_small(results: Results) -> Found:
    for each in results.of("small"):
        if "thread" not in each.title:
            continue
        ours = small.OURS
        yield f"{each.title}: fit / hand-written", 0.5, _ratio(each, ours, small.HAND_WRITTEN)
        if each.title.startswith(_SMALLEST):
            yield f"{each.title}: fit / NumPyro", 2.0, _ratio(each, ours, small.NUMPYRO)
            yield f"{each.title}: ensemble of 8 / fit", 2.5, _ratio(each, small.ENSEMBLE, ours)
    for each in results.of("small"):
        if small.COLD in each.rounds:
            yield f"{each.title}: fit / NumPyro", 1.0, _ratio(each, small.OURS, small.COLD)


def _of_guides(results: Results) -> Found:
    limits = {guides.IVON: 1.5, guides.VBLL: 1.1, guides.OF_VBLL: 1.2, guides.OF_LAPLACE: 3.0}
    for each in results.of("guides"):
        for name, limit in limits.items():
            if name in each.rounds:
                yield f"{each.title}: {name} / {each.floor}", limit, each.ratio(name)


def _of_steps(results: Results) -> Found:
    pairs = [(OURS, PLAIN, 0.5), (OURS, TORCHBNN, 1.0), (OURS_GAUSSIAN, TORCHBNN, 1.0)]
    for width, comparison in results.widths().items():
        for name, to, limit in [*pairs, (OURS, FLOOR, 3.0)]:
            yield f"step, width {width}: {name} / {to}", limit, _ratio(comparison, name, to)
    for comparison in results.of("steps"):
        one, many = several(OURS, 1), several(OURS, MANY)
        if many in comparison.rounds:
            yield f"step: {MANY} draws / 1 draw", 8.0, _ratio(comparison, many, one)


def _of_epochs(results: Results) -> Found:
    for comparison in results.of("epoch"):
        yield f"epoch: {FIT} / {STEPS}", 1.1, _ratio(comparison, FIT, STEPS)
        yield f"epoch: {MANY} draws / 1 draw", 8.0, _ratio(comparison, FIT_MANY, FIT)


def _of_predictions(results: Results) -> Found:
    samples, by_count = results.budget.samples, results.predictions()
    for name in (PREDICT, LOCAL):
        if 1 in by_count:
            ratio = _ratio(by_count[1], name, by_count[1].floor)
            passes = None if ratio is None else samples * ratio
            yield f"1 input, {samples} draws: {name}, in passes of 1 input", 50.0, passes
        for count, comparison in by_count.items():
            if count == max(by_count):
                ratio = _ratio(comparison, name, comparison.floor)
                yield f"{count} inputs: {name} / {comparison.floor}", 1.3, ratio


def _of_memory(results: Results) -> Found:
    if results.training_memory:
        width = results.budget.memory_width
        what = f"tensors at the peak of training, width {width}: {OURS} / {FLOOR}"
        yield what, 3.5, results.memory_ratio(OURS)


_PARTS: list[Callable[[Results], Found]] = [
    _of_small,
    _of_guides,
    _of_steps,
    _of_epochs,
    _of_predictions,
    _of_memory,
]
