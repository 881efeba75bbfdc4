# SPDX-License-Identifier: Apache-2.0
"""The page on the architecture names files that exist, and every package."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pyro_bbb"
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
LAYERS = next(c["layers"] for c in CONTRACTS["contracts"] if c["type"] == "layers")
NUMBERS = {  # of each package's layer, 1 at the bottom
    package.strip(): number
    for number, layer in enumerate(reversed(LAYERS), start=1)
    for package in layer.split("|")
}
PATHS = sorted({name for name in re.findall(r"`([\w./]+)`", PAGE) if "/" in name})


@pytest.mark.parametrize("path", [path for path in PATHS if "NAME" not in path])
def test_a_path_on_the_page_exists(path):
    assert (PACKAGE / path).exists() or (ROOT / path).exists()


def test_every_package_is_in_the_table_and_on_its_layer():
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", PAGE, flags=re.MULTILINE)
    assert {package: int(number) for number, package in rows} == NUMBERS
    assert len(rows) == len(NUMBERS)


def test_the_picture_has_every_package_on_its_layer():
    path = ROOT / "docs" / "architecture_figure.py"
    spec = importlib.util.spec_from_file_location("architecture_figure", path)
    figure = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figure)
    assert {package: number for package, (number, *_) in figure.PACKAGES.items()} == NUMBERS
