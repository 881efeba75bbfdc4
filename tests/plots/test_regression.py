# SPDX-License-Identifier: Apache-2.0
"""Bands of sampled functions, and the coverage of intervals."""

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from pyro_bbb import metrics, plots
from pyro_bbb.distributions.observation import Normal
from pyro_bbb.prediction import RegressionPrediction

X = torch.linspace(-1, 1, 5)


@pytest.fixture
def ax():
    matplotlib.use("agg")
    return Figure().add_subplot()


def functions(seed, offset=0.0):
    return torch.randn(401, 5, generator=torch.Generator().manual_seed(seed)) + offset


def lines(ax):
    return {line.get_label(): line for line in ax.lines}


def test_the_band_is_the_central_interval_and_the_line_the_median(ax):
    f = functions(0)
    assert plots.function_band(ax, X, f, level=0.8) is ax
    (band,) = ax.collections
    corners = band.get_paths()[0].vertices
    for i, x in enumerate(X.tolist()):
        ends = corners[np.isclose(corners[:, 0], x)][:, 1]
        low, high = np.quantile(f[:, i].double().numpy(), [0.1, 0.9])
        assert ends.min() == pytest.approx(low) and ends.max() == pytest.approx(high)
    np.testing.assert_allclose(lines(ax)["median"].get_ydata(), f.median(0).values)


def test_columns_serve_as_well_as_rows(ax):
    f = functions(0)
    plots.function_band(ax, X[:, None], f[..., None])
    np.testing.assert_allclose(lines(ax)["median"].get_ydata(), f.median(0).values)


def test_the_reference_is_outlined_and_data_are_points(ax):
    f, g = functions(0), functions(1, offset=10.0)
    plots.function_band(ax, X, f, reference=g, data=(X[:2, None], torch.ones(2, 1)))
    found = lines(ax)
    assert found["reference, 90%"].get_ydata().min() > 5
    np.testing.assert_allclose(found["reference, median"].get_ydata(), g.median(0).values)
    assert len(found["data"].get_xdata()) == 2 and len(ax.collections) == 1


def test_the_curve_of_coverage_is_that_of_the_intervals(ax):
    torch.manual_seed(0)
    loc, y = torch.randn(3, 200, 1, dtype=torch.double), 2 * torch.randn(200, 1).double()
    prediction = RegressionPrediction(Normal(loc, 1.0))
    assert plots.coverage(ax, prediction.cdf(y)) is ax
    level, fraction = ax.lines[1].get_xydata().T
    for each in (0.2, 0.5, 0.9):
        drawn = fraction[np.searchsorted(level, each) - 1]
        assert drawn == metrics.coverage(*prediction.interval(each), y)
