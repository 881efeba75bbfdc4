# SPDX-License-Identifier: Apache-2.0
"""Text that every machine has: the docstrings of Python's standard library, as characters."""

import ast
import sysconfig
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch

from _helpers.run import Data

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
CONTEXT = 64
DECIMAL = "_pydecimal.py"  # decimal arithmetic: its rules, with examples
LEFT_OUT = {DECIMAL, "test", "tests", "idle_test", "lib2to3", "site-packages"}


def library(*, smoke: bool) -> str:
    """The docstrings of all modules but those of decimal arithmetic; in a smoke test of one."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [root / "argparse.py"] if smoke else sorted(root.rglob("*.py"))
    return docstrings(p for p in files if not LEFT_OUT & {*p.relative_to(root).parts})


def decimal() -> str:
    """The docstrings of decimal arithmetic."""
    return docstrings([Path(sysconfig.get_paths()["stdlib"]) / DECIMAL])


def docstrings(files: Iterable[Path]) -> str:
    """The docstrings of Python files in order, with an empty line between."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found: list[str] = []
    for path in files:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in old files
            tree = ast.parse(path.read_bytes())
        parts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        found += [part for part in parts if part]
    return "\n\n".join(found)


def sequences(text: str) -> Data:
    """Numbers of characters ``[n, 64]``, and of those that follow each, ``[n, 64]``.

    A character that is not ASCII counts as a question mark.
    """
    number = {character: i for i, character in enumerate(CHARACTERS)}
    numbers = torch.tensor([number.get(each, number["?"]) for each in text])
    n = (len(numbers) - 1) // CONTEXT
    x, y = (part[: n * CONTEXT].reshape(n, CONTEXT) for part in (numbers, numbers[1:]))
    return x, y
