# SPDX-License-Identifier: Apache-2.0
"""The tables of the paper's MNIST networks are those of the runs."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text()


def record(name):
    return json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())


def line(*cells):
    return f"| {' | '.join(cells)} |"


@pytest.fixture
def mnist(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "experiments")
    return importlib.import_module("paper_mnist")


def test_the_errors_are_those_of_the_runs(mnist):
    methods = record("paper_mnist_ours")["methods"]
    for method, *errors in mnist.error_table(methods, mnist.Config()).rows:
        assert line(method, *errors) in PAGE


def test_so_is_what_the_error_does_not_say(mnist):
    methods = record("paper_mnist_ours")["methods"]
    for name, *cells, _, final in mnist.calibration_table(methods, mnist.Config()).rows:
        if final == "–":  # an ordinary network is its own mean and its own draw
            cells[1:3] = "–", "–"
        assert line(name, *cells, final) in PAGE


def test_the_medians_of_the_scales_are_those_of_the_text(mnist):
    methods = record("paper_mnist_ours")["methods"]
    scales = {
        method: [f"{entry['mean']['median_scale']:.2f}" for entry in methods[method].values()]
        for method in (mnist.GAUSSIAN, mnist.MIXTURE)
    }
    assert scales == {
        mnist.GAUSSIAN: ["0.28", "0.36", "0.36"],
        mnist.MIXTURE: ["0.09", "0.10", "0.10"],
    }


def test_the_settings_of_a_reproduction_gave_what_is_told(mnist):
    for method, widths in record("paper_mnist_published")["methods"].items():
        errors = [mnist.cell(entry, "error") for entry in widths.values()]
        wide, bayesian = widths["1200"], method in (mnist.GAUSSIAN, mnist.MIXTURE)
        draws = mnist.cell(wide, "draws_error") if bayesian else "–"
        scales = [mnist.cell(entry, "median_scale", 1, 4) for entry in widths.values()]
        others = mnist.cell(wide, "nll", 1, 4), mnist.cell(wide, "auroc", 100, 1)
        assert (
            line(method, *errors, draws, *others, " / ".join(scales) if bayesian else "–") in PAGE
        )


def test_the_pruned_networks_err_as_told(mnist):
    pruning = importlib.import_module("paper_pruning")
    for row in pruning.errors_table(record("paper_pruning_ours")["errors"]).rows:
        assert line(*row) in PAGE
