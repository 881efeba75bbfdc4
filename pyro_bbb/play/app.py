"""The page: one tab of digits, one of a regression, each visitor with a drawing of their own.

NiceGUI serves it with everything that it needs; nothing is asked of another server.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from nicegui import run, ui
from nicegui.element import Element
from nicegui.events import GenericEventArguments
from torch import Tensor

from pyro_bbb.play import render as pictures
from pyro_bbb.play.classifier import DRAWS, PRUNED, Classifier
from pyro_bbb.play.rasterize import Strokes, pixels
from pyro_bbb.play.regression import MOST, Curve, examples
from pyro_bbb.play.samples import samples
from pyro_bbb.prediction import ClassificationPrediction, RegressionPrediction
from pyro_bbb.training import UndertrainedWarning

TITLE = "pyro_bbb: how sure is a network?"
STYLE = Path(__file__).with_name("page.css")
_CLICK = """(event) => {
  const box = event.currentTarget.getBoundingClientRect();
  emit((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
}"""


class Pad(Element, component="pad.js"):
    """A square to draw on."""


def serve(classifier: Classifier, *, host: str, port: int, show: bool) -> None:
    """Answers browsers until it is interrupted."""

    def page() -> None:
        ui.add_css(STYLE)
        with ui.column().classes("heading"):
            ui.html(f"<h1>{TITLE}</h1>", sanitize=False)
        with ui.tabs().props("align=left no-caps dense") as tabs:
            digits, curve = ui.tab("Draw a digit"), ui.tab("Place points")
        with ui.tab_panels(tabs, value=digits).props("keep-alive"):
            with ui.tab_panel(digits):
                Digits(classifier)
            with ui.tab_panel(curve):
                Regression()

    warnings.simplefilter("ignore", UndertrainedWarning)  # the points' training goes by stages
    ui.run(
        page,
        host=host,
        port=port,
        title=TITLE,
        show=show,
        dark=None,
        reload=False,
        tailwind=False,
        show_welcome_message=False,
    )


class Digits:
    """The first tab."""

    def __init__(self, classifier: Classifier) -> None:
        self.classifier = classifier
        self.answers: dict[bool, ClassificationPrediction] = {}
        self.panels: dict[bool, ui.html] = {}
        with ui.element("div").classes("columns digits"):
            with _card("Draw a digit from 0 to 9"):
                self.pad = Pad().classes("pad")
                self.pad.on("drawn", lambda event: self.draw(event.args))
                with ui.element("div").classes("buttons"):
                    _button("Clear", self.clear)
                    for name, strokes in samples().items():
                        _button(name, partial(self.show_sample, strokes))
            for pruned, words in (
                (False, f"{DRAWS} networks vote"),
                (True, f"With {PRUNED:.0%} of the weights removed"),
            ):
                with _card(words).classes("panel"):
                    self.panels[pruned] = ui.html(sanitize=False)
            with _card("How it decides"):
                with ui.element("div").classes("aside"):
                    self.seen = ui.html(sanitize=False)
                    side = classifier.side
                    ui.label(f"What the networks see: {side}x{side} pixels.").classes("soft")
                rule = ui.label().classes("soft")
                at = round(classifier.threshold, 2)
                self.threshold = ui.slider(min=0, max=1, step=0.01, value=at, on_change=self.show)
                rule.bind_text_from(self.threshold, "value", _refused)
                ui.label(_SCRIBBLES).classes("soft")
        self._forget()  # a call to the pad would come when somebody draws already

    def show_sample(self, strokes: Strokes) -> None:
        """A drawing of ours on the pad, in the place of the visitor's."""
        points = [stroke.tolist() for stroke in strokes]
        self.pad.run_method("replace", points)
        self.draw(points)

    def draw(self, strokes: list[list[list[float]]]) -> None:
        """Asks the networks about all strokes so far."""
        points = [np.array(stroke, dtype=np.float64) for stroke in strokes]
        x = pixels(points, self.classifier.side)
        self.seen.content = pictures.seen(x, self.classifier.side)
        kinds = [False] if self.classifier.pruned is None else [False, True]
        self.answers = {pruned: self.classifier.ask(x, pruned=pruned) for pruned in kinds}
        self.show()

    def clear(self) -> None:
        """Back to the empty pad."""
        self.pad.run_method("clear")
        self._forget()

    def _forget(self) -> None:
        self.answers = {}
        self.seen.content = pictures.seen(torch.zeros(1), self.classifier.side)
        self.show()

    def show(self) -> None:
        """The answers by the threshold as it is."""
        for pruned, panel in self.panels.items():
            if pruned and self.classifier.pruned is None:
                panel.content = "The guide of this model cannot be pruned."
            elif pruned not in self.answers:
                panel.content = '<div class="soft">Nothing is drawn yet.</div>'
            else:
                answer = self.answers[pruned]
                said = pictures.verdict(answer, self.threshold.value)
                votes = pictures.votes(answer)
                parts = f"<div>{said}</div>{votes}{_KEY}{pictures.split(answer)}"
                panel.content = f'<div class="answer">{parts}</div>'


_KEY = '<div class="soft">Bars: votes of the networks. Red marks: mean probability.</div>'


_SCRIBBLES = (
    "The networks also learned scribbles, with random labels. So they give a scribble a high "
    "aleatoric uncertainty; the posterior alone, without them, refuses half of them."
)


def _refused(threshold: float) -> str:
    return f"It refuses unless a digit is more probable than {threshold:.2f}."


class Regression:
    """The second tab."""

    def __init__(self) -> None:
        self.curve, self.points = Curve(), list[tuple[float, float]]()
        self.band: RegressionPrediction | None = None
        self.learning = self.stale = self.anew = False
        with ui.element("div").classes("columns curve"):
            with _card("Click to place a point; the band follows"):
                self.plot = ui.html(sanitize=False).on("click", self.click, js_handler=_CLICK)
                self.status = ui.label().classes("soft status")
            with _card("Points"):
                with ui.element("div").classes("buttons"):
                    _button("Undo", lambda: self.change(self.points[:-1]))
                    _button("Clear", lambda: self.change([]))
                ui.label("Begin with").classes("soft")
                with ui.element("div").classes("buttons"):
                    for name, (x, y) in examples().items():
                        _button(name, partial(self.begin, _pairs(x, y)))
                ui.html(pictures.legend(), sanitize=False)
                ui.label(_LIMIT).classes("soft")
        self.show()

    async def click(self, event: GenericEventArguments) -> None:
        """A point where the click was."""
        across, down = event.args
        point = pictures.point_at(across * pictures.WIDTH, down * pictures.HEIGHT)
        if point is not None and len(self.points) < MOST:
            await self.change([*self.points, point])

    async def begin(self, points: list[tuple[float, float]]) -> None:
        """Learns these points from the start, whatever was there before."""
        self.anew = True
        await self.change(points)

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
        if self.anew or not self.points:
            self.curve.forget()
            self.anew, self.band = False, None
        if not self.points:
            return
        x, y = (torch.tensor(part)[:, None] for part in zip(*self.points, strict=True))
        stages = self.curve.learn(x, y)
        while not self.stale and (band := await run.io_bound(next, stages, None)) is not None:
            self.band = band
            self.show()

    def show(self) -> None:
        """The points and the last band."""
        body = pictures.plot(self.points, self.band)
        box = f"0 0 {pictures.WIDTH} {pictures.HEIGHT}"
        self.plot.content = f'<svg class="plot" viewBox="{box}">{body}</svg>'
        waiting = "training" if self.learning else "trained"
        count = f"{len(self.points)} point{'s' if len(self.points) > 1 else ''}"
        self.status.text = f"{count}; {waiting}" if self.points else "no points"


_LIMIT = "A mean-field posterior, as here, is too sure between two groups of points."


def _button(words: str, action: Callable[[], object]) -> None:
    ui.button(words, on_click=action).props("outline no-caps dense padding='4px 10px'")


def _card(words: str) -> Element:
    card = ui.element("section").classes("card")
    with card:
        ui.html(f"<h2>{words}</h2>", sanitize=False)
    return card


def _pairs(x: Tensor, y: Tensor) -> list[tuple[float, float]]:
    return list(zip(x[:, 0].tolist(), y[:, 0].tolist(), strict=True))
