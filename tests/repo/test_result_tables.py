# SPDX-License-Identifier: Apache-2.0
"""The tables of the documentation are those that `docs/result_tables.py` writes from records."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = (
    *("README.md", "docs/results/index.md", "docs/performance.md", "docs/scaling.md"),
    *("docs/fidelity.md", "docs/development/lab_book.md"),
    *("docs/guide/choose.md", "docs/guide/pruning_and_deploying.md"),
    "docs/guide/residual_networks.md",
    "docs/development/performance_log.md",
)


@pytest.fixture(scope="module")
def tables():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")  # restores what the script adds, too
        yield importlib.import_module("result_tables")


def test_every_page_is_listed(tables):
    assert tables.PAGES.keys() == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_as_it_was_written(tables, page):
    assert tables.filled(page) == (ROOT / page).read_text("utf-8"), "run docs/result_tables.py"
