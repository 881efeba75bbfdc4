# SPDX-License-Identifier: Apache-2.0
"""Prints the lowest version that pyproject.toml allows of every dependency, for pip install -r.

    python tests/_support/min_versions.py > requirements.txt

``make test-lowest`` runs the suite with these. The extra ``benchmarks`` is left out: the suite uses
nothing of it. Old versions have wheels for old Pythons only, so that the interpreter has to be the
lowest one, too.
"""

import sys
import tomllib
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
LEFT_OUT = {"benchmarks"}


def pins(project: dict[str, Any]) -> list[str]:
    """``name==bound`` for each ``name>=bound`` of the ``[project]`` table and its extras."""
    extras = project.get("optional-dependencies", {})
    kept = [lines for name, lines in extras.items() if name not in LEFT_OUT]
    lines = sum(kept, project["dependencies"])
    return [line.replace(">=", "==") for line in lines if not line.startswith(project["name"])]


def lowest_python(project: dict[str, Any]) -> tuple[int, ...]:
    """Version numbers of the ``>=`` bound of the interpreter."""
    return tuple(map(int, project["requires-python"].removeprefix(">=").split(".")))


if __name__ == "__main__":
    declared = tomllib.loads(PYPROJECT.read_text())["project"]
    lowest = lowest_python(declared)
    if sys.version_info[: len(lowest)] != lowest:
        name = "python" + ".".join(map(str, lowest))
        sys.exit(f"the lowest versions need {name}: make test-lowest PYTHON={name}")
    print("\n".join(pins(declared)))
