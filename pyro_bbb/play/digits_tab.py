# SPDX-License-Identifier: Apache-2.0
"""The tab with a pad: the networks answer about each drawing."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from nicegui import ui

from pyro_bbb.play import render as pictures
from pyro_bbb.play.classifier import DRAWS, PRUNED, Classifier
from pyro_bbb.play.elements import Pad, Slider, announcer, button, card
from pyro_bbb.play.loading import Networks
from pyro_bbb.play.rasterize import Strokes, pixels
from pyro_bbb.play.samples import samples
from pyro_bbb.prediction import ClassificationPrediction

_KEY = '<div class="soft">Bars: votes of the networks. Red marks: mean probability.</div>'
_SCRIBBLES = (
    "The networks also learned scribbles, with random labels. So they give a scribble a high "
    "aleatoric uncertainty; the posterior alone, without them, refuses half of them."
)
_TITLES = {False: f"{DRAWS} networks vote", True: f"With {PRUNED:.0%} of the weights removed"}


class Digits:
    """The pad, and the answers of all weights and of the pruned ones (keys False and True)."""

    def __init__(self) -> None:
        self.classifier: Classifier | None = None
        self.strokes: list[list[list[float]]] = []
        self.answers: dict[bool, ClassificationPrediction] = {}
        self.panels: dict[bool, ui.html] = {}
        with ui.element("div").classes("columns digits"):
            self._build_pad()
            for pruned, words in _TITLES.items():
                with card(words).classes("panel"):
                    self.panels[pruned] = ui.html(sanitize=False)
            self._build_rule()
        self.spoken = announcer()
        self.draw([])

    def _build_pad(self) -> None:
        with card("Draw a digit from 0 to 9"):
            self.pad = Pad().classes("pad")
            self.pad.on("drawn", lambda event: self.draw(event.args))
            self.pad.on("down", lambda: self._announce("The pen is down."))
            ui.label("Keys: arrows move the pen, space sets it down or lifts it.").classes("soft")
            with ui.element("div").classes("buttons"):
                button("Clear", self.clear, "Clear the pad")
                for name, strokes in samples().items():
                    button(name, partial(self.show_sample, strokes), f"Draw {name}")

    def _build_rule(self) -> None:
        with card("How it decides"):
            with ui.element("div").classes("aside"):
                self.seen = ui.html(sanitize=False)
                self.size = ui.label().classes("soft")
            self.rule = ui.label().classes("soft")
            label = "Threshold of the probability"
            self.threshold = Slider(label, most=1, step=0.01, value=0.5, action=self.show)
            self.threshold.disable()
            ui.label(_SCRIBBLES).classes("soft")

    def enable(self, networks: Networks) -> None:
        """The trained network answers, first about what is on the pad."""
        self.classifier = networks.bayesian
        self.threshold.enable(round(self.classifier.threshold, 2))
        self.draw(self.strokes)

    def show_sample(self, strokes: Strokes) -> None:
        """A drawing of ours on the pad, in the place of the visitor's."""
        points = [stroke.tolist() for stroke in strokes]
        self.pad.run_method("replace", points)
        self.draw(points)

    def clear(self) -> None:
        """Back to the empty pad."""
        self.pad.run_method("clear")
        self.draw([])

    def draw(self, strokes: list[list[list[float]]]) -> None:
        """Asks the networks about all strokes so far."""
        self.strokes, self.answers = strokes, {}
        side = 8 if self.classifier is None else self.classifier.side
        x = torch.zeros(1)
        if strokes:
            x = pixels([np.array(stroke, dtype=np.float64) for stroke in strokes], side)
        self.seen.content = pictures.seen(x, side)
        self.size.text = f"What the networks see: {side}x{side} pixels."
        if strokes and self.classifier is not None:
            kinds = [False] if self.classifier.pruned is None else [False, True]
            self.answers = {pruned: self.classifier.ask(x, pruned=pruned) for pruned in kinds}
        self.show()

    def show(self) -> None:
        """The answers by the threshold as it is."""
        at = self.threshold.value
        self.rule.text = f"It refuses unless a digit is more probable than {at:.2f}."
        for pruned, panel in self.panels.items():
            panel.content = self._panel(pruned)
        said = [
            f"{_TITLES[pruned]}: {pictures.in_words(answer, at)}."
            for pruned, answer in self.answers.items()
        ]
        self._announce(" ".join(said))

    def _panel(self, pruned: bool) -> str:
        if self.classifier is None:
            return '<div class="soft">The networks are in training.</div>'
        if pruned and self.classifier.pruned is None:
            return "The guide of this model cannot be pruned."
        if pruned not in self.answers:
            return '<div class="soft">Nothing is drawn yet.</div>'
        answer = self.answers[pruned]
        said = pictures.verdict(answer, self.threshold.value)
        parts = f"<div>{said}</div>{pictures.votes(answer)}{_KEY}{pictures.split(answer)}"
        return f'<div class="answer">{parts}</div>'

    def _announce(self, words: str) -> None:
        self.spoken.text = words
