# SPDX-License-Identifier: Apache-2.0
"""The page of ``pyro-bbb play``, used in a browser without a window as a person would.

    python tests/apps/test_play_page.py docs/images/play.png

draws the picture of ``docs/cli.md``.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import pyro_bbb as bbb
from tests._support.synthetic_digits import digit, zigzag

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
DESKTOP, PHONE = {"width": 1280, "height": 720}, {"width": 375, "height": 812}
PATIENCE = 20_000  # milliseconds, on a machine that is busy with other things
TRAINING = 30 * PATIENCE
HEADINGS = {
    "Draw a digit": "Draw a digit from 0 to 9",
    "Place points": "Click to place a point; the band follows",
    "Shift": "Rotate a digit",
}
TABS = tuple(HEADINGS)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no chromium, chromium-browser, google-chrome"),
]


@contextmanager
def served(model):
    """Run the command in another process; yield the address of its page."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["play", "--no-browser", "--model", str(model), "--port", str(port)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    command = [sys.executable, "-m", "pyro_bbb", *words]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        wait_for(port, process)
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and f"http://127.0.0.1:{port}/" in said


def wait_for(port, process):
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"no page on port {port}, exit code {process.returncode}")


@contextmanager
def browser():
    with tempfile.TemporaryDirectory() as profile, sync_api.sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=CHROMIUM, args=FLAGS, viewport=DESKTOP
        )
        context.set_default_timeout(PATIENCE)
        yield context
        context.close()


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Address, browser and folder of a first start, which begins to train.

    Asserts at the end that nothing went wrong or elsewhere.
    """
    folder = tmp_path_factory.mktemp("play") / "model"
    with served(folder) as address, browser() as context:
        asked, trouble = [], []
        context.on("request", lambda request: asked.append(request.url))
        context.on("console", lambda words: words.type == "error" and trouble.append(words.text))
        context.on("weberror", lambda error: trouble.append(str(error.error)))
        yield address, context, folder
        assert asked and all(url.startswith((address, "data:", "blob:")) for url in asked)
        assert not trouble


@pytest.fixture(scope="module")
def site(start):
    """Address and browser, once the networks are trained."""
    address, context, _ = start
    page = context.new_page()
    page.goto(address)
    sync_api.expect(page.get_by_text("Nothing is drawn yet.")).to_have_count(2, timeout=TRAINING)
    page.close()
    return address, context


@pytest.fixture
def page(site):
    address, context = site
    page = context.new_page()
    page.goto(address)
    yield page
    page.close()


def open_tab(page, name):
    """Clicks, and waits until the tab has slid in and the one before it out."""
    page.get_by_role("tab", name=name).click()
    panel = page.locator(".q-tab-panel:visible")
    sync_api.expect(panel.locator("h2").first).to_have_text(HEADINGS[name])
    sync_api.expect(panel).to_have_count(1)
    sync_api.expect(page.locator("[class*='q-transition--slide']")).to_have_count(0)


def test_the_page_is_used_while_the_networks_are_in_training(start):
    address, context, folder = start
    page = context.new_page()
    page.goto(address)
    bar = page.get_by_role("progressbar", name="Training of the networks")
    sync_api.expect(bar).to_be_visible()
    page.get_by_role("button", name="Draw 4").click()
    sync_api.expect(page.get_by_text("The networks are in training.")).to_have_count(2)
    assert not (folder / "spec.json").exists()
    open_tab(page, "Place points")
    page.get_by_role("button", name="Begin with three points").click()
    sync_api.expect(page.locator(".status")).to_have_text("3 points; trained", timeout=3 * PATIENCE)
    open_tab(page, "Draw a digit")
    sync_api.expect(bar).not_to_have_attribute("aria-valuenow", "0", timeout=TRAINING)
    sync_api.expect(bar).to_be_hidden(timeout=TRAINING)
    says(page, "4")
    page.close()


def test_ctrl_c_ends_the_training(tmp_path):
    with served(tmp_path / "model"):  # it would wait for the pipe of a process that is left
        pass
    assert not (tmp_path / "model").exists()


def draw(page, strokes):
    """Draw by mouse, from point to point."""
    box = page.locator("svg.pad").bounding_box()
    places = [np.array(s) * [box["width"], box["height"]] + [box["x"], box["y"]] for s in strokes]
    for stroke in places:
        page.mouse.move(*stroke[0])
        page.mouse.down()
        for place in stroke[1:]:
            page.mouse.move(*place)
        page.mouse.up()


def says(page, words):
    """Waits for both answers, that of all networks first."""
    verdicts = page.locator(".verdict")
    sync_api.expect(verdicts).to_have_text([words, words], timeout=PATIENCE)


def three():
    return digit(3, 0, np.random.default_rng(0))


def test_a_digit_is_read_and_a_scribble_refused(page):
    draw(page, three())
    says(page, "3")
    panel = page.locator(".answer").first
    votes = [int(count) for count in panel.locator(".count").all_inner_texts()]
    assert len(votes) == 10 and sum(votes) == 100 and votes[3] > 90
    sure = entropies(panel)
    assert sum(sure) < 1 and page.locator("svg.seen rect").count() > 10
    page.get_by_role("button", name="Clear").click()
    sync_api.expect(page.locator(".verdict")).to_have_count(0)
    for drawn in ("svg.pad polyline", "svg.seen rect"):
        sync_api.expect(page.locator(drawn)).to_have_count(0)
    draw(page, zigzag(np.random.default_rng(0)))
    says(page, "I don't know")
    assert sum(entropies(panel)) > sum(sure) + 0.5


def entropies(panel):
    texts = (panel.locator(f"b.{name}").inner_text() for name in ("aleatoric", "epistemic"))
    return [float(text) for text in texts]


def test_the_band_follows_clicks(page):
    open_tab(page, "Place points")
    plot = page.locator("svg.plot")
    box = plot.bounding_box()
    plot.click(position={"x": 0.3 * box["width"], "y": 0.3 * box["height"]})  # once it has slid in
    sync_api.expect(plot.locator("circle.point")).to_have_count(1)
    words = "1 point; trained"
    sync_api.expect(page.locator(".status")).to_have_text(words, timeout=2 * PATIENCE)
    assert plot.locator("polygon.epistemic").count() == plot.locator("polygon.total").count() == 1
    page.get_by_role("button", name="Clear the points").click()
    sync_api.expect(plot.locator("circle.point, polygon")).to_have_count(0)


OUTSIDE = """() => [...document.querySelectorAll("main *")]
  .filter((part) => part.checkVisibility() && part.getBoundingClientRect().right > innerWidth + 0.5)
  .map((part) => part.outerHTML.slice(0, 99))"""


def test_a_phone_shows_all_without_scrolling_sideways(page):
    page.set_viewport_size(PHONE)
    draw(page, three())
    says(page, "3")
    for tab in TABS:
        open_tab(page, tab)
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        assert page.evaluate(OUTSIDE) == []  # a panel cuts what is too wide


# --- shift ---


def test_the_shift_tab_shows_what_predict_says(page, start):
    _, _, folder = start
    x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
    _, (x, y) = bbb.data.split(x.float() / 16, y, fraction=0.1, seed=0)
    seven = x[y == 7][0].view(1, 1, 8, 8)
    open_tab(page, "Shift")
    sync_api.expect(page.get_by_role("button", name="4", exact=True)).to_have_attribute(
        "aria-pressed", "true"
    )
    page.get_by_role("button", name="7", exact=True).click()
    slider = page.get_by_role("slider", name="Rotation in degrees")
    for _ in range(12):
        slider.press("ArrowRight")
    sync_api.expect(page.get_by_text("Rotated by 60°")).to_be_visible()
    rotated = bbb.data.rotate(seven, 60).flatten(1)
    for i, (path, draws) in enumerate(((folder, 100), (folder / "deterministic", 1))):
        saved = bbb.load(path)
        answer = bbb.predict(saved.model, saved.guide, rotated, num_samples=draws, seed=0)
        panel = page.locator(".answer:visible").nth(i)
        numbers = [f"{prob:.2f}" for prob in answer.probs[0]]
        sync_api.expect(panel.locator(".count")).to_have_text(numbers)
        sync_api.expect(panel.locator(".entropy")).to_have_text(f"{float(answer.entropy):.2f}")
        refused = bool(answer.refuse(saved.metadata["threshold"]))
        words = "I don't know" if refused else str(int(answer.label))
        sync_api.expect(panel.locator(".verdict")).to_have_text(words)
        sure = f"with probability {float(answer.confidence):.2f}"
        sync_api.expect(page.get_by_role("status").filter(has_text=sure)).to_have_count(1)


# --- for keyboards, screen readers and eyes ---

RING = """(control) => [control, control.closest(".q-field__control") ?? control]
  .map((part) => getComputedStyle(part))
  .map((style) => style.outlineStyle + style.boxShadow).join()"""
CONTROLS = "button, input, [role=application]"
ROLES = "button|slider|spinbutton|tab|img|progressbar|application"
NAMELESS = re.compile(rf"^\s*- ({ROLES})\b(?! \")", re.MULTILINE)


@pytest.mark.parametrize("tab", TABS)
def test_every_control_has_a_name_and_shows_the_keyboards_focus(page, tab):
    page.get_by_role("tab", selected=True).focus()
    for key in [*["ArrowRight"] * TABS.index(tab), "Enter"]:
        page.keyboard.press(key)
    sync_api.expect(page.get_by_role("tab", name=tab, selected=True)).to_be_focused()
    open_tab(page, tab)
    main = page.get_by_role("main")
    if tab == "Shift":
        main.locator(".answer:visible").nth(1).wait_for()
    assert not NAMELESS.findall(main.aria_snapshot())
    controls = main.locator(CONTROLS).locator("visible=true").all()
    assert len(controls) > 7
    controls[1].focus()
    page.keyboard.press("Shift+Tab")  # so that the keyboard gave the focus
    for control in controls:
        sync_api.expect(control).to_be_focused()
        focused = control.evaluate(RING)
        page.keyboard.press("Tab")
        assert control.evaluate(RING) != focused


def test_a_digit_is_drawn_by_keys(page):
    page.locator("svg.pad").focus()
    for key in [*["ArrowUp"] * 6, " ", *["ArrowDown"] * 12, " "]:
        page.keyboard.press(key)
    says(page, "1")
    spoken = page.get_by_role("status").filter(has_text="100 networks vote: 1, with probability")
    sync_api.expect(spoken).to_have_count(1)


CONTRASTS = Path(__file__).with_name("contrasts.js").read_text("utf-8")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_background(page, scheme):
    page.emulate_media(color_scheme=scheme)
    page.get_by_role("button", name="Draw a face").click()
    says(page, "I don't know")
    for tab in TABS:
        open_tab(page, tab)
        contrasts = page.evaluate(CONTRASTS)
        assert len(contrasts) > 10
        assert not [c for c in contrasts if c[1] < c[2]]


def take_picture(path):
    """The first tab with an answer, from the networks that the first start trains."""
    with tempfile.TemporaryDirectory() as folder:
        with served(Path(folder) / "model") as address, browser() as context:
            page = context.new_page()
            page.goto(address)
            draw(page, digit(4, 1, np.random.default_rng(5)))
            page.locator(".verdict").nth(1).wait_for(timeout=TRAINING)
            page.wait_for_timeout(1000)
            page.screenshot(path=path)


if __name__ == "__main__":
    take_picture(sys.argv[1])
