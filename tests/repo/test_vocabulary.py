# SPDX-License-Identifier: Apache-2.0
"""One word for one concept, the field's: in identifiers, first lines of docstrings and errors.

``docs/glossary.md`` defines the terms. Words are matched as parts of snake_case or CamelCase names.
"""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("pyro_bbb", "experiments", "benchmarks")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
LIBRARY = [path for path in FILES if path.is_relative_to(ROOT / "pyro_bbb")]
INSTEAD = {  # banned word: the term to use
    "asked": "requested",
    "beside": "flat, fused, concatenated",
    "blank": "empty",
    "exclusive": "lock",
    "foreign": "out_of_distribution, ood",
    "guarded": "rollback",
    "hands": "strokes",
    "held": "detached, validation",
    "keeping": "unpruned",
    "kept": "unpruned, saved",
    "mend": "fix, wrap",
    "mended": "fixed, wrapped",
    "place": "device, index, path",
    "places": "devices, indices, paths",
    "seat": "worker",
    "seats": "workers",
    "share": "fraction, shard, cache",
    "shares": "fractions, shards",
    "starts": "initial_positions, offsets",
    "told": "broadcast",
    "trouble": "error",
    "unread": "sync_free",
    "unvalued": "moments",
    "voice": "console",
    "whole": "flat, complete",
}
EXCEPTIONS = {"keeping", "row_starts"}  # public: a function, and a buffer in users' saved modules
TERMS = re.compile(r"held_out|in_place", re.IGNORECASE)  # the field's, though they have such a word
TWINS = {
    "Categorical",
    "NegativeBinomial",
    "Normal",
    "StudentT",
}  # also distributions of torch
PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
QUESTION = re.compile(r"(What|Which|Where|Whether|How)\b")


def words(identifier: str) -> set[str]:
    """Parts of an identifier, in lower case."""
    return {part.lower() for part in PARTS.findall(TERMS.sub("", identifier))}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def defined(path: Path) -> set[str]:
    """Names that a file gives to itself, its definitions, arguments, variables and attributes."""
    names = {path.stem}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.alias) and node.asname:
            names.add(node.asname)
    return names


def first_lines(path: Path):
    """First line of each docstring in a file."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    for node in ast.walk(tree(path)):
        if isinstance(node, documented) and (doc := ast.get_docstring(node)):
            yield doc.splitlines()[0]


def errors(path: Path):
    """Text of each statement that raises an error."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Raise):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_identifiers_are_the_terms_of_the_field():
    found = {
        (name_of(path), name): INSTEAD[word]
        for path in FILES
        for name in sorted(defined(path) - EXCEPTIONS)
        for word in sorted(words(name) & INSTEAD.keys())
    }
    assert not found, f"take the term behind each name instead: {found}"


def test_words_are_parts_of_identifiers_and_not_of_words():
    assert words("held_fixed") & INSTEAD.keys() == {"held"}
    assert words("HeldDraw") & INSTEAD.keys() == words("_HELD") & INSTEAD.keys() == {"held"}
    assert not words("x_held_out") & INSTEAD.keys() and not words("add_in_place") & INSTEAD.keys()
    assert not words("upheld") & INSTEAD.keys() and not words("replace_all") & INSTEAD.keys()


def test_a_class_has_its_name_alone():
    paths_of = defaultdict(list)
    for path in LIBRARY:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                paths_of[node.name].append(name_of(path))
    several = {name: paths for name, paths in paths_of.items() if len(paths) > 1}
    assert several.keys() <= TWINS, several


def test_a_docstring_begins_with_its_subject():
    lines = [(name_of(path), line) for path in FILES for line in first_lines(path)]
    assert not [(name, line) for name, line in lines if QUESTION.match(line)]


def test_an_error_says_what_must_be():
    texts = [(name_of(path), text) for path in FILES for text in errors(path)]
    assert not [(name, text) for name, text in texts if "not so" in text]
