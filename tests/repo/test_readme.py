# SPDX-License-Identifier: Apache-2.0
"""The README's code runs as it stands, and its links and files exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


INDEX = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def python_blocks(page):
    return re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)


@pytest.mark.slow
def test_the_code_runs_and_learns(capsys):
    table, network = ({}, {})
    for block, names in zip(python_blocks(README), (table, network), strict=True):
        exec(block, names)
    in_gap = abs(table["x_new"][:, 0] + 0.1) < 0.3
    assert table["std"][in_gap].mean() > 3 * table["std"][~in_gap].min()
    accuracy = float(re.search(r"accuracy (\S+)", capsys.readouterr().out)[1])
    assert accuracy > 0.95


def test_the_first_page_of_the_site_has_the_same_code():
    assert python_blocks(INDEX) == python_blocks(README)


def test_links_and_pictures_exist():
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert targets
    missing = [target for target in targets if not (ROOT / target).exists()]
    assert not missing


def test_commands_name_targets_of_the_makefile_and_files_that_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    for path in re.findall(r"python ((?:experiments|notebooks)/\S+\.py)", README):
        assert (ROOT / path).exists(), path
