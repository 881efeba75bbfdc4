# SPDX-License-Identifier: Apache-2.0
"""What the pictures of answers show is what was predicted."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from pyro_bbb import metrics, plots
from pyro_bbb.prediction import ClassificationPrediction


@pytest.fixture
def ax():
    return Figure().add_subplot()  # no pyplot, hence no window and no global state


@pytest.fixture
def prediction():
    torch.manual_seed(0)
    return ClassificationPrediction(torch.randn(7, 40, 3).log_softmax(-1))


def lines(ax):
    return {line.get_label(): line for line in ax.lines}


def test_every_draw_has_a_point_in_each_class_and_bars_average_them(ax, prediction):
    assert plots.class_probabilities(ax, prediction, 5) is ax
    x, y = lines(ax)["each of 7 draws"].get_xydata().T
    drawn = prediction.sample_probs[:, 5]
    assert np.rint(x).reshape(7, 3).tolist() == [[0, 1, 2]] * 7
    np.testing.assert_array_equal(y.reshape(7, 3), drawn.double())
    assert len(set(x)) == len(x), "draws lie on each other"
    bars = [patch.get_height() for patch in ax.patches]
    np.testing.assert_allclose(bars, drawn.mean(0), rtol=1e-6)


def test_a_single_draw_stands_in_the_middle_of_its_class(ax):
    plots.class_probabilities(ax, ClassificationPrediction(torch.zeros(1, 1, 2) - 0.7), 0)
    assert lines(ax)["each of 1 draws"].get_xdata().tolist() == [0.0, 1.0]


def test_risk_coverage_draws_the_curve_of_each_prediction(ax, prediction):
    y = torch.arange(40) % 3
    other = ClassificationPrediction(prediction.sample_log_probs.flip(1))
    assert plots.risk_coverage(ax, {"a": prediction, "b": other}, y, minimum=0.5) is ax
    for name, each in {"a": prediction, "b": other}.items():
        share, risk = metrics.risk_coverage(each.confidence, each.label == y)
        x, drawn = lines(ax)[name].get_xydata().T
        np.testing.assert_array_equal(x, share[19:])
        np.testing.assert_array_equal(drawn, risk[19:])
        assert drawn[-1] == pytest.approx(1 - metrics.accuracy(each.probs, y))
    assert ax.get_xlim() == (0.5, 1.0)
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["a", "b"]


def test_lines_of_risk_coverage_differ_without_colour(ax, prediction):
    y = torch.zeros(40, dtype=torch.long)
    plots.risk_coverage(ax, dict.fromkeys("abcd", prediction), y)
    assert len({line.get_linestyle() for line in ax.lines}) == 4
