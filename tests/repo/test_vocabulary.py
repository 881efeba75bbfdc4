# SPDX-License-Identifier: Apache-2.0
"""A class has its name alone, and a docstring begins with its subject or its verb."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("pyro_bbb", "experiments", "benchmarks")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
TWINS = {"Categorical", "NegativeBinomial", "Normal", "StudentT"}  # also distributions of torch
QUESTION = re.compile(r"(What|Which|Where|Whether|How)\b")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def test_a_class_has_its_name_alone():
    paths_of = defaultdict(list)
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef) and path.is_relative_to(ROOT / "pyro_bbb"):
                paths_of[node.name].append(path.name)
    several = {name: paths for name, paths in paths_of.items() if len(paths) > 1}
    assert several.keys() <= TWINS, several


def test_a_docstring_is_no_question():
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, documented) and (doc := ast.get_docstring(node)):
                assert not QUESTION.match(doc), (path.name, doc)
