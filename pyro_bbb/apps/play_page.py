# SPDX-License-Identifier: Apache-2.0
"""The page of ``pyro-bbb play``: tabs to draw digits, to place points and to rotate digits.

NiceGUI serves it with everything that it needs; it loads nothing from another server. Each visitor
has their own tabs. The tab of shift compares the Bayesian neural network with a deterministic one
of the same layers, prior, data and epochs, the maximum a posteriori.
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
from nicegui.elements.html import Html
from nicegui.elements.label import Label
from nicegui.elements.toggle import Toggle
from nicegui.events import GenericEventArguments
from torch import Tensor

from pyro_bbb.apps import play_answers as html
from pyro_bbb.apps import strokes as drawings
from pyro_bbb.apps.digit_classifier import DRAWS, PRUNED, Classifier, unseen_digits
from pyro_bbb.apps.play import Networks
from pyro_bbb.apps.point_regression import MOST, bands, examples
from pyro_bbb.data import rotate
from pyro_bbb.prediction import ClassificationPrediction, RegressionPrediction
from pyro_bbb.training import UndertrainedWarning

TITLE = "pyro_bbb: how sure is a network?"
_TRAINING = '<div class="soft">The networks are in training.</div>'
_MEANWHILE = "They answer at its end about what is drawn now; points can be placed already."
_SCRIBBLES = (
    "The networks also learned scribbles, with random labels. So they give a scribble a high "
    "aleatoric uncertainty; the posterior alone, without them, refuses half of them."
)
_LIMIT = (
    "Markov chains draw networks that fit the points. Where there are no points, the networks "
    "disagree, and the band opens."
)
_RULE = (
    "Both networks have the same layers, prior, training data and epochs; the deterministic one is "
    "the maximum a posteriori. Neither has seen this digit, or any digit rotated by more than 8 "
    "degrees. The threshold of each refuses the 5% of the upright held-out digits of which it is "
    "least certain."
)
_ALL, _PRUNED = f"{DRAWS} networks vote", f"With {PRUNED:.0%} of the weights removed"
_CLICK = """(event) => {
  const box = event.currentTarget.getBoundingClientRect();
  emit((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
}"""


def serve(networks: Networks, *, host: str, port: int, show: bool) -> None:
    """Serve the page until it is interrupted, also while the networks are in training."""

    def page() -> None:
        ui.add_css(Path(__file__).with_name("page.css"))
        ui.html(f"<h1>{TITLE}</h1>", sanitize=False)
        progress = ui.element("div").classes("progress")
        with ui.tabs().props("align=left no-caps dense") as tabs:
            names = ("Draw a digit", "Place points", "Shift")
            digits_tab, points_tab, shift_tab = (ui.tab(words) for words in names)
        with ui.tab_panels(tabs, value=digits_tab).props("keep-alive"):
            with ui.tab_panel(digits_tab):
                digits = Digits()
            with ui.tab_panel(points_tab):
                Points()
            with ui.tab_panel(shift_tab):
                shift = Shift()
        with progress:
            _follow(networks, digits, shift)

    warnings.simplefilter("ignore", UndertrainedWarning)  # the points' training goes by stages
    ui.run(
        page,
        host=host,
        port=port,
        title=TITLE,
        show=show,
        dark=None,
        language="en-US",
        reload=False,
        tailwind=False,
        show_welcome_message=False,
    )


def _follow(networks: Networks, digits: Digits, shift: Shift) -> None:
    """Show a bar until the training ends; then enable the tabs."""
    spoken = _announcer()
    with ui.element("section").classes("card") as card:
        words = ui.label()
        bar = ui.linear_progress(show_value=False).props('aria-label="Training of the networks"')

    def look() -> None:
        bar.value = networks.progress
        words.text = f"The networks are in training, {networks.progress:.0%} done. {_MEANWHILE}"
        if networks.error is not None:
            words.text = spoken.text = f"The training failed: {networks.error}"
            timer.cancel()
        elif networks.trained is not None:
            digits.enable(networks.trained[0])
            shift.enable(*networks.trained)
            spoken.text = "The networks are trained."
            card.delete()
            timer.cancel()

    timer = ui.timer(0.25, look, immediate=False)
    look()


class Digits:
    """The tab with a pad: the answers of all weights, and of the pruned ones."""

    def __init__(self) -> None:
        self.classifier: Classifier | None = None
        self.strokes: list[list[list[float]]] = []
        self.answers: dict[str, ClassificationPrediction] = {}
        self.panels: dict[str, ui.html] = {}
        self.spoken: Label = _announcer()
        with ui.element("div").classes("columns digits"):
            with _card("Draw a digit from 0 to 9"):
                self.pad: _Pad = _Pad().classes("pad")
                self.pad.on("drawn", lambda event: self.draw(event.args))
                self.pad.on("down", lambda: self.spoken.set_text("The pen is down."))
                words = "Keys: arrows move the pen, space sets it down or lifts it."
                ui.label(words).classes("soft")
                with ui.element("div").classes("buttons"):
                    _button("Clear", partial(self.replace, []), "Clear the pad")
                    for name, strokes in drawings.examples().items():
                        points = [stroke.tolist() for stroke in strokes]
                        _button(name, partial(self.replace, points), f"Draw {name}")
            for words in (_ALL, _PRUNED):
                with _card(words).classes("panel"):
                    self.panels[words] = ui.html(sanitize=False)
            with _card("How it decides"):
                with ui.element("div").classes("aside"):
                    self.seen: Html = ui.html(sanitize=False)
                    ui.label("What the networks see: 8x8 pixels.").classes("soft")
                self.rule: Label = ui.label().classes("soft")
                label = "Threshold of the probability"
                self.threshold: _Slider = _Slider(
                    label, most=1, step=0.01, value=0.5, action=self.show
                )
                ui.label(_SCRIBBLES).classes("soft")
        self.draw([])

    def enable(self, classifier: Classifier) -> None:
        """Answer by the trained network, first about the drawing on the pad."""
        self.classifier = classifier
        self.threshold.set(round(classifier.threshold, 2))
        self.draw(self.strokes)

    def replace(self, points: list[list[list[float]]]) -> None:
        """Replace the drawing on the pad."""
        self.pad.run_method("replace", points)
        self.draw(points)

    def draw(self, strokes: list[list[list[float]]]) -> None:
        """Predict all strokes so far."""
        self.strokes, self.answers, x = strokes, {}, torch.zeros(64)
        if strokes:
            x = drawings.pixels([np.array(stroke, dtype=np.float64) for stroke in strokes])
        self.seen.content = html.seen(x)
        if strokes and self.classifier is not None:
            for words in (_ALL, _PRUNED):
                self.answers[words] = self.classifier.predict(x, pruned=words == _PRUNED)
        self.show()

    def show(self) -> None:
        """Show the answers by the present threshold."""
        at, spoken = self.threshold.value, []
        self.rule.text = f"It refuses unless a digit is more probable than {at:.2f}."
        for words, panel in self.panels.items():
            if (answer := self.answers.get(words)) is not None:
                panel.content = html.answer(answer, at, votes=True)
                spoken.append(f"{words}: {html.in_words(answer, at)}.")
            elif self.classifier is None:
                panel.content = _TRAINING
            else:
                panel.content = '<div class="soft">Nothing is drawn yet.</div>'
        self.spoken.text = " ".join(spoken)


class Points:
    """The tab of a regression: a plot to click on, and buttons and fields that do the same."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self.band: RegressionPrediction | None = None
        self.learning: bool = False
        self.stale: bool = False
        with ui.element("div").classes("columns curve"):
            with _card("Click to place a point; the band follows"):
                self.plot: Html = ui.html(sanitize=False).on("click", self.click, js_handler=_CLICK)
                self.status: Label = ui.label().classes("soft status").props("role=status")
            with _card("Points"):
                with ui.element("div").classes("buttons"):
                    fields = [
                        ui.number(axis, value=0, min=-1, max=1, step=0.1).props("dense")
                        for axis in "xy"
                    ]
                    _button("Place", lambda: self.place(*(x.value for x in fields)), "Place point")
                with ui.element("div").classes("buttons"):
                    _button("Undo", lambda: self.change(self.points[:-1]), "Undo the last point")
                    _button("Clear", lambda: self.change([]), "Clear the points")
                ui.label("Begin with").classes("soft")
                with ui.element("div").classes("buttons"):
                    for name, (x, y) in examples().items():
                        points = list(zip(x[:, 0].tolist(), y[:, 0].tolist(), strict=True))
                        _button(name, partial(self.change, points), f"Begin with {name}")
                ui.html(html.legend(), sanitize=False)
                ui.label(_LIMIT).classes("soft")
        self.show()

    async def click(self, event: GenericEventArguments) -> None:
        """Place a point at the click."""
        across, down = event.args
        point = html.point_at(across * html.WIDTH, down * html.HEIGHT)
        if point is not None:
            await self.place(*point)

    async def place(self, x: float | None, y: float | None) -> None:
        """Add a point, unless a field is empty or outside of the axes."""
        if x is None or y is None or max(abs(x), abs(y)) > 1 or len(self.points) >= MOST:
            return
        await self.change([*self.points, (float(x), float(y))])

    async def change(self, points: list[tuple[float, float]]) -> None:
        """Sample given these points, then given those that were placed meanwhile."""
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
        x, y = (torch.tensor(axis)[:, None] for axis in zip(*self.points, strict=True))
        stages = bands(x, y)
        while not self.stale and (band := await run.io_bound(next, stages, None)) is not None:
            self.band = band
            self.show()

    def show(self) -> None:
        """Show the points and the last band."""
        self.plot.content = html.plot(self.points, self.band)
        state = "training" if self.learning else "trained"
        count = f"{len(self.points)} point{'s' if len(self.points) > 1 else ''}"
        self.status.text = f"{count}; {state}" if self.points else "no points"


class Shift:
    """The tab of shift: a held-out digit, its angle, and the answers of the networks."""

    def __init__(self) -> None:
        self.latest: int = 0  # number of the last request
        self.panels: list[tuple[str, Classifier, ui.html]] = []
        self.body: Element = ui.element("div").classes("columns digits")
        with self.body, _card("Rotate a digit"):
            ui.html(_TRAINING, sanitize=False)
        self.spoken: Label = _announcer()

    def enable(self, bayesian: Classifier, deterministic: Classifier) -> None:
        """Show the controls, and the answers of the trained networks."""
        self.digits: dict[str, Tensor] = unseen_digits()
        titles = f"Bayesian: {DRAWS} networks vote", "Deterministic: one network"
        self.body.clear()
        with self.body:
            with _card("Rotate a digit"):
                names = list(self.digits)
                # a 4 turns into no digit; 0, 1 and 8 turn into themselves, 6 and 9 into each other
                self.digit: Toggle = ui.toggle(names, value="4", on_change=self.show)
                self.digit.classes("choices").props("toggle-color=action toggle-text-color=paper")
                self.digit.props('role=group aria-label="Digit" no-caps dense unelevated spread')
                self.picture: Html = ui.html(sanitize=False).classes("turned")
                self.words: Label = ui.label()
                label = "Rotation in degrees"
                self.angle: _Slider = _Slider(label, most=180, step=5, value=0, action=self.show)
            for words, classifier in zip(titles, (bayesian, deterministic), strict=True):
                with _card(words).classes("panel"):
                    self.panels.append((words, classifier, ui.html(sanitize=False)))
            with _card("What is compared"):
                ui.label(_RULE).classes("soft")
            ui.timer(0, self.show, once=True)

    async def show(self) -> None:
        """Show the answers about the rotated digit, unless a later request came first."""
        self.latest += 1
        number, digit, degrees = self.latest, self.digits[self.digit.value], self.angle.value
        self.words.text = f"Rotated by {degrees:.0f}° counter-clockwise"
        x = rotate(digit.view(1, 1, 8, 8), degrees).flatten(1)
        classifiers = [classifier for _, classifier, _ in self.panels]
        answers = await run.io_bound(lambda: [classifier.predict(x) for classifier in classifiers])
        if answers is None or number != self.latest:
            return
        self.picture.content = html.seen(x[0])
        spoken = []
        for (words, classifier, panel), answer in zip(self.panels, answers, strict=True):
            panel.content = html.answer(answer, classifier.threshold, votes=False)
            spoken.append(f"{words}: {html.in_words(answer, classifier.threshold)}.")
        self.spoken.text = " ".join(spoken)


class _Pad(Element, component="pad.js"):
    """A square to draw on, by pointer or by the keys that its label names."""


class _Slider(Element, component="slider.js"):
    """A range input with the browser's keys and label.

    Quasar's slider takes the focus on an inner element that has neither role nor name.
    """

    def __init__(
        self, label: str, *, most: float, step: float, value: float, action: Callable[[], object]
    ) -> None:
        super().__init__()
        self.value: float = value
        self.action: Callable[[], object] = action
        self._props.update(min=0, max=most, step=step, initial=value, label=label)
        self.on("moved", self._move, throttle=0.05)

    def _move(self, event: GenericEventArguments) -> object:
        self.value = event.args
        return self.action()

    def set(self, value: float) -> None:
        """Move to a value."""
        self.value = self._props["initial"] = value
        self.update()


def _button(words: str, action: Callable[[], object], label: str) -> None:
    """Add a small button, with a longer label for screen readers."""
    button = ui.button(words, on_click=action).props("outline no-caps dense padding='4px 10px'")
    button.props(f'aria-label="{label}"')


def _card(words: str) -> Element:
    """Return a framed part of a tab, with a heading."""
    card = ui.element("section").classes("card")
    with card:
        ui.html(f"<h2>{words}</h2>", sanitize=False)
    return card


def _announcer() -> ui.label:
    """Return an invisible label whose new texts a screen reader says."""
    return ui.label().classes("spoken").props('role=status aria-live="polite"')
