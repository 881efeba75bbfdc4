# SPDX-License-Identifier: Apache-2.0
"""Mutation score: the fraction of sampled one-token faults in the library that its tests detect.

    python tests/_support/mutation.py [--root TREE] [--sample 8] [--seed 0] [--packages guides ...]

cosmic-ray makes the mutants, in a copy of the tree. A mutant is drawn by its position and then by
its operator, so that each line of code counts once. A process that has imported torch and Pyro
forks for each mutant and runs the tests of its package, up to the first failure.
"""

import argparse
import ast
import compileall
import contextlib
import difflib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[2]
BAD_INPUT = ["api/test_bad_input.py"]
TESTS = {  # of each package, the cheapest first
    "_recorder": ["training/test_engine.py", "test_mcmc.py"],
    "distributions": ["distributions", "handlers", "inference", *BAD_INPUT],
    "priors": ["priors", *BAD_INPUT],
    "guides": ["guides", "inference", *BAD_INPUT],
    "estimators": ["test_estimators.py", "handlers"],
    "training": ["training", "inference", *BAD_INPUT],
    "prediction": ["prediction", *BAD_INPUT],
}
COPIED = ("pyro_bbb", "tests", "docs", "experiments", "benchmarks", "examples", "pyproject.toml")
PRELOADED = (
    "pyro.infer.autoguide",
    "scipy.stats",
    "matplotlib.figure",
    "torchvision",
    "torch._dynamo",
)
SAME_BY_IDENTITY = ("Eq_Is", "NotEq_IsNot", "Is_Eq", "IsNot_NotEq")  # alike for small numbers
LIMIT = 4  # times the processor time of the tests of unchanged code
START = 20  # seconds added to it


@dataclass(frozen=True)
class Mutant:
    """One replacement in one file."""

    path: str
    line: int
    operator: str
    occurrence: int

    def source(self, text: str) -> str:
        """The file's text with the replacement."""
        changed = mutate_code(text, get_operator(self.operator)(), self.occurrence)
        assert changed is not None
        return changed


def annotations(text: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Spans of type annotations, which run once or never."""
    for node in ast.walk(ast.parse(text)):
        for name in ("annotation", "returns"):
            part = getattr(node, name, None)
            if part is not None:
                yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


def is_equivalent(text: str, line: int, operator: str) -> bool:
    """Whether the changed code does the same: a static method is called on its class only."""
    return operator.endswith("RemoveDecorator") and "@staticmethod" in text.splitlines()[line - 1]


def mutants(root: Path, package: str) -> dict[tuple[str, int, int], list[Mutant]]:
    """All mutants of a package by file, line and column."""
    found = defaultdict(list)
    names = [name for name in operator_names() if not name.endswith(SAME_BY_IDENTITY)]
    operators = {name: get_operator(name) for name in names}
    operators = {name: make() for name, make in operators.items() if not make.arguments()}
    for path in sorted((root / "pyro_bbb" / package).glob("**/*.py")):
        text = path.read_text()
        skipped = list(annotations(text))
        nodes = list(ast_nodes(get_ast(text)))
        for name, operator in operators.items():
            spans = (span for node in nodes for span in operator.mutation_positions(node))
            for occurrence, (start, _) in enumerate(spans):
                never = any(first <= start < last for first, last in skipped)
                if not never and not is_equivalent(text, start[0], name):
                    where = str(path.relative_to(root))
                    found[where, *start].append(Mutant(where, start[0], name, occurrence))
    return found


def sample(root: Path, package: str, count: int, seed: int) -> list[Mutant]:
    """Mutants drawn with a seed, at different positions."""
    found = mutants(root, package)
    generator = random.Random(f"{seed} {package}")
    places = generator.sample(sorted(found), min(count, len(found)))
    return [random.Random(f"{seed} {place}").choice(found[place]) for place in places]


def copied(root: Path, target: Path) -> None:
    """Copies what the tests read, and compiles it so that a changed file is seen as such."""
    ignore = shutil.ignore_patterns("__pycache__", ".*_cache")
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, target / name, ignore=ignore)
        elif (root / name).exists():
            shutil.copy(root / name, target / name)
    modes = {"invalidation_mode": PycInvalidationMode.CHECKED_HASH}
    compileall.compile_dir(target / "pyro_bbb", quiet=1, **modes)


def run_tests(tree: Path, tests: list[str], limit: float) -> tuple[int, float, str]:
    """Exit status of the tests in a forked process, its processor time, and its last lines."""
    with tempfile.TemporaryFile("w+") as log:
        began = resource.getrusage(resource.RUSAGE_CHILDREN)
        child = os.fork()
        if not child:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            _in_child(tree, tests)
        status = _waited(child, limit * 10)
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        log.seek(0)
        spent = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
        return status, spent, "".join(log.readlines()[-12:])


def _in_child(tree: Path, tests: list[str]) -> None:
    """Runs pytest in the tree, never to return."""
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path.insert(0, str(tree))
    status = 1
    try:
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--tb=line"]
        status = int(pytest.main([*options, *(f"tests/{name}" for name in tests)]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _waited(child: int, seconds: float) -> int:
    """Exit status of a process, negative where it was ended by a signal."""
    until = time.monotonic() + seconds
    while not (done := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > until:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what a test left running
    return os.waitstatus_to_exitcode(done[1])


def difference(mutant: Mutant, before: str, after: str) -> str:
    """The changed lines."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return "\n".join(f"    {line}" for line in changed)


def score(tree: Path, package: str, chosen: list[Mutant]) -> list[dict[str, object]]:
    """Runs the tests on each mutant and tells what became of it."""
    status, spent, log = run_tests(tree, TESTS[package], 3600)
    if status:
        raise SystemExit(f"the tests of {package} fail without a mutant:\n{log}")
    print(f"{package}: {spent:.0f} s without a mutant", flush=True)
    results = []
    for mutant in chosen:
        path = tree / mutant.path
        text = path.read_text()
        changed = mutant.source(text)
        path.write_text(changed)
        try:
            status, seconds, log = run_tests(tree, TESTS[package], LIMIT * spent + START)
        finally:
            path.write_text(text)
        fate = "survived" if status == 0 else "killed" if status > 0 else "timeout"
        told = {
            "package": package,
            "at": f"{mutant.path}:{mutant.line}",
            "operator": mutant.operator,
        }
        diff = difference(mutant, text, changed)
        results.append({**told, "fate": fate, "seconds": round(seconds, 1), "diff": diff})
        print(f"{fate:9}{seconds:6.1f} s  {told['at']}  {mutant.operator}\n{diff}", flush=True)
    return results


def main() -> None:
    """Prints a table of all packages, and the mutants that no test detects."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to test")
    parser.add_argument("--sample", type=int, default=8, help="mutants of each package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--packages", nargs="+", choices=TESTS, default=list(TESTS))
    parser.add_argument("--json", type=Path, help="a file for the results")
    options = parser.parse_args()
    for name in PRELOADED:
        __import__(name)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        copied(options.root.resolve(), Path(folder))
        for package in options.packages:
            chosen = sample(Path(folder), package, options.sample, options.seed)
            results += score(Path(folder), package, chosen)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    print(f"\n{'package':16}{'sampled':>8}{'killed':>8}{'survived':>9}")
    for package in (*options.packages, "all"):
        fates = [each["fate"] for each in results if package in ("all", each["package"])]
        survived = fates.count("survived")
        print(f"{package:16}{len(fates):8}{len(fates) - survived:8}{survived:9}")


if __name__ == "__main__":
    main()
