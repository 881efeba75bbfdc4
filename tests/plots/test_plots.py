# SPDX-License-Identifier: Apache-2.0
"""The pictures show the numbers they were given: artists are read back and compared."""

import math
import warnings

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib import pyplot
from matplotlib.figure import Figure
from pyro.distributions import Normal
from scipy import stats

import pyro_bbb as bbb
from pyro_bbb import metrics, plots
from pyro_bbb.prediction import ClassificationPrediction, RegressionPrediction
from pyro_bbb.training.history import Record


@pytest.fixture
def ax():
    return Figure().add_subplot()  # no pyplot, hence no window and no global state


@pytest.fixture
def guide():
    torch.manual_seed(0)
    network = bbb.BayesianMLP([4, 30, 3])
    return bbb.AutoSoftplusNormal(
        bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=10)
    )


def lines(ax):
    return {line.get_label(): line for line in ax.lines}


def stairs(ax):
    return [patch for patch in ax.patches if isinstance(patch, matplotlib.patches.StepPatch)]


def record(loss, kl, nll, kl_weight):
    return Record(loss=loss, kl=kl, nll=nll, kl_weight=kl_weight)


def test_style_changes_settings_inside_only():
    before = dict(matplotlib.rcParams)
    with plots.style():
        assert matplotlib.rcParams["axes.spines.top"] is False
    assert dict(matplotlib.rcParams) == before


def test_loss_parts_weights_the_kl(ax):
    history = record([31.0, 12.0], [40.0, 20.0], [11.0, 2.0], [0.5, 0.5])
    assert plots.loss_parts(ax, history, unit="step") is ax
    drawn = lines(ax)
    assert list(drawn["complexity cost"].get_ydata()) == [20.0, 10.0]
    assert list(drawn["data cost"].get_ydata()) == [11.0, 2.0]
    total = drawn["complexity cost"].get_ydata() + np.asarray(drawn["data cost"].get_ydata())
    assert list(drawn["loss, the sum"].get_ydata()) == list(total) == [31.0, 12.0]
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_yscale()) == ("step", "nats", "log")


def test_votes_are_shares_of_the_draws(ax):
    torch.manual_seed(1)
    log_probs = torch.randn(40, 5, 3).log_softmax(-1)
    prediction = ClassificationPrediction(log_probs)
    plots.votes(ax, prediction, 2)
    winners = [max(range(3), key=draw[2].tolist().__getitem__) for draw in log_probs]
    heights = [bar.get_height() for bar in ax.patches]
    assert heights == pytest.approx([winners.count(c) / 40 for c in range(3)])
    mean = lines(ax)["mean probability"]
    np.testing.assert_allclose(mean.get_ydata(), log_probs.exp()[:, 2].mean(0), rtol=1e-5)
    assert "40" in ax.containers[0].get_label()


@pytest.mark.parametrize("shape", [(8, 6), (1, 8, 6), (49,)])
def test_image_shows_the_pixels(ax, shape):
    x = torch.rand(shape)
    plots.image(ax, x)
    shown = ax.images[0].get_array()
    side = (7, 7) if len(shape) == 1 else shape[-2:]
    np.testing.assert_array_equal(shown, x.double().reshape(side))


def band(ax, label):
    """Lower and upper edge of a filled band, at increasing x."""
    (collection,) = [c for c in ax.collections if c.get_label() == label]
    x, y = collection.get_paths()[0].vertices.T
    return np.array([(y[x == at].min(), y[x == at].max()) for at in np.unique(x)]).T


def test_regression_band_total_holds_epistemic(ax):
    torch.manual_seed(2)
    x = torch.linspace(-1, 1, 7)[:, None]
    prediction = RegressionPrediction(torch.distributions.Normal(torch.randn(30, 7, 1), 2.0))
    data = torch.tensor([0.0, 0.5]), torch.tensor([1.0, -1.0])
    plots.regression_band(ax, x, prediction, data=data, truth=x**2)

    means = prediction.sample_means[..., 0].double().numpy()
    epistemic = means.std(0)
    total = np.sqrt(epistemic**2 + 4)
    for label, std in (("epistemic ± 2 sd", epistemic), ("total ± 2 sd", total)):
        low, high = band(ax, label)
        np.testing.assert_allclose(low, means.mean(0) - 2 * std, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(high, means.mean(0) + 2 * std, rtol=1e-5, atol=1e-6)
    drawn = lines(ax)
    np.testing.assert_allclose(drawn["mean"].get_ydata(), means.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(drawn["truth"].get_ydata(), x[:, 0] ** 2)
    np.testing.assert_allclose(drawn["data"].get_xydata().T, np.stack([d.numpy() for d in data]))


def test_weight_rows_are_histograms_of_each_kernel(ax, guide):
    plots.weight_locs(ax, guide)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["fc2.weight", "fc1.weight"]
    for row, (patch, name) in enumerate(zip(stairs(ax), ("fc2", "fc1"), strict=True)):
        values, edges, baseline = patch.get_data()
        count, _ = np.histogram(guide.loc(f"network.{name}.weight").detach(), bins=edges)
        assert baseline == row
        height = np.log(1 + count)
        np.testing.assert_allclose((values - row) / (values - row).max(), height / height.max())


def test_weight_scales_leave_out_pruned_weights(ax, guide):
    pruned = bbb.prune(guide, fraction=0.5)
    plots.weight_scales(ax, pruned, sites=["network.fc1.weight"])
    (patch,) = stairs(ax)
    _, edges, _ = patch.get_data()
    scale = pruned.scale("network.fc1.weight").detach()
    kept = scale[scale > 0].double()
    assert len(kept) < scale.numel()
    assert 0 < edges[0] <= kept.min() and kept.max() <= edges[-1]
    assert ax.get_xscale() == "log"


def test_weight_density_is_the_normal_of_that_weight(ax, guide):
    plots.weight_density(ax, guide, "network.fc1.weight", (3, 1))
    loc, scale = (float(f("network.fc1.weight")[3, 1]) for f in (guide.loc, guide.scale))
    w, density = ax.lines[0].get_xydata().T
    np.testing.assert_allclose(density, stats.norm.pdf(w, loc, scale), rtol=1e-3, atol=1e-6)
    assert w.min() <= min(0, loc - 3 * scale) and w.max() >= max(0, loc + 3 * scale)


def test_prior_density_components_add_up_to_the_mixture(ax):
    plots.prior_density(ax, bbb.ScaleMixtureNormal(pi=0.25, sigma1=1.0, sigma2=math.exp(-4)))
    mixture, wide, narrow = (line.get_ydata() for line in ax.lines)
    w = ax.lines[0].get_xdata()
    np.testing.assert_allclose(wide + narrow, mixture, rtol=1e-4)
    np.testing.assert_allclose(wide, 0.25 * stats.norm.pdf(w), rtol=1e-4)
    assert w[len(w) // 2] == 0 and ax.get_yscale() == "log"


def test_pruning_curve_and_reference_in_per_cent(ax):
    plots.pruning_curve(ax, [0, 0.5, 1], [0.9, 0.8, 0.1], reference=([0, 1], [0.95, 0.2]))
    drawn = lines(ax)
    assert list(drawn["this network"].get_ydata()) == [0.9, 0.8, 0.1]
    assert list(drawn["published"].get_xdata()) == [0, 1]
    assert ax.xaxis.get_major_formatter()(0.5) == ax.yaxis.get_major_formatter()(0.5) == "50%"


def test_snr_is_in_decibels_and_its_share_rises_to_all(ax):
    snr = {"a": torch.tensor([[1.0, 10.0]]), "b": torch.tensor([0.1, 0.0])}
    plots.snr_density_and_cdf(ax, snr)
    twin = ax.figure.axes[1]
    np.testing.assert_allclose(twin.lines[0].get_xdata(), [-10, 0, 10], atol=1e-5)
    np.testing.assert_allclose(twin.lines[0].get_ydata(), [1 / 3, 2 / 3, 1])
    area = sum(bar.get_height() * bar.get_width() for bar in ax.patches)
    assert area == pytest.approx(1)


def test_reliability_is_accuracy_by_confidence(ax):
    confidence = torch.tensor([0.55, 0.58, 0.93, 0.97, 1.0])
    probs = torch.stack([confidence, 1 - confidence], -1)
    plots.reliability(ax, probs, torch.tensor([0, 1, 0, 0, 1]))
    x, y = ax.lines[1].get_xydata().T
    np.testing.assert_allclose(x, [0.565, 2.9 / 3], rtol=1e-6)
    np.testing.assert_allclose(y, [1 / 2, 2 / 3])
    intervals = [segment[:, 1] for segment in ax.collections[0].get_segments()]
    for (low, high), (hits, n) in zip(intervals, [(1, 2), (2, 3)], strict=True):
        wilson = stats.binomtest(hits, n).proportion_ci(0.95, method="wilson")
        assert (low, high) == pytest.approx((wilson.low, wilson.high), abs=1e-4)


def test_entropy_histogram_gives_shares_of_each_kind(ax):
    inside, noise = torch.tensor([0.0, 0.1, 0.1]), torch.tensor([2.0, 2.3])
    plots.entropy_histogram(ax, inside, {"noise": noise}, bins=4)
    shares = {p.get_label(): p.get_xy()[:, 1].max() for p in ax.patches if p.get_label()[0] != "_"}
    assert shares == {"in distribution": pytest.approx(1.0), "noise": pytest.approx(1.0)}
    assert ax.get_xlabel() == "predictive entropy (nats)"
    assert {t.get_text() for t in ax.get_legend().get_texts()} == {"in distribution", "noise"}


def test_drawing_does_not_warn_without_uncertainty(ax):
    certain = ClassificationPrediction(torch.tensor([[[0.0, -math.inf]]]).expand(3, 1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plots.votes(ax, certain, 0)
        plots.entropy_histogram(Figure().add_subplot(), certain.entropy, certain.entropy)


def test_methods_draw_on_new_axes_what_the_functions_draw():
    x, numbers = torch.arange(3.0), RegressionPrediction(Normal(torch.zeros(2, 3, 1), 1.0))
    drawn = numbers.plot(x, truth=x)
    expected = plots.regression_band(Figure().add_subplot(), x, numbers, truth=x)
    curves = [[line.get_xydata().tolist() for line in ax.lines] for ax in (drawn, expected)]
    assert curves[0] == curves[1] != []
    pyplot.close(drawn.figure)


# --- answers of a classifier ---


@pytest.fixture
def prediction():
    torch.manual_seed(0)
    return ClassificationPrediction(torch.randn(7, 40, 3).log_softmax(-1))


def test_every_draw_has_a_point_in_each_class_and_bars_average_them(ax, prediction):
    assert plots.class_probabilities(ax, prediction, 5) is ax
    x, y = lines(ax)["each of 7 draws"].get_xydata().T
    drawn = prediction.sample_probs[:, 5]
    assert np.rint(x).reshape(7, 3).tolist() == [[0, 1, 2]] * 7
    np.testing.assert_array_equal(y.reshape(7, 3), drawn.double())
    assert len(set(x)) == len(x), "draws lie on each other"
    bars = [patch.get_height() for patch in ax.patches]
    np.testing.assert_allclose(bars, drawn.mean(0), rtol=1e-6)


def test_risk_coverage_draws_the_curve_of_each_prediction(ax, prediction):
    y = torch.arange(40) % 3
    flipped = ClassificationPrediction(prediction.sample_log_probs.flip(1))
    assert plots.risk_coverage(ax, {"a": prediction, "b": flipped}, y, minimum=0.5) is ax
    for name, plotted in {"a": prediction, "b": flipped}.items():
        share, risk = metrics.risk_coverage(plotted.confidence, plotted.label == y)
        x, drawn = lines(ax)[name].get_xydata().T
        np.testing.assert_array_equal(x, share[19:])
        np.testing.assert_array_equal(drawn, risk[19:])
        assert drawn[-1] == pytest.approx(1 - metrics.accuracy(plotted.probs, y))
    assert ax.get_xlim() == (0.5, 1.0)
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["a", "b"]


# --- bands of functions, and coverage ---

X = torch.linspace(-1, 1, 5)


def functions(seed, offset=0.0):
    return torch.randn(401, 5, generator=torch.Generator().manual_seed(seed)) + offset


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


def test_the_reference_is_outlined_and_data_are_points(ax):
    f, g = functions(0), functions(1, offset=10.0)
    plots.function_band(ax, X, f, reference=g, data=(X[:2, None], torch.ones(2, 1)))
    drawn = lines(ax)
    assert drawn["reference, 90%"].get_ydata().min() > 5
    np.testing.assert_allclose(drawn["reference, median"].get_ydata(), g.median(0).values)
    assert len(drawn["data"].get_xdata()) == 2 and len(ax.collections) == 1


def test_the_curve_of_coverage_is_that_of_the_intervals(ax):
    torch.manual_seed(0)
    loc, y = torch.randn(3, 200, 1, dtype=torch.double), 2 * torch.randn(200, 1).double()
    prediction = RegressionPrediction(Normal(loc, 1.0))
    assert plots.coverage(ax, prediction.cdf(y)) is ax
    level, fraction = ax.lines[1].get_xydata().T
    for nominal in (0.2, 0.5, 0.9):
        drawn = fraction[np.searchsorted(level, nominal) - 1]
        assert drawn == metrics.coverage(*prediction.interval(nominal), y)
