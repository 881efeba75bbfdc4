# SPDX-License-Identifier: Apache-2.0
"""Mutation score: the fraction of sampled one-token faults in the library that its tests detect.

    python tests/_support/mutation.py [--root TREE] [--sample 8] [--seed 0] [--packages guides ...]

cosmic-ray makes the mutants, in a copy of the tree. A mutant is drawn by its position and then by
its operator, so that each line of code counts once; the tests of its package run on it, up to the
first failure.
"""

import argparse
import ast
import difflib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[2]
BAD_INPUT = ["api/test_bad_input.py"]
TESTS = {  # of each package, the cheapest first
    "_recorder": ["training/test_captured.py", "test_mcmc.py"],
    "distributions": ["distributions", "handlers", "inference", *BAD_INPUT],
    "priors": ["priors", *BAD_INPUT],
    "guides": ["guides", "inference", *BAD_INPUT],
    "estimators": ["test_estimators.py", "handlers"],
    "training": ["training", "inference", *BAD_INPUT],
    "prediction": ["prediction", *BAD_INPUT],
}
COPIED = ("pyro_bbb", "tests", "docs", "experiments", "benchmarks", "examples")
SAME_BY_IDENTITY = ("Eq_Is", "NotEq_IsNot", "Is_Eq", "IsNot_NotEq")  # alike for small numbers
LIMIT, START = 4, 60  # times the seconds of the tests of unchanged code, and seconds added to it


@dataclass(frozen=True)
class Mutant:
    """One replacement in one file."""

    path: str
    line: int
    operator: str
    occurrence: int


def annotations(text: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Spans of type annotations, which run once or never."""
    for node in ast.walk(ast.parse(text)):
        for name in ("annotation", "returns"):
            hint = getattr(node, name, None)
            if hint is not None:
                yield (hint.lineno, hint.col_offset), (hint.end_lineno, hint.end_col_offset)


def mutants(root: Path, package: str) -> dict[tuple[str, int, int], list[Mutant]]:
    """All mutants of a package by file, line and column."""
    by_place = defaultdict(list)
    names = [name for name in operator_names() if not name.endswith(SAME_BY_IDENTITY)]
    operators = {name: get_operator(name) for name in names}
    operators = {name: make() for name, make in operators.items() if not make.arguments()}
    for path in sorted((root / "pyro_bbb").glob(f"{package}*/**/*.py")) or [
        root / "pyro_bbb" / f"{package}.py"
    ]:
        text = path.read_text()
        skipped, nodes = list(annotations(text)), list(ast_nodes(get_ast(text)))
        for name, operator in operators.items():
            spans = (span for node in nodes for span in operator.mutation_positions(node))
            for occurrence, (start, _) in enumerate(spans):
                never = any(first <= start < last for first, last in skipped)
                # a static method is called on its class only
                same = (
                    name.endswith("RemoveDecorator")
                    and "@static" in text.splitlines()[start[0] - 1]
                )
                if not never and not same:
                    where = str(path.relative_to(root))
                    by_place[where, *start].append(Mutant(where, start[0], name, occurrence))
    return by_place


def sample(root: Path, package: str, count: int, seed: int) -> list[Mutant]:
    """Mutants drawn with a seed, at different positions."""
    by_place = mutants(root, package)
    generator = random.Random(f"{seed} {package}")
    places = generator.sample(sorted(by_place), min(count, len(by_place)))
    return [random.Random(f"{seed} {place}").choice(by_place[place]) for place in places]


def run_tests(tree: Path, package: str, limit: float | None = None) -> tuple[str, float]:
    """Fate of the tree's code by the tests of a package, and the seconds that these took."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line"]
    command += ["-m", "not slow", *(f"tests/{name}" for name in TESTS[package])]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, check=False, timeout=limit
        )
        fate = "killed" if done.returncode else "survived"
    except subprocess.TimeoutExpired:
        fate = "timeout"
    return fate, time.monotonic() - began


def score(tree: Path, package: str, chosen: list[Mutant]) -> list[str]:
    """Run the tests on each mutant and print what became of it."""
    fate, spent = run_tests(tree, package)
    if fate != "survived":
        raise SystemExit(f"the tests of {package} fail without a mutant")
    fates = []
    for mutant in chosen:
        path = tree / mutant.path
        text = path.read_text()
        changed = mutate_code(text, get_operator(mutant.operator)(), mutant.occurrence)
        path.write_text(changed or text)
        try:
            fate, seconds = run_tests(tree, package, LIMIT * spent + START)
        finally:
            path.write_text(text)
        lines = difflib.unified_diff(text.splitlines(), (changed or text).splitlines(), n=0)
        print(f"{fate:9}{seconds:6.1f} s  {mutant.path}:{mutant.line}  {mutant.operator}")
        print(*(f"    {line}" for line in list(lines)[3:]), sep="\n", flush=True)
        fates.append(fate)
    return fates


def main() -> None:
    """Print the mutants of each package, and a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to test")
    parser.add_argument("--sample", type=int, default=8, help="mutants of each package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--packages", nargs="+", choices=TESTS, default=list(TESTS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in COPIED:
            ignore = shutil.ignore_patterns("__pycache__", ".*_cache")
            shutil.copytree(options.root / name, tree / name, ignore=ignore)
        shutil.copy(options.root / "pyproject.toml", tree)
        fates = {
            package: score(tree, package, sample(tree, package, options.sample, options.seed))
            for package in options.packages
        }
    fates["all"] = [fate for package in fates.values() for fate in package]
    print(f"\n{'package':16}{'sampled':>8}{'survived':>9}")
    for package, outcomes in fates.items():
        print(f"{package:16}{len(outcomes):8}{outcomes.count('survived'):9}")


if __name__ == "__main__":
    main()
