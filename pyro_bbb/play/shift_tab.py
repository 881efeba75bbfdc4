# SPDX-License-Identifier: Apache-2.0
"""The tab of shift: a digit of no training is rotated, and two networks answer.

One is the Bayesian network of the pad. The other one is deterministic and trained alike, with the
same layers, prior, data and epochs; it is a point, the maximum a posteriori.
"""

from __future__ import annotations

from nicegui import run, ui
from torch import Tensor

from pyro_bbb.data import rotate
from pyro_bbb.play import render as pictures
from pyro_bbb.play.classifier import Classifier
from pyro_bbb.play.elements import Slider, announcer, card
from pyro_bbb.play.loading import Networks
from pyro_bbb.prediction import ClassificationPrediction

_STEP = 5  # degrees
_RULE = (
    "Both networks have the same layers, prior, training data and epochs; the deterministic one is "
    "the maximum a posteriori. Neither has seen this digit, or any digit rotated by more than 8 "
    "degrees. The threshold of each refuses the 5% of the upright held-out digits of which it is "
    "least certain."
)
_ALONE = (
    "This model has no deterministic network trained alike; the page trains one beside each "
    "network of its own."
)


class Shift:
    """A digit, its angle, and the answers of the networks."""

    def __init__(self) -> None:
        self.latest = 0  # number of the last request
        self.panels: list[tuple[str, Classifier, ui.html]] = []
        self.body = ui.element("div").classes("columns digits")
        with self.body, card("Rotate a digit"):
            ui.label("The networks are in training.").classes("soft")
        self.spoken = announcer()

    def enable(self, networks: Networks) -> None:
        """Shows the controls, and the answers of the trained networks."""
        self.digits, self.side = networks.digits, networks.bayesian.side
        bayesian = f"Bayesian: {networks.bayesian.draws} networks vote"
        self.body.clear()
        with self.body:
            self._build_controls()
            self._build_panel(bayesian, networks.bayesian)
            if networks.deterministic is not None:
                self._build_panel("Deterministic: one network", networks.deterministic)
            with card("What is compared"):
                words = _ALONE if networks.deterministic is None else _RULE
                ui.label(words).classes("soft")
            ui.timer(0, self.show, once=True)

    def _build_controls(self) -> None:
        with card("Rotate a digit"):
            names = list(self.digits)
            self.digit = ui.toggle(names, value=names[0], on_change=self.show).classes("choices")
            self.digit.props('role=group aria-label="Digit" no-caps dense unelevated spread')
            self.digit.props("toggle-color=action toggle-text-color=paper")
            self.picture = ui.html(sanitize=False).classes("turned")
            self.words = ui.label()
            label = "Rotation in degrees"
            self.angle = Slider(label, most=180, step=_STEP, value=0, action=self.show)

    def _build_panel(self, words: str, classifier: Classifier) -> None:
        with card(words).classes("panel"):
            self.panels.append((words, classifier, ui.html(sanitize=False)))

    async def show(self) -> None:
        """The answers about the digit as it is rotated now, unless a later request comes first."""
        self.latest += 1
        number, digit, degrees = self.latest, self.digits[self.digit.value], self.angle.value
        self.words.text = f"Rotated by {degrees:.0f}° counter-clockwise"
        found = await run.io_bound(self._ask, digit, degrees)
        if found is not None and number == self.latest:
            self._show(*found)

    def _ask(self, digit: Tensor, degrees: float) -> tuple[Tensor, list[ClassificationPrediction]]:
        x = rotate(digit.view(1, 1, self.side, self.side), degrees).flatten(1)
        return x, [classifier.ask(x) for _, classifier, _ in self.panels]

    def _show(self, x: Tensor, answers: list[ClassificationPrediction]) -> None:
        self.picture.content = pictures.seen(x[0], self.side)
        said = []
        for (words, classifier, panel), answer in zip(self.panels, answers, strict=True):
            panel.content = _answer(answer, classifier.threshold)
            said.append(f"{words}: {pictures.in_words(answer, classifier.threshold)}.")
        self.spoken.text = " ".join(said)


def _answer(answer: ClassificationPrediction, threshold: float) -> str:
    parts = [
        f"<div>{pictures.verdict(answer, threshold)}</div>",
        pictures.probabilities(answer),
        '<div class="soft">Bars: probability of each class.</div>',
        f'<div>entropy <b class="entropy">{float(answer.entropy):.2f}</b> nats, of which</div>',
        pictures.split(answer),
    ]
    return f'<div class="answer">{"".join(parts)}</div>'
