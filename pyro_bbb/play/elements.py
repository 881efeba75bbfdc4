# SPDX-License-Identifier: Apache-2.0
"""Parts of the tabs: cards, buttons, a pad, and words for screen readers."""

from __future__ import annotations

from collections.abc import Callable

from nicegui import ui
from nicegui.element import Element
from nicegui.events import GenericEventArguments


class Pad(Element, component="pad.js"):
    """A square to draw on, by pointer or by the keys that its label names."""


class Slider(Element, component="slider.js"):
    """A range of numbers, with the browser's own keys and label.

    Quasar's slider takes the focus on a part of it that has neither role nor name.
    """

    def __init__(
        self, label: str, *, most: float, step: float, value: float, action: Callable[[], object]
    ) -> None:
        super().__init__()
        self.value, self.action = value, action
        self._props.update(min=0, max=most, step=step, initial=value, label=label)
        self.on("moved", self._move, throttle=0.05)

    def _move(self, event: GenericEventArguments) -> object:
        self.value = event.args
        return self.action()

    def disable(self) -> None:
        """No visitor can move it."""
        self._props["disabled"] = True
        self.update()

    def enable(self, value: float) -> None:
        """Visitors can move it, from this value."""
        self.value = value
        self._props.update(disabled=False, initial=value)
        self.update()


def button(words: str, action: Callable[[], object], label: str | None = None) -> None:
    """A small button; the label says more to a screen reader than its words."""
    found = ui.button(words, on_click=action).props("outline no-caps dense padding='4px 10px'")
    if label is not None:
        found.props(f'aria-label="{label}"')


def card(words: str) -> Element:
    """A framed part of a tab, with a heading."""
    card = ui.element("section").classes("card")
    with card:
        ui.html(f"<h2>{words}</h2>", sanitize=False)
    return card


def announcer() -> ui.label:
    """A label that is not seen; a screen reader says each new text."""
    return ui.label().classes("spoken").props('role=status aria-live="polite"')
