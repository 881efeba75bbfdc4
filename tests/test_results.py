"""The README's results are those of the committed runs, in docs/results."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
README = (ROOT / "README.md").read_text()

FASHION = "Fashion-MNIST, 784-400-400-10, ensemble"
SINE = "Sine, epistemic sd off the data over that on them"
MNIST = "MNIST, 784-400-400-10, mean network"

# what it is, the published figure, experiment, where in the figures, factor, decimals
FIGURES = [
    (f"{FASHION}: accuracy (%)", "87.65", "fashion_mnist", "400-400.ensemble.accuracy", 100, 2),
    ("NLL (nats)", "–", "fashion_mnist", "400-400.ensemble.nll", 1, 3),
    ("ECE (%)", "–", "fashion_mnist", "400-400.ensemble.ece", 100, 2),
    ("AUROC against MNIST (%)", "–", "fashion_mnist", "400-400.digits.entropy", 100, 1),
    (f"{SINE}: fixed mixture", "–", "sine_regression", "fixed mixture.ratio", 1, 1),
    ("learned mixture", "–", "sine_regression", "learned mixture.ratio", 1, 1),
    ("trainable location", "–", "sine_regression", "trainable location.ratio", 1, 1),
    (f"{MNIST}: accuracy (%), Normal prior", "97.75", "mnist_mlp", "Normal prior", 100, 2),
    ("accuracy (%), mixture prior", "–", "mnist_mlp", "mixture prior", 100, 2),
]
WITHIN = {"mnist_mlp": ".mean_network.accuracy"}


@pytest.fixture
def shown(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "experiments")
    return importlib.import_module("_repeats").shown


def cell(shown, run, where, factor, digits):
    """One figure of a run as the table has it, a dash where the run has none."""
    path = RESULTS / f"{run}.json"
    figures = json.loads(path.read_text()) if path.exists() else {"mean": {}}
    keys = where.split(".")
    if keys[0] not in figures["mean"]:
        return "–"
    assert len(figures["seeds"]) == 3
    return shown(figures, *keys, factor=factor, digits=digits)


def row(shown, figure):
    what, published, experiment, where, factor, digits = figure
    where += WITHIN.get(experiment, "")
    cells = (
        cell(shown, f"{experiment}_{recipe}", where, factor, digits)
        for recipe in ("published", "ours")
    )
    return "| " + " | ".join([what, published, *cells, f"`{experiment}.py`"]) + " |"


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure[3])
def test_the_table_has_what_the_runs_found(figure, shown):
    assert row(shown, figure) in README


def test_every_committed_run_is_of_a_listed_experiment():
    runs = {path.stem.rpartition("_")[0] for path in RESULTS.glob("*_*.json")}
    assert runs - {"posterior"} == {figure[2] for figure in FIGURES}
