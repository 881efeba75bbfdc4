# SPDX-License-Identifier: Apache-2.0
"""Figure of all suites: bars of each method's cost relative to the deterministic floor."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from _parts.methods import FLOOR, OURS
from _parts.predict import OURS as PREDICT
from _parts.results import Results
from _parts.suites import FIT, STEPS
from _parts.timing import Comparison
from pyro_bbb import plots

SHADES = (1.0, 0.65, 0.35)
GREY = "0.35"


@dataclass(frozen=True)
class Panel:
    """Ratios of methods in several cases."""

    title: str
    axis: str
    cases: dict[str, dict[str, float]]

    @property
    def names(self) -> list[str]:
        """Methods of any case, the cheapest of the first case first."""
        first, *_ = self.cases.values()
        every = dict.fromkeys(name for case in self.cases.values() for name in case)
        return sorted(every, key=lambda name: first.get(name, np.inf))


def panels(results: Results) -> list[Panel]:
    """A panel for each suite that ran."""
    return [*_steps(results), *_epochs(results), *_predictions(results), *_memory(results)]


def _steps(results: Results) -> Iterator[Panel]:
    widths = results.widths()
    if widths:
        costs = _listed(f"{each.ratio(OURS):.1f}" for each in widths.values())
        yield Panel(
            f"A step of pyro_bbb costs {costs} ordinary ones",
            "time of a training step / deterministic one",
            {f"width {width}": _ratios(each) for width, each in widths.items()},
        )


def _epochs(results: Results) -> Iterator[Panel]:
    for each in results.of("epoch"):
        ratio = each.ratio(FIT, STEPS)
        title = f"An epoch of fit takes {ratio:.2f} times its steps"
        yield Panel(title, "time of an epoch / deterministic loop", {each.title: _ratios(each)})


def _predictions(results: Results) -> Iterator[Panel]:
    by_count = results.predictions()
    if by_count:
        count, largest = list(by_count.items())[-1]
        cost = largest.ratio(PREDICT)
        samples = results.budget.samples
        yield Panel(
            f"{samples} draws for {count:,} inputs cost {cost * samples:.0f} passes",
            f"time of {samples} draws / {samples} deterministic passes",
            {f"{n:,} input{'s' * (n > 1)}": _ratios(each) for n, each in by_count.items()},
        )


def _memory(results: Results) -> Iterator[Panel]:
    ratios = {name: results.memory_ratio(name) for name in results.training_memory}
    found = {name: ratio for name, ratio in ratios.items() if ratio and name != FLOOR}
    if OURS in found:
        yield Panel(
            f"pyro_bbb trains in {found[OURS]:.1f} times the ordinary memory",
            "largest sum of tensors in a step / deterministic one",
            {f"width {results.budget.memory_width}": found},
        )


def _ratios(comparison: Comparison) -> dict[str, float]:
    names = [name for name in comparison.rounds if name != comparison.floor]
    return {name: comparison.ratio(name) for name in names}


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def draw(results: Results, path: Path) -> None:
    """Write the figure."""
    shown = panels(results)
    if not shown:
        return
    heights = [1.2 + 0.14 * len(panel.names) * (len(panel.cases) + 0.8) for panel in shown]
    with plots.style():
        size = (9.0, sum(heights))
        figure, axes = plt.subplots(len(shown), figsize=size, height_ratios=heights, squeeze=False)
        for ax, panel in zip(axes[:, 0], shown, strict=True):
            _bars(ax, panel)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _bars(ax: Axes, panel: Panel) -> None:
    names, count = panel.names, len(panel.cases)
    thickness = 1 / (count + 0.8)
    for i, case in enumerate(panel.cases.values()):
        for row, name in enumerate(names):
            if name in case:
                _bar(ax, row + (i - (count - 1) / 2) * thickness, case[name], name, i, thickness)
    ax.set_xscale("log")
    ax.axvline(1, color="black", linewidth=0.8)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set(xlabel=panel.axis)
    ax.set_title(panel.title)
    _ticks(ax, [value for case in panel.cases.values() for value in case.values()])
    if count > 1:
        handles = [Patch(color=GREY, alpha=SHADES[i]) for i in range(count)]
        ax.legend(handles, panel.cases, loc="upper right")


def _bar(ax: Axes, at: float, value: float, name: str, case: int, thickness: float) -> None:
    colour = plots.BLUE if name.startswith("pyro_bbb") else GREY
    ax.barh(at, value - 1, thickness, left=1, color=colour, alpha=SHADES[case])
    side = "left" if value >= 1 else "right"
    digits = 2 if value < 1 else 1 if value < 10 else 0
    ax.text(value, at, f" {value:.{digits}f} ", ha=side, va="center", fontsize=6.5)


def _ticks(ax: Axes, values: list[float]) -> None:
    low, high = min([*values, 1.0]), max([*values, 1.0])
    ax.set_xlim(low / 1.8 if low < 1 else 1.0, high * 1.3)  # room for the figures
    decades = [m * 10.0**k for k in range(-3, 4) for m in (1, 2, 5)]
    ax.xaxis.set_major_locator(FixedLocator([d for d in decades if low / 1.8 <= d <= high * 1.3]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.minorticks_off()
