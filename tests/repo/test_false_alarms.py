# SPDX-License-Identifier: Apache-2.0
"""The ledger of statistical tests in the documentation: complete, and within its budget."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUDGET = 1e-3  # probability that a run of the whole suite fails by chance, for a new seed
STATISTICAL = re.compile(  # what gives a test away
    r"(?<!\")standard[ _]errors?|\d sigma|SIGMAS|[Ff]alse alarms?|< (4\.5|[5-79](\.5)?|10) \* "
    r"|kstest|ks_2samp|\bpvalue\b|chisquare"
    r"|assert_mean\(|assert_same_law\(|assert_same_predictive\(|uniformity\("
)
ROW = re.compile(r"^\| `(test_\w+)::(test_\w+)` \| ([\d,]+) \| (.+) \| (\S+) \|$", re.MULTILINE)


def ledger():
    """Return each statistical test's number of comparisons and chance of a false alarm."""
    text = (ROOT / "docs" / "guarantees.md").read_text()
    sections = re.split(r"^## ", text, flags=re.MULTILINE)
    (section,) = [s for s in sections if s.startswith("Statistical tests")]
    rows = ROW.findall(section)
    assert len(rows) == section.count("\n| `"), "a row of another form"
    (total,) = re.findall(r"in all ([\d.e-]+) per run", section)
    table = {(file, test): (int(n.replace(",", "")), float(p)) for file, test, n, _, p in rows}
    assert len(table) == len(rows)
    return table, float(total)


@cache
def suite():
    """The source of each test in the suite, with its comments."""
    sources = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if path.name == Path(__file__).name:
            continue
        source = path.read_text()
        lines = source.splitlines()  # get_source_segment would split them again for each test
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                source_lines = lines[node.lineno - 1 : node.end_lineno]
                sources[path.stem, node.name] = "\n".join(source_lines)
    return sources


def test_the_budget_is_kept():
    table, total = ledger()
    assert all(n >= 1 and 0 < p < BUDGET for n, p in table.values())
    assert sum(p for _, p in table.values()) <= total <= BUDGET


def test_every_entry_is_a_test():
    assert ledger()[0].keys() <= suite().keys()


def test_every_statistical_test_has_an_entry():
    statistical = {name for name, source in suite().items() if STATISTICAL.search(source)}
    assert statistical - ledger()[0].keys() == set()
