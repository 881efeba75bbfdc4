# SPDX-License-Identifier: Apache-2.0
"""The page: tabs to draw digits, to place points and to rotate digits, for each visitor their own.

NiceGUI serves it with everything that it needs; nothing is asked of another server.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from nicegui import ui

from pyro_bbb.play.digits_tab import Digits
from pyro_bbb.play.elements import announcer
from pyro_bbb.play.loading import Loading, Networks
from pyro_bbb.play.points_tab import Points
from pyro_bbb.play.shift_tab import Shift
from pyro_bbb.training import UndertrainedWarning

TITLE = "pyro_bbb: how sure is a network?"
STYLE = Path(__file__).with_name("page.css")
_TABS = ("Draw a digit", "Place points", "Shift")
_MEANWHILE = "They answer at its end about what is drawn now; points can be placed already."
_INTERVAL = 0.25  # seconds between two looks at the training


def serve(loading: Loading, *, host: str, port: int, show: bool) -> None:
    """Answers browsers until it is interrupted, also while the networks are in training."""

    def page() -> None:
        ui.add_css(STYLE)
        ui.html(f"<h1>{TITLE}</h1>", sanitize=False)
        progress = ui.element("div").classes("progress")
        with ui.tabs().props("align=left no-caps dense") as tabs:
            digits_tab, points_tab, shift_tab = (ui.tab(words) for words in _TABS)
        with ui.tab_panels(tabs, value=digits_tab).props("keep-alive"):
            with ui.tab_panel(digits_tab):
                digits = Digits()
            with ui.tab_panel(points_tab):
                Points()
            with ui.tab_panel(shift_tab):
                shift = Shift()
        with progress:
            _follow(loading, (digits.enable, shift.enable))

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


def _follow(loading: Loading, enable: Sequence[Callable[[Networks], None]]) -> None:
    """A bar until the training ends; then the tabs get the networks."""
    spoken = announcer()
    if loading.networks is not None:
        _give(loading.networks, enable)
        return
    with ui.element("section").classes("card") as card:
        words = ui.label()
        bar = ui.linear_progress(show_value=False).props('aria-label="Training of the networks"')

    def look() -> None:
        bar.value = loading.progress
        words.text = f"The networks are in training, {loading.progress:.0%} done. {_MEANWHILE}"
        if loading.error is not None:
            words.text = spoken.text = f"The training failed: {loading.error}"
            timer.cancel()
        elif loading.networks is not None:
            _give(loading.networks, enable)
            spoken.text = "The networks are trained."
            card.delete()
            timer.cancel()

    timer = ui.timer(_INTERVAL, look)


def _give(networks: Networks, enable: Sequence[Callable[[Networks], None]]) -> None:
    for each in enable:
        each(networks)
