# SPDX-License-Identifier: Apache-2.0
"""The README's code runs as it stands, and its links and files exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_code_runs_and_learns(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    exec(block, {})
    accuracy = float(re.search(r"accuracy (\S+)", capsys.readouterr().out)[1])
    assert accuracy > 0.95


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
