# SPDX-License-Identifier: Apache-2.0
"""Prints the lowest version that pyproject.toml allows of every dependency, for pip install -r.

    python tests/_support/min_versions.py > requirements.txt

``make test-lowest`` runs the suite with these: the library, its extras and the group ``dev``. Old
versions have wheels for old Pythons only, so that the interpreter has to be the lowest one, too.
"""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def group(pyproject: dict[str, Any], name: str) -> Iterator[str]:
    """Requirements of a group and of those that it includes, in the order of the file."""
    for line in pyproject["dependency-groups"][name]:
        yield from [line] if isinstance(line, str) else group(pyproject, line["include-group"])


def pins(pyproject: dict[str, Any]) -> list[str]:
    """``name==bound`` for each ``name>=bound`` of the library, its extras and the group ``dev``."""
    project = pyproject["project"]
    extras = sum(project["optional-dependencies"].values(), [])
    lines = [*project["dependencies"], *extras, *group(pyproject, "dev")]
    return [line.replace(">=", "==") for line in lines if not line.startswith(project["name"])]


def lowest_python(project: dict[str, Any]) -> tuple[int, ...]:
    """Version numbers of the ``>=`` bound of the interpreter."""
    return tuple(map(int, project["requires-python"].removeprefix(">=").split(".")))


if __name__ == "__main__":
    declared = tomllib.loads(PYPROJECT.read_text())
    lowest = lowest_python(declared["project"])
    if sys.version_info[: len(lowest)] != lowest:
        name = "python" + ".".join(map(str, lowest))
        sys.exit(f"the lowest versions need {name}: make test-lowest PYTHON={name}")
    print("\n".join(pins(declared)))
