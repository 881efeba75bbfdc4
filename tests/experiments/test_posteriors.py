"""Cells, clock and figure of `experiments/posteriors.py`."""

from itertools import combinations

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.text import Text


@pytest.fixture
def training(load):
    return load("_helpers.posterior_training")


def test_clock_adds_up_over_interruptions_and_does_not_end_a_training(training, tmp_path):
    path = tmp_path / "seconds.json"
    first = training.Clock(path)
    assert first.note(object()) is None, "a callback that returns true ends the training"
    before = first.seconds
    second = training.Clock(path)
    assert 0 < second.before <= before
    sum(range(1_000_000))
    second.note()
    assert training.Clock(path).before > second.before


def test_a_cell_that_is_done_is_not_trained_again(load, tmp_path):
    cells, run = load("_helpers.posterior_cells"), load("_helpers.run")
    path = tmp_path / "map" / "0.json"
    run.write_json(path, {"nll": 0.25})
    assert cells.cell(path, None, None, None, 0) == {"nll": 0.25}


def test_a_model_has_a_prior_of_its_own(load, training):
    methods = load("_helpers.posterior_methods")
    problem = methods.PROBLEMS["fashion_mlp"]
    x, y = torch.rand(20, 1, 28, 28), torch.arange(20) % 10
    task = training.Task(
        problem=problem, data=(x, y), seed=0, folder=None, clock=None, engine="eager"
    )
    task.model(methods.FAN_IN)
    assert not methods.FAN_IN.by_fan_in, "checkpoints would depend on what ran before"


def test_labels_do_not_overlap(load):
    label_in_margin = load("_helpers.posterior_report").label_in_margin
    figure, ax = plt.subplots(figsize=(6.4, 4.4))
    labels = [f"method {i}" for i in range(11)]
    x, y = [1.0 + i % 3 for i in range(11)], [0.3 + 1e-4 * (i % 2) for i in range(11)]
    ax.plot(x, y, "o")
    label_in_margin(ax, labels, x, y)
    figure.canvas.draw()
    boxes = [Text.get_window_extent(label) for label in ax.texts]  # without the line
    plt.close(figure)
    assert len(boxes) == 11
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
