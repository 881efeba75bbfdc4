# SPDX-License-Identifier: Apache-2.0
"""The tab of a regression: a band follows the points that a visitor places."""

from __future__ import annotations

from functools import partial

import torch
from nicegui import run, ui
from nicegui.events import GenericEventArguments
from torch import Tensor

from pyro_bbb.play import render as pictures
from pyro_bbb.play.elements import button, card
from pyro_bbb.play.regression import MOST, bands, examples
from pyro_bbb.prediction import RegressionPrediction

_CLICK = """(event) => {
  const box = event.currentTarget.getBoundingClientRect();
  emit((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
}"""


class Points:
    """A plot to click on, and buttons and fields that do the same."""

    def __init__(self) -> None:
        self.points = list[tuple[float, float]]()
        self.band: RegressionPrediction | None = None
        self.learning = self.stale = False
        with ui.element("div").classes("columns curve"):
            with card("Click to place a point; the band follows"):
                self.plot = ui.html(sanitize=False).on("click", self.click, js_handler=_CLICK)
                self.status = ui.label().classes("soft status").props("role=status")
            with card("Points"):
                self._build_buttons()
                ui.html(pictures.legend(), sanitize=False)
                ui.label(_LIMIT).classes("soft")
        self.show()

    def _build_buttons(self) -> None:
        with ui.element("div").classes("buttons"):
            fields = [
                ui.number(axis, value=0, min=-1, max=1, step=0.1).props("dense") for axis in "xy"
            ]
            button("Place", lambda: self.place(*(field.value for field in fields)), "Place point")
        with ui.element("div").classes("buttons"):
            button("Undo", lambda: self.change(self.points[:-1]), "Undo the last point")
            button("Clear", lambda: self.change([]), "Clear the points")
        ui.label("Begin with").classes("soft")
        with ui.element("div").classes("buttons"):
            for name, (x, y) in examples().items():
                button(name, partial(self.change, _pairs(x, y)), f"Begin with {name}")

    async def click(self, event: GenericEventArguments) -> None:
        """A point where the click was."""
        across, down = event.args
        point = pictures.point_at(across * pictures.WIDTH, down * pictures.HEIGHT)
        if point is not None:
            await self.place(*point)

    async def place(self, x: float | None, y: float | None) -> None:
        """One more point; a field may be empty, or outside of the axes."""
        if x is None or y is None or max(abs(x), abs(y)) > 1 or len(self.points) >= MOST:
            return
        await self.change([*self.points, (float(x), float(y))])

    async def change(self, points: list[tuple[float, float]]) -> None:
        """Learns these points; those that come meanwhile are next."""
        self.points, self.stale = points, True
        under_way, self.learning = self.learning, True
        self.show()
        if under_way:
            return
        try:
            while self.stale:
                await self._learn()
        finally:
            self.learning = False
        self.show()

    async def _learn(self) -> None:
        self.stale = False
        if not self.points:
            self.band = None
            return
        x, y = (torch.tensor(part)[:, None] for part in zip(*self.points, strict=True))
        stages = bands(x, y)
        while not self.stale and (band := await run.io_bound(next, stages, None)) is not None:
            self.band = band
            self.show()

    def show(self) -> None:
        """The points and the last band."""
        self.plot.content = pictures.plot(self.points, self.band)
        waiting = "training" if self.learning else "trained"
        count = f"{len(self.points)} point{'s' if len(self.points) > 1 else ''}"
        self.status.text = f"{count}; {waiting}" if self.points else "no points"


_LIMIT = "Chains of networks that fit the points: where there are none, they disagree."


def _pairs(x: Tensor, y: Tensor) -> list[tuple[float, float]]:
    return list(zip(x[:, 0].tolist(), y[:, 0].tolist(), strict=True))
