# SPDX-License-Identifier: Apache-2.0
"""Plots of training, posteriors and predictions, each drawn on an Axes that the caller owns.

Every function takes the Axes ``ax`` first, draws, labels the axes with their units and returns the
Axes, so that a finding can be put above it: ``plots.loss_parts(ax, history).set_title("...")``.
Nothing here opens a window or changes matplotlib's settings: `style` is a context for that, and
`axes` makes a new figure. Line styles and markers differ as well as colours, for grey print.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import cycle
from numbers import Integral
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.rcsetup import cycler
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter
from scipy.stats import binomtest
from torch import Tensor
from torch.distributions import Distribution, Normal

from pyro_bbb import metrics
from pyro_bbb._utils.colors import BLACK as BLACK
from pyro_bbb._utils.colors import BLUE as BLUE
from pyro_bbb._utils.colors import CYCLE as CYCLE
from pyro_bbb._utils.colors import ORANGE as ORANGE
from pyro_bbb._utils.colors import PURPLE
from pyro_bbb._utils.colors import SKY as SKY
from pyro_bbb._utils.colors import VERMILLION as VERMILLION
from pyro_bbb._utils.validation import count, fraction, kind, of_array, probability, tensor
from pyro_bbb.guides import AutoSoftplusNormal
from pyro_bbb.prediction import ClassificationPrediction, RegressionPrediction
from pyro_bbb.training.history import History, Record

Array = npt.NDArray[np.float64]


# --- style, axes and arrays ---


def style() -> AbstractContextManager[None]:
    """Return matplotlib's settings for reports, undone on leaving: ``with plots.style(): ...``."""
    return matplotlib.rc_context(
        {
            "axes.prop_cycle": cycler(color=CYCLE),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlelocation": "left",
            "axes.titlesize": "medium",
            "axes.titleweight": "bold",
            "axes.axisbelow": True,
            "figure.constrained_layout.use": True,
            "figure.dpi": 100,
            "figure.figsize": (4.8, 3.2),
            "font.size": 10,
            "legend.frameon": False,
            "legend.fontsize": "small",
            "savefig.dpi": 200,
        }
    )


def axes(ax: Axes | None = None) -> Axes:
    """Return the given Axes, or those of a new figure in this package's style."""
    if ax is not None:
        return kind("ax", ax, Axes)
    with style():
        return plt.subplots()[1]


def _percent(*axes: Axis) -> None:
    """Write the numbers of axes in per cent."""
    for axis in axes:
        axis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _as_numpy(x: Tensor) -> Array:
    """Return a tensor's numbers in float64, from any device and dtype."""
    return np.asarray(of_array(x).detach().cpu().double())


def _rows(name: str, x: Tensor, rows: int) -> Array:
    """Return a tensor's numbers as a vector, if it has this number of rows."""
    if list(tensor(name, x).shape[:1]) != [rows]:
        raise ValueError(f"{name} must have {rows} rows, got shape {list(x.shape)}")
    return _flat(x)


def _require_index(index: Any, shape: Sequence[int]) -> None:
    """Raise ValueError unless an index is that of one number of a tensor."""
    labels = index if isinstance(index, tuple) else (index,)
    integers = all(isinstance(i, Integral) and not isinstance(i, bool) for i in labels)
    inside = integers and len(labels) == len(shape)
    if not (inside and all(-n <= i < n for i, n in zip(labels, shape, strict=True))):
        raise ValueError(
            f"index must be the place of one number of shape {list(shape)}, got {index!r}"
        )


def _flat(x: Tensor) -> Array:
    """Return a tensor's numbers as a vector."""
    return _as_numpy(x).reshape(-1)


# --- training ---


def loss_parts(ax: Axes, history: Record, *, unit: str = "epoch") -> Axes:
    r"""Draw the two parts of the loss, $\pi\,KL$ and $-\log p(D|w)$, and their sum, in nats.

    ``history`` is the result of `pyro_bbb.fit`, or its ``steps``, and ``unit`` names one entry of
    it. A `History` adds its baseline, the loss of a posterior that ignores the data, and the
    validation loss, times the number of training examples; a point marks its best epoch. The axis
    is logarithmic where every value is positive.
    """
    if not kind("history", history, Record).loss:
        raise ValueError("history must hold at least one entry, got none")
    complexity = [weight * kl for weight, kl in zip(history.kl_weight, history.kl, strict=True)]
    when = range(1, len(history.loss) + 1)
    ax.plot(when, complexity, color=SKY, linewidth=3.0, label="complexity cost")
    ax.plot(when, history.nll, color=VERMILLION, linewidth=2.0, label="data cost")
    ax.plot(when, history.loss, color=BLACK, linewidth=1.0, linestyle="--", label="loss, the sum")
    if isinstance(history, History) and history.baseline_per_example is not None:
        baseline = history.baseline_per_example * history.num_data
        ax.axhline(baseline, color=PURPLE, linewidth=1.5, linestyle=":", label="data ignored")
    if isinstance(history, History) and history.validation_loss:
        validation = [history.num_data * nats for nats in history.validation_loss]
        best = [] if history.best_epoch is None else [history.best_epoch]
        options: dict[str, Any] = {"marker": "o", "markevery": best, "label": "validation, scaled"}
        ax.plot(range(1, len(validation) + 1), validation, color=PURPLE, linewidth=1.5, **options)
    if min(*history.loss, *complexity, *history.nll) > 0:
        ax.set_yscale("log")
    ax.set(xlabel=unit, ylabel="nats")
    ax.legend(loc="upper right", frameon=True, framealpha=0.8, edgecolor="none")
    return ax


def image(ax: Axes, x: Tensor) -> Axes:
    """Draw a grey image, dark ink on white paper, without ticks.

    Raises:
        ValueError: ``x`` is not ``[height, width]``, ``[1, height, width]`` or ``[side * side]``.
    """
    x = tensor("x", x)
    side = math.isqrt(x.numel())
    if x.ndim == 1 and side * side == x.numel():
        x = x.reshape(side, side)
    elif x.ndim == 3 and x.shape[0] == 1:
        x = x[0]
    if x.ndim != 2 or x.numel() == 0:
        raise ValueError(
            "expected x of shape [height, width], [1, height, width] or [side * side], "
            f"got {list(x.shape)}"
        )
    ax.imshow(_as_numpy(x), cmap="gray_r", interpolation="nearest")
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set(visible=True, color="0.7")
    return ax


# --- predictions of classes ---


def votes(ax: Axes, prediction: ClassificationPrediction, index: int) -> Axes:
    """Draw the votes of the sampled networks on input ``index``, with their mean probabilities.

    Bars are the fraction of networks whose most probable class it is. The legend is the caller's.
    """
    draws = _draws_at(prediction, index)
    number, classes = draws.shape
    where, voted = np.arange(classes), np.bincount(draws.argmax(1), minlength=classes) / number
    ax.bar(where, voted, color=SKY, label=f"votes of {number} networks")
    mean = _as_numpy(prediction.probs[index])
    ax.plot(where, mean, "D", color=VERMILLION, markersize=4, label="mean probability")
    ax.set(xticks=where, xlabel="class", ylim=(0.0, 1.05))
    _percent(ax.yaxis)
    return ax


def class_probabilities(ax: Axes, prediction: ClassificationPrediction, index: int) -> Axes:
    """Draw the class probabilities of every draw for input ``index``, and their average as bars."""
    draws = _draws_at(prediction, index)
    number, classes = draws.shape
    where, offset = np.arange(classes), np.linspace(-0.35, 0.35, number) * (number > 1)
    ax.bar(where, _as_numpy(prediction.probs[index]), width=0.8, color=SKY, label="average")
    positions = (where + offset[:, None]).ravel()
    (points,) = ax.plot(positions, draws.ravel(), "o", color=BLACK, label=f"each of {number} draws")
    points.set(markersize=2.5, alpha=0.4, markeredgewidth=0.0)
    ax.set(xticks=where, xlabel="class", xlim=(-0.7, classes - 0.3), ylim=(-0.03, 1.03))
    _percent(ax.yaxis)
    return ax


def _draws_at(prediction: ClassificationPrediction, index: int) -> Array:
    """Return every draw's class probabilities for one input, ``[draws, classes]``."""
    inputs = kind("prediction", prediction, ClassificationPrediction).label.shape
    _require_index(index, inputs)
    return _as_numpy(prediction.sample_probs[:, index])


def reliability(ax: Axes, probs: Tensor, y: Tensor, *, bins: int = 10) -> Axes:
    """Draw accuracy against confidence in bins of equal width, with 95 % Wilson intervals.

    ``probs`` are class probabilities ``[n, classes]``, ``y`` the true classes ``[n]``. Empty bins
    are left out. The dotted diagonal is perfect calibration.
    """
    probs, y = tensor("probs", probs), tensor("y", y)
    metrics.accuracy(probs, y)  # checks both
    probs, y = probs.flatten(0, -2), y.flatten()
    bins = count("bins", bins)
    confidence, label = probs.max(-1)
    c, hit = _as_numpy(confidence), _as_numpy(label == y)
    where = np.minimum((c * bins).astype(int), bins - 1)
    number = np.bincount(where, minlength=bins)
    full = number > 0
    n, hits = number[full], np.bincount(where, hit, bins)[full]
    x, accuracy = np.bincount(where, c, bins)[full] / n, hits / n
    pairs = zip(hits.astype(int).tolist(), n.tolist(), strict=True)
    wilson = [binomtest(*pair).proportion_ci(0.95, "wilson") for pair in pairs]
    ax.plot([0, 1], [0, 1], ":", color=BLACK, linewidth=1.0)
    ax.vlines(x, *np.transpose(wilson), color=SKY, linewidth=4, alpha=0.6)
    ax.plot(x, accuracy, "o-", color=BLUE, markersize=4)
    _percent(ax.xaxis, ax.yaxis)
    ax.set(xlabel="confidence", ylabel="accuracy", xlim=(0.0, 1.0), ylim=(0.0, 1.0))
    return ax


def risk_coverage(
    ax: Axes, answers: Mapping[str, ClassificationPrediction], y: Tensor, *, minimum: float = 0.0
) -> Axes:
    """Draw the error among the answers that are given, when the least confident are refused.

    Args:
        ax: where to draw.
        answers: predictions for the same inputs, a line for each name.
        y: true classes, ``[n]``.
        minimum: smallest fraction of inputs answered that is shown.
    """
    if not kind("answers", answers, Mapping):
        raise ValueError("answers must hold at least one prediction, got none")
    if fraction("minimum", minimum) == 1:
        raise ValueError("minimum must be below 1, got 1")
    styles = zip(cycle(("-", "--", "-.", ":")), cycle(CYCLE))  # noqa: B905, both are endless
    for (name, answer), (line, colour) in zip(answers.items(), styles, strict=False):
        labels, shape = tensor("y", y).to(answer.label.device), list(answer.label.shape)
        if list(labels.shape) != shape:
            raise ValueError(f"y must have the shape of the labels {shape}, got {list(y.shape)}")
        covered, risk = metrics.risk_coverage(answer.confidence, torch.eq(answer.label, labels))
        shown = covered >= minimum
        ax.plot(covered[shown], risk[shown], line, color=colour, label=name)
    ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    _percent(ax.xaxis)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set(xlabel="inputs answered, the surest first", ylabel="errors among answers")
    ax.set(xlim=(minimum, 1.0), ylim=(0.0, None))
    ax.legend()
    return ax


def entropy_histogram(
    ax: Axes, inside: Tensor, outside: Tensor | Mapping[str, Tensor], *, bins: int = 30
) -> Axes:
    """Draw the predictive entropy in and out of distribution, as fractions of the inputs.

    ``inside`` and ``outside`` are entropies ``[n]`` in nats; a mapping names several kinds of
    inputs out of distribution. All share the ``bins``.
    """
    sets = outside if isinstance(outside, Mapping) else {"out of distribution": outside}
    values = {}
    for name, x in {"in distribution": inside, **sets}.items():
        argument = "inside" if name == "in distribution" else f"outside, {name}"
        if tensor(argument, x).ndim != 1 or len(x) == 0 or not np.isfinite(_as_numpy(x)).all():
            got = f"shape {list(x.shape)}"
            raise ValueError(f"{argument} must hold finite entropies, [n], got {got}")
        values[name] = _as_numpy(x)
    edges = np.linspace(0.0, max(float(v.max()) for v in values.values()), count("bins", bins) + 1)
    for (name, v), colour in zip(values.items(), CYCLE, strict=False):
        weights = np.full(len(v), 1 / len(v))
        ax.hist(v, bins=list(edges), weights=weights, color=colour, alpha=0.25)
        ax.hist(v, bins=list(edges), weights=weights, color=colour, histtype="step", label=name)
    ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    ax.yaxis.set_major_formatter(lambda y, _: f"{100 * y:.3g}%")
    ax.set(xlabel="predictive entropy (nats)", ylabel="fraction of inputs")
    ax.legend()
    return ax


# --- predictions of real targets ---


def regression_band(
    ax: Axes,
    x: Tensor,
    prediction: RegressionPrediction,
    *,
    data: tuple[Tensor, Tensor] | None = None,
    truth: Tensor | None = None,
) -> Axes:
    """Draw the predictive mean with two bands of 2 sd: the epistemic one inside the total one.

    Args:
        ax: where to draw.
        x: increasing inputs, ``[n]`` or ``[n, 1]``.
        prediction: prediction at ``x``, of one output.
        data: training inputs and targets, drawn as points.
        truth: noise-free targets at ``x``, drawn as a dashed line.
    """
    rows = len(kind("prediction", prediction, RegressionPrediction).mean)
    at, mean = _rows("x", x, rows), _flat(prediction.mean)
    bands = ((prediction.std, SKY, "total"), (prediction.epistemic_std, BLUE, "epistemic"))
    for std, colour, name in bands:
        low, high = mean - 2 * _flat(std), mean + 2 * _flat(std)
        ax.fill_between(at, low, high, color=colour, alpha=0.45, lw=0, label=f"{name} ± 2 sd")
    ax.plot(at, mean, color=BLUE, linewidth=2.0, label="mean")
    if truth is not None:
        curve = _rows("truth", truth, rows)
        ax.plot(at, curve, color=BLACK, linestyle="--", linewidth=1.2, label="truth")
    if data is not None:
        ax.plot(_flat(data[0]), _flat(data[1]), "o", color=VERMILLION, markersize=3.5, label="data")
    ax.margins(x=0)
    ax.set(xlabel="x", ylabel="y")
    return ax


def function_band(
    ax: Axes,
    x: Tensor,
    functions: Tensor,
    *,
    reference: Tensor | None = None,
    data: tuple[Tensor, Tensor] | None = None,
    level: float = 0.9,
) -> Axes:
    """Draw sampled functions: their median and a central interval. The legend is the caller's.

    Args:
        ax: where to draw.
        x: increasing inputs, ``[n]`` or ``[n, 1]``.
        functions: values of S sampled functions there, ``[S, n]`` or ``[S, n, 1]``.
        reference: functions of another posterior; its band and median are outlined.
        data: training inputs and targets, drawn as points.
        level: fraction of the functions inside the band, at each input, in (0, 1).
    """
    level, functions = probability("level", level), tensor("functions", functions)
    if functions.dim() < 2 or functions.numel() == 0:
        raise ValueError(f"functions must have shape [S, n], got {list(functions.shape)}")
    at = _rows("x", x, functions[0].numel())
    low, middle, high = _quantiles(functions, level)
    ax.fill_between(at, low, high, color=SKY, alpha=0.5, linewidth=0, label=f"{level:.0%} band")
    ax.plot(at, middle, color=BLUE, linewidth=1.8, label="median")
    if reference is not None:
        low, middle, high = _quantiles(reference, level)
        ax.plot(at, low, color=BLACK, linewidth=1.0, label=f"reference, {level:.0%}")
        ax.plot(at, high, color=BLACK, linewidth=1.0)
        ax.plot(at, middle, color=BLACK, linewidth=1.0, linestyle=":", label="reference, median")
    if data is not None:
        ax.plot(_flat(data[0]), _flat(data[1]), "o", color=VERMILLION, markersize=2.5, label="data")
    ax.margins(x=0)
    return ax


def coverage(ax: Axes, pit: Tensor) -> Axes:
    """Draw the fraction of targets inside the central predictive intervals of each level.

    ``pit`` is the predictive's distribution function at the targets, ``prediction.cdf(y)``, of any
    shape. On the dotted diagonal the intervals are calibrated, below it too narrow.
    """
    values = _flat(tensor("pit", pit))
    if not len(values) or not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"pit must hold numbers in [0, 1], got others in shape {list(pit.shape)}")
    depth = np.sort(np.abs(2 * values - 1))  # the level at which an interval reaches the target
    ax.plot([0, 1], [0, 1], ":", color=BLACK, linewidth=1.0)
    ax.step(depth, np.arange(1, len(depth) + 1) / len(depth), where="post", color=BLUE)
    _percent(ax.xaxis, ax.yaxis)
    ax.set(xlabel="level of the interval", ylabel="coverage", xlim=(0.0, 1.0), ylim=(0.0, 1.0))
    return ax


def _quantiles(functions: Tensor, level: float) -> Any:
    """Return lower end, median and upper end at each input, ``[3, n]``."""
    values = _as_numpy(functions).reshape(len(functions), -1)
    return np.quantile(values, [0.5 - level / 2, 0.5, 0.5 + level / 2], axis=0)


# --- weights ---


def weight_locs(ax: Axes, guide: AutoSoftplusNormal, *, sites: Sequence[str] | None = None) -> Axes:
    """Draw the distribution of the posterior means, one row for each site.

    The height of a row is logarithmic in the count (a mixture prior piles most weights up at zero),
    and each row is as high as its fullest bin. ``sites`` are from top to bottom, by default all
    weight matrices and kernels, that is the latents of two or more dimensions.
    """
    _ridges(ax, {name: _as_numpy(guide.loc(name)) for name in _sites(guide, sites)})
    ax.set_xlabel("posterior mean of a weight")
    return ax


def weight_scales(
    ax: Axes, guide: AutoSoftplusNormal, *, sites: Sequence[str] | None = None
) -> Axes:
    """Draw the posterior standard deviations as `weight_locs` draws the means.

    Scales of exactly 0 (pruned weights) are left out.
    """
    scales = {name: _as_numpy(guide.scale(name)) for name in _sites(guide, sites)}
    _ridges(ax, {name: scale[scale > 0] for name, scale in scales.items()}, log=True)
    ax.set_xlabel("posterior standard deviation of a weight")
    return ax


def weight_density(
    ax: Axes, guide: AutoSoftplusNormal, name: str, index: int | tuple[int, ...]
) -> Axes:
    r"""Draw the posterior density of one weight, $N(w | \mu, \sigma^2)$, and where zero lies.

    The weight is number ``index`` of the guide's site ``name``.
    """
    _require_index(index, _with_scales(guide).loc(name).shape)
    loc, scale = float(guide.loc(name)[index]), float(guide.scale(name)[index])
    if scale == 0:
        raise ValueError(f"index must be of a weight with a density, got one of scale 0, {index}")
    w = torch.linspace(min(loc - 4 * scale, 0.0), max(loc + 4 * scale, 0.0), 400)
    density = _density(Normal(loc, scale), w)
    ax.fill_between(_as_numpy(w), density, color=SKY, alpha=0.4)
    ax.plot(_as_numpy(w), density, color=BLUE, linewidth=2.0)
    ax.axvline(0.0, color=BLACK, linestyle=":", linewidth=1.0)
    ax.set(xlabel=f"{name}[{index}]", ylabel="posterior density", ylim=(0.0, None))
    ax.set_title(f"mean {loc:.3g}, sd {scale:.3g}, |mean|/sd {abs(loc) / scale:.2g}")
    return ax


def prior_density(ax: Axes, distribution: Distribution) -> Axes:
    """Draw a prior's density, and the two weighted components of a scale mixture.

    ``distribution`` is a scalar one over the real line with a finite ``stddev``.
    """
    if kind("distribution", distribution, Distribution).batch_shape:
        raise ValueError(f"distribution must be a scalar one, got {distribution}")
    width = 3 * float(distribution.stddev)
    if not 0 < width < math.inf:
        raise ValueError(f"distribution must have a finite stddev, got {distribution}")
    side = torch.logspace(-6, 0, 500, dtype=torch.float64) * width  # fine where a spike may be
    w = torch.cat([-side.flip(0), torch.zeros(1), side])
    density = _density(distribution, w)
    ax.plot(_as_numpy(w), density, color=BLACK, linewidth=2.0, label="prior")
    if all(hasattr(distribution, name) for name in ("pi", "sigma1", "sigma2")):
        pi, sigma1, sigma2 = (float(getattr(distribution, n)) for n in ("pi", "sigma1", "sigma2"))
        for fraction, sigma, colour in ((pi, sigma1, BLUE), (1 - pi, sigma2, VERMILLION)):
            component = fraction * _density(Normal(0.0, sigma), w)
            label = f"{fraction:.2g} N(0, {sigma:.2g}²)"
            ax.plot(_as_numpy(w), component, color=colour, linestyle="--", label=label)
        ax.legend()
    top = float(density.max())
    low = max(float(density.min()) / 10, top * 1e-8)
    ax.set(yscale="log", ylim=(low, top * 3), xlabel="weight", ylabel="density")
    return ax


def pruning_curve(
    ax: Axes,
    fractions: Sequence[float],
    accuracies: Sequence[float],
    reference: tuple[Sequence[float], Sequence[float]] | None = None,
) -> Axes:
    """Draw the accuracy of a network against the fraction of its weights set to zero, in [0, 1].

    ``reference`` has the fractions and accuracies of a published curve to compare with.
    """
    for name, values in (("fractions", fractions), ("accuracies", accuracies)):
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise TypeError(f"{name} must be a list of numbers, got {values!r}")
    if len(fractions) != len(accuracies):
        lengths = f"{len(fractions)} and {len(accuracies)}"
        raise ValueError(f"fractions and accuracies must be equally many, got {lengths}")
    if reference is not None:
        ax.plot(*reference, "s--", color=ORANGE, markersize=4, label="published")
    ax.plot(fractions, accuracies, "o-", color=BLUE, markersize=4, label="this network")
    if reference is not None:
        ax.legend(loc="lower left")
    _percent(ax.xaxis, ax.yaxis)
    ax.set(xlabel="weights removed, lowest signal-to-noise first", ylabel="accuracy")
    ax.set_ylim(0.0, 1.0)
    return ax


def snr_density_and_cdf(ax: Axes, snr: Mapping[str, Tensor]) -> Axes:
    r"""Draw density and cumulative fraction of the signal-to-noise ratio of all weights together.

    The ratio is in decibels, $10\log_{10}(|\mu|/\sigma)$: 0 dB where mean and standard deviation
    are equal.

    Args:
        ax: where to draw the density; the cumulative fraction gets a twin of it, on the right.
        snr: what `pyro_bbb.signal_to_noise` returned; ratios of 0 or infinity are left out.
    """
    ratios = [_flat(tensor(name, r)) for name, r in kind("snr", snr, Mapping).items()]
    ratio = np.concatenate([np.zeros(0), *ratios])
    decibel = np.sort(10 * np.log10(ratio[(ratio > 0) & np.isfinite(ratio)]))
    if not len(decibel):
        raise ValueError("snr must hold a positive and finite ratio, got none")
    ax.hist(decibel, bins=60, density=True, color=SKY)
    ax.set(xlabel="signal-to-noise ratio |mean|/sd (dB)", ylabel="density (1/dB)")
    fraction = ax.twinx()
    fraction.plot(decibel, np.arange(1, len(decibel) + 1) / len(decibel), color=VERMILLION)
    _percent(fraction.yaxis)
    fraction.set(ylabel="weights below", ylim=(0.0, 1.0))
    fraction.spines["right"].set_visible(True)
    fraction.yaxis.label.set_color(VERMILLION)
    return ax


def _density(distribution: Distribution, w: Tensor) -> Array:
    return _as_numpy(distribution.log_prob(w).exp())


def _with_scales(guide: Any) -> AutoSoftplusNormal:
    if not (hasattr(guide, "loc") and hasattr(guide, "scale") and hasattr(guide, "site_names")):
        raise TypeError(f"guide must have loc and scale of its sites, got {type(guide).__name__}")
    checked: AutoSoftplusNormal = guide
    return checked


def _sites(guide: AutoSoftplusNormal, sites: Sequence[str] | None) -> list[str]:
    """Return the names of the chosen sites, by default all weight matrices and kernels."""
    names = _with_scales(guide).site_names if sites is None else list(sites)
    if sites is None:
        names = [name for name in names if guide.loc(name).ndim >= 2]
    if not names:
        raise ValueError("sites must name at least one site, got none")
    return names


def _ridges(ax: Axes, rows: Mapping[str, Array], *, log: bool = False) -> None:
    """Draw histograms of log counts one above the other, on common bins, all of one height."""
    values = np.concatenate([v.ravel() for v in rows.values()])
    edges = np.histogram_bin_edges(np.log10(values) if log else values, bins=100)
    if log:
        edges = 10**edges
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
    names = list(reversed(list(rows)))
    for row, (name, colour) in enumerate(zip(names, cycle(CYCLE), strict=False)):
        height = np.log1p(np.histogram(rows[name], bins=edges)[0])
        ax.stairs(row + 0.9 * height / height.max(), edges, baseline=row, fill=True, color=colour)
    ax.set_yticks(range(len(names)), [name.removeprefix("network.") for name in names])
    ax.set_ylim(-0.05, len(names))
