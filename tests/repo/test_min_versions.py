# SPDX-License-Identifier: Apache-2.0
"""The pins with which ``make test-lowest`` runs the suite."""

import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from tests._support.min_versions import PYPROJECT, lowest_python, pins

SCRIPT = Path(__file__).parents[1] / "_support" / "min_versions.py"
PROJECT = {
    "name": "ours",
    "requires-python": ">=3.11",
    "dependencies": ["a>=1.2"],
    "optional-dependencies": {
        "more": ["b-c>=3"],
        "dev": ["ours[more]", "d>=0.4.1"],
        "benchmarks": ["e>=5"],
    },
}


def test_bounds_become_pins():
    assert pins(PROJECT) == ["a==1.2", "b-c==3", "d==0.4.1"]
    assert lowest_python(PROJECT) == (3, 11)


def test_every_package_that_the_suite_needs_is_pinned_once():
    requirements = [
        Requirement(line) for line in pins(tomllib.loads(PYPROJECT.read_text())["project"])
    ]
    names = [requirement.name for requirement in requirements]
    assert {"torch", "safetensors", "arviz", "scikit-learn", "pytest"} <= set(names)
    assert len(set(names)) == len(names)
    for requirement in requirements:
        assert [specifier.operator for specifier in requirement.specifier] == ["=="]


def run(folder, lowest):
    """The script beside a pyproject.toml that asks for another Python."""
    text = PYPROJECT.read_text().replace('">=3.11"', f'">={lowest}"')
    (folder / "pyproject.toml").write_text(text)
    copy = folder / "tests" / "_support" / SCRIPT.name
    copy.parent.mkdir(parents=True)
    copy.write_text(SCRIPT.read_text())
    command = [sys.executable, copy]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_script_prints_the_pins(tmp_path):
    done = run(tmp_path, ".".join(map(str, sys.version_info[:2])))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == pins(tomllib.loads(PYPROJECT.read_text())["project"])


def test_the_script_asks_for_the_lowest_python(tmp_path):
    done = run(tmp_path, "3.99")
    assert done.returncode == 1 and done.stdout == ""
    assert "need python3.99: make test-lowest PYTHON=python3.99" in done.stderr
