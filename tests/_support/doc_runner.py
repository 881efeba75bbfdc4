# SPDX-License-Identifier: Apache-2.0
"""Runs the code blocks of a page of the documentation as a reader would, one after the other.

    python -m pytest tests/repo/test_docs.py -k guide/refusal

A page's ``python`` blocks share one namespace. Of its ``console`` blocks, commands that begin with
``pyro-bbb`` or ``python`` are run; others (``pip install``, ``make``) are not. A ``text`` block
right below is what the block prints: the same words and whole numbers, and decimals within a tenth
or two units of the last digit, since a training rounds differently on another machine. A comment
right above a block keeps it from being run::

    <!-- not run: a GPU -->
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from types import ModuleType

from pyro_bbb.apps import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
REASONS = {  # why a block of the language may stand without being run
    "python": {"a GPU", "several machines", "another package"},
    "console": {"a GPU", "several machines", "another package", "a download", "minutes"},
}
FENCE = re.compile(
    r"(?:^[ ]*<!-- not run: (?P<reason>[^\n]*?) -->\s*?\n\s*?)?"
    r"^(?P<indent>[ ]*)(?P<ticks>`{3,})(?P<language>\w*)[^\n]*\n"
    r"(?P<code>.*?)^(?P=indent)(?P=ticks)[ ]*$"
    r"(?:\s*?\n\s*?^(?P=indent)(?P=ticks)text\n(?P<output>.*?)^(?P=indent)(?P=ticks)[ ]*$)?",
    re.MULTILINE | re.DOTALL,
)
NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    code: str
    line: int  # of the page, where the code begins
    reason: str | None  # why it is not run
    output: str | None  # what it prints, where the page shows it


def blocks(page: Path) -> Iterator[Block]:
    """The page's blocks of code, in order."""
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        if match["language"] in REASONS:
            output = None if match["output"] is None else dedent(match["output"])
            line = text.count("\n", 0, match.start("code")) + 1
            yield Block(match["language"], dedent(match["code"]), line, match["reason"], output)


def check_reasons(page: Path) -> None:
    """Fails where a block is not run for a reason that is none."""
    for block in blocks(page):
        reason = block.reason and block.reason.partition(":")[0]
        assert reason is None or reason in REASONS[block.language], f"{page}:{block.line}: {reason}"


def run_page(page: Path, folder: Path, capsys) -> int:
    """Runs the blocks in the folder, which is the current one, and returns how many."""
    module = sys.modules["page"] = ModuleType("page")  # a module, so that classes work as in a file
    runnable = [block for block in blocks(page) if block.reason is None]
    capsys.readouterr()
    for block in runnable:
        if block.language == "python":
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, str(page), "exec"), module.__dict__)
        else:
            for command in commands(block.code):
                run_command(command, folder)
        compare(capsys.readouterr().out, block.output, f"{page}:{block.line}")
    return len(runnable)


def commands(code: str) -> list[list[str]]:
    """The words of each command that is run."""
    lines = code.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [line for line in words if line and line[0] in ("pyro-bbb", "python")]


def run_command(words: list[str], folder: Path) -> None:
    """Runs it; scripts of the repository are found from any folder. What it prints is printed."""
    if words[0] == "pyro-bbb":
        assert exit_code(words[1:]) == 0, shlex.join(words)
        return
    words = [str(ROOT / word) if (ROOT / word).is_file() else word for word in words[1:]]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout, end="")


def exit_code(words: list[str]) -> int | str:
    """Run the command line in this process."""
    try:
        return main(words)
    except SystemExit as end:
        return end.code or 0


def compare(printed: str, shown: str | None, place: str) -> None:
    """Fails where the page shows another output than its block has."""
    if shown is None:
        return
    got, expected = NUMBER.split(printed.strip()), NUMBER.split(shown.strip())
    message = f"{place} prints\n{printed}\nand the page shows\n{shown}"
    assert [text.split() for text in got[::2]] == [text.split() for text in expected[::2]], message
    assert all(map(close, got[1::2], expected[1::2])), message


def close(number: str, shown: str) -> bool:
    """Whether two numbers agree: whole ones to the digit, decimals as well as machines do."""
    decimals = len(shown.partition(".")[2])
    if not decimals:
        return number == shown
    same_form = len(number.partition(".")[2]) == decimals
    allowed = max(2.01 * 10.0**-decimals, 0.1 * abs(float(shown)))
    return same_form and abs(float(number) - float(shown)) <= allowed
