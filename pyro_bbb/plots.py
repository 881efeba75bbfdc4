"""Pictures of training, posteriors and predictions, each drawn on an Axes that the caller owns.

Every function takes the Axes first, draws, labels the axes with their units and returns the Axes,
so that a finding can be put above it: ``plots.loss_parts(ax, history).set_title("...")``. Nothing
here opens a window, makes a figure or changes matplotlib's settings; `style` is a context for that.

The colours are those of `pyro_bbb._colours`. Line styles and markers differ as well, for grey
print.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import cycle
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes
from matplotlib.rcsetup import cycler
from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter
from torch import Tensor
from torch.distributions import Distribution, Normal

from pyro_bbb import metrics
from pyro_bbb._checks import count, kind, of_length, place, tensor
from pyro_bbb._colours import BLACK, BLUE, CYCLE, ORANGE, SKY, VERMILLION
from pyro_bbb._plots_answers import class_probabilities as class_probabilities
from pyro_bbb._plots_answers import risk_coverage as risk_coverage
from pyro_bbb._plots_bands import function_band as function_band
from pyro_bbb.guides import AutoSoftplusNormal
from pyro_bbb.history import Record
from pyro_bbb.summaries import ClassificationPrediction, RegressionPrediction

Array = npt.NDArray[np.float64]


def style() -> AbstractContextManager[None]:
    """Matplotlib settings for reports: call as ``with plots.style(): ...``; undone on leaving."""
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


def loss_parts(ax: Axes, history: Record, *, unit: str = "epoch") -> Axes:
    r"""The two parts of the loss, $\pi\,KL$ (complexity) and $-\log p(D|w)$ (data), and their sum.

    Args:
        ax: where to draw.
        history: what `pyro_bbb.fit` returned, or its ``steps`` record. Values in nats.
        unit: what one entry of the record is, for the horizontal axis.

    Returns:
        ``ax``, logarithmic where every value is positive.
    """
    if not kind("history", history, Record).loss:
        raise ValueError("history must hold at least one entry, got none")
    complexity = [weight * kl for weight, kl in zip(history.kl_weight, history.kl, strict=True)]
    when = range(1, len(history.loss) + 1)
    ax.plot(when, complexity, color=SKY, linewidth=3.0, label="complexity cost")
    ax.plot(when, history.nll, color=VERMILLION, linewidth=2.0, label="data cost")
    ax.plot(when, history.loss, color=BLACK, linewidth=1.0, linestyle="--", label="loss, the sum")
    if min(*history.loss, *complexity, *history.nll) > 0:
        ax.set_yscale("log")
    ax.set(xlabel=unit, ylabel="nats")
    ax.legend()
    return ax


def weight_locs(ax: Axes, guide: AutoSoftplusNormal, *, sites: Sequence[str] | None = None) -> Axes:
    """Distribution of the posterior means, one row for each site.

    Args:
        ax: where to draw.
        guide: a guide with ``loc`` and ``scale`` for each of its ``site_names``.
        sites: names of sites, from top to bottom. Default: all weight matrices and kernels, that is
            the latents of two or more dimensions.

    Returns:
        ``ax``. The height of a row is logarithmic in the count (a mixture prior piles most weights
        up at zero), and each row is as high as its fullest bin.
    """
    names = _sites(guide, sites)
    _ridges(ax, {name: _numpy(guide.loc(name)) for name in names})
    ax.set_xlabel("posterior mean of a weight")
    return ax


def weight_scales(
    ax: Axes, guide: AutoSoftplusNormal, *, sites: Sequence[str] | None = None
) -> Axes:
    """Distribution of the posterior standard deviations, one row for each site.

    Args:
        ax: where to draw.
        guide: a guide with ``loc`` and ``scale`` for each of its ``site_names``.
        sites: as for `weight_locs`.

    Returns:
        ``ax``, with a logarithmic scale axis. Scales of exactly 0 (pruned weights) are left out.
    """
    names = _sites(guide, sites)
    scales = {name: _numpy(guide.scale(name)) for name in names}
    _ridges(ax, {name: scale[scale > 0] for name, scale in scales.items()}, log=True)
    ax.set_xlabel("posterior standard deviation of a weight")
    return ax


def weight_density(
    ax: Axes, guide: AutoSoftplusNormal, name: str, index: int | tuple[int, ...]
) -> Axes:
    """Posterior density of one weight, $N(w | mu, sigma^2)$, and where zero lies.

    Args:
        ax: where to draw.
        guide: a guide with ``loc`` and ``scale``.
        name: a site of the guide.
        index: position of the weight in that site.

    Returns:
        ``ax``.
    """
    place("index", index, _with_scales(guide).loc(name).shape)
    loc, scale = float(guide.loc(name)[index]), float(guide.scale(name)[index])
    if scale == 0:
        raise ValueError(f"index must be of a weight with a density, got one of scale 0, {index}")
    w = torch.linspace(min(loc - 4 * scale, 0.0), max(loc + 4 * scale, 0.0), 400)
    density = _density(Normal(loc, scale), w)
    ax.fill_between(_numpy(w), density, color=SKY, alpha=0.4)
    ax.plot(_numpy(w), density, color=BLUE, linewidth=2.0)
    ax.axvline(0.0, color=BLACK, linestyle=":", linewidth=1.0)
    ax.set(xlabel=f"{name}[{index}]", ylabel="posterior density", ylim=(0.0, None))
    ax.set_title(f"mean {loc:.3g}, sd {scale:.3g}, |mean|/sd {abs(loc) / scale:.2g}")
    return ax


def prior_density(ax: Axes, distribution: Distribution) -> Axes:
    r"""A prior's density; of a scale mixture its two weighted components as well.

    Args:
        ax: where to draw.
        distribution: a scalar distribution over the real line with a finite ``stddev``. A
            `pyro_bbb.ScaleMixtureNormal` is known by its ``pi``, ``sigma1`` and ``sigma2``.

    Returns:
        ``ax``, with a logarithmic density axis of eight decades at most.
    """
    if kind("distribution", distribution, Distribution).batch_shape:
        raise ValueError(f"distribution must be a scalar one, got {distribution}")
    width = 3 * float(distribution.stddev)
    if not 0 < width < math.inf:
        raise ValueError(f"distribution must have a finite stddev, got {distribution}")
    side = torch.logspace(-6, 0, 500, dtype=torch.float64) * width  # fine where a spike may be
    w = torch.cat([-side.flip(0), torch.zeros(1), side])
    density = _density(distribution, w)
    ax.plot(_numpy(w), density, color=BLACK, linewidth=2.0, label="prior")
    if all(hasattr(distribution, name) for name in ("pi", "sigma1", "sigma2")):
        pi, sigma1, sigma2 = (float(getattr(distribution, n)) for n in ("pi", "sigma1", "sigma2"))
        for share, sigma, colour in ((pi, sigma1, BLUE), (1 - pi, sigma2, VERMILLION)):
            part = share * _density(Normal(0.0, sigma), w)
            label = f"{share:.2g} N(0, {sigma:.2g}²)"
            ax.plot(_numpy(w), part, color=colour, linestyle="--", label=label)
        ax.legend()
    top = float(density.max())
    low = max(float(density.min()) / 10, top * 1e-8)
    ax.set(yscale="log", ylim=(low, top * 3), xlabel="weight", ylabel="density")
    return ax


def image(ax: Axes, x: Tensor) -> Axes:
    """A grey picture, dark ink on white paper, without ticks.

    Args:
        ax: where to draw.
        x: ``[height, width]``, ``[1, height, width]`` or flat ``[side * side]``.

    Returns:
        ``ax``.

    Raises:
        ValueError: ``x`` has another shape.
    """
    side = math.isqrt(tensor("x", x).numel())
    if x.ndim == 1 and side * side == x.numel():
        x = x.reshape(side, side)
    elif x.ndim == 3 and x.shape[0] == 1:
        x = x[0]
    if x.ndim != 2 or x.numel() == 0:
        raise ValueError(
            "expected x of shape [height, width], [1, height, width] or [side * side], "
            f"got {list(x.shape)}"
        )
    ax.imshow(_numpy(x), cmap="gray_r", interpolation="nearest")
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set(visible=True, color="0.7")
    return ax


def votes(ax: Axes, prediction: ClassificationPrediction, index: int) -> Axes:
    """How the sampled networks vote on one input, beside the probabilities they average to.

    Args:
        ax: where to draw.
        prediction: of ``[draws, n, classes]`` sampled class probabilities.
        index: which of the ``n`` inputs.

    Returns:
        ``ax``: bars are the share of networks whose most probable class it is, diamonds the mean
        probability. The legend is left to the caller, who may have many such pictures.
    """
    inputs = kind("prediction", prediction, ClassificationPrediction).label.shape
    draws = prediction.sample_probs[:, place("index", index, inputs)]  # [draws, classes]
    classes = draws.shape[-1]
    share = torch.bincount(draws.argmax(-1), minlength=classes) / len(draws)
    where = np.arange(classes)
    ax.bar(where, _numpy(share), color=SKY, label=f"votes of {len(draws)} networks")
    mean = _numpy(prediction.probs[index])
    ax.plot(where, mean, "D", color=VERMILLION, markersize=4, label="mean probability")
    ax.set(xticks=where, xlabel="class", ylim=(0.0, 1.05))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return ax


def regression_band(
    ax: Axes,
    x: Tensor,
    prediction: RegressionPrediction,
    *,
    data: tuple[Tensor, Tensor] | None = None,
    truth: Tensor | None = None,
) -> Axes:
    """Predictive mean with two bands of 2 sd: what more data would remove, and all of it.

    Args:
        ax: where to draw.
        x: increasing inputs, ``[n]`` or ``[n, 1]``.
        prediction: at ``x``, of one output.
        data: training inputs and targets, drawn as points.
        truth: noise-free targets at ``x``, drawn as a dashed line.

    Returns:
        ``ax``: the epistemic band (sd of the sampled means) lies inside the total one, which adds
        the noise.
    """
    rows = len(kind("prediction", prediction, RegressionPrediction).mean)
    at, mean = _flat(of_length("x", x, rows)), _flat(prediction.mean)
    bands = ((prediction.std, SKY, "total"), (prediction.epistemic_std, BLUE, "epistemic"))
    for std, colour, name in bands:
        low, high = mean - 2 * _flat(std), mean + 2 * _flat(std)
        ax.fill_between(at, low, high, color=colour, alpha=0.45, lw=0, label=f"{name} ± 2 sd")
    ax.plot(at, mean, color=BLUE, linewidth=2.0, label="mean")
    if truth is not None:
        ax.plot(
            at,
            _flat(of_length("truth", truth, rows)),
            color=BLACK,
            linestyle="--",
            linewidth=1.2,
            label="truth",
        )
    if data is not None:
        ax.plot(_flat(data[0]), _flat(data[1]), "o", color=VERMILLION, markersize=3.5, label="data")
    ax.margins(x=0)
    ax.set(xlabel="x", ylabel="y")
    return ax


def pruning_curve(
    ax: Axes,
    fractions: Sequence[float],
    accuracies: Sequence[float],
    reference: tuple[Sequence[float], Sequence[float]] | None = None,
) -> Axes:
    """Accuracy of a network against the share of its weights that was set to zero.

    Args:
        ax: where to draw.
        fractions: removed shares, in [0, 1].
        accuracies: accuracy at each, in [0, 1].
        reference: fractions and accuracies of a published curve to compare with.

    Returns:
        ``ax``, both axes in per cent.
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
    ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.set(xlabel="weights removed, lowest signal-to-noise first", ylabel="accuracy")
    ax.set_ylim(0.0, 1.0)
    return ax


def snr_density_and_cdf(ax: Axes, snr: Mapping[str, Tensor]) -> Axes:
    r"""Density and cumulative share of the signal-to-noise ratio of all weights together.

    In decibels of $|\mu|/\sigma$, that is $10\log_{10}(|\mu|/\sigma)$: 0 dB where mean and standard
    deviation are equal.

    Args:
        ax: where to draw the density; the cumulative share gets a twin of it, on the right.
        snr: what `pyro_bbb.signal_to_noise` returned. Ratios that are 0 or
            infinite (pruned or deterministic weights) are left out.

    Returns:
        ``ax``.
    """
    ratios = [_numpy(tensor(name, r)).ravel() for name, r in kind("snr", snr, Mapping).items()]
    ratio = np.concatenate([np.zeros(0), *ratios])
    decibel = np.sort(10 * np.log10(ratio[(ratio > 0) & np.isfinite(ratio)]))
    if not len(decibel):
        raise ValueError("snr must hold a positive and finite ratio, got none")
    ax.hist(decibel, bins=60, density=True, color=SKY)
    ax.set(xlabel="signal-to-noise ratio |mean|/sd (dB)", ylabel="density (1/dB)")
    share = ax.twinx()
    share.plot(decibel, np.arange(1, len(decibel) + 1) / len(decibel), color=VERMILLION)
    share.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    share.set(ylabel="weights below", ylim=(0.0, 1.0))
    share.spines["right"].set_visible(True)
    share.yaxis.label.set_color(VERMILLION)
    return ax


def reliability(ax: Axes, probs: Tensor, y: Tensor, *, bins: int = 10) -> Axes:
    """Accuracy against confidence in bins of equal width, with 95 % Wilson intervals.

    Args:
        ax: where to draw.
        probs: class probabilities, ``[n, classes]``.
        y: true classes, ``[n]``.
        bins: number of bins; empty ones are left out.

    Returns:
        ``ax``, both axes in per cent; the dotted diagonal is perfect calibration.
    """
    metrics.accuracy(probs, y)  # says what is wrong with them
    bins = count("bins", bins)
    confidence, label = probs.max(-1)
    c, hit = _numpy(confidence), _numpy(label == y)
    where = np.minimum((c * bins).astype(int), bins - 1)
    number = np.bincount(where, minlength=bins)
    full = number > 0
    n = number[full]
    x = np.bincount(where, c, bins)[full] / n
    accuracy = np.bincount(where, hit, bins)[full] / n
    z2 = 1.96**2
    centre = (accuracy + z2 / (2 * n)) / (1 + z2 / n)
    half = np.sqrt(z2 * accuracy * (1 - accuracy) / n + (z2 / (2 * n)) ** 2) / (1 + z2 / n)
    ax.plot([0, 1], [0, 1], ":", color=BLACK, linewidth=1.0)
    ax.vlines(x, centre - half, centre + half, color=SKY, linewidth=4, alpha=0.6)
    ax.plot(x, accuracy, "o-", color=BLUE, markersize=4)
    ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.set(xlabel="confidence", ylabel="accuracy", xlim=(0.0, 1.0), ylim=(0.0, 1.0))
    return ax


def entropy_histogram(
    ax: Axes, inside: Tensor, outside: Tensor | Mapping[str, Tensor], *, bins: int = 30
) -> Axes:
    """How uncertain the predictions are, on inputs like the training set and on foreign ones.

    Args:
        ax: where to draw.
        inside: entropies of inputs from the training domain, ``[n]``, in nats.
        outside: entropies of foreign inputs; a mapping names several kinds.
        bins: number of bins, shared by all.

    Returns:
        ``ax``: the share of each kind's inputs in every bin.
    """
    kinds = outside if isinstance(outside, Mapping) else {"out of domain": outside}
    values = {"in domain": _entropies("inside", inside)}
    values |= {name: _entropies(f"outside, {name}", h) for name, h in kinds.items()}
    edges = np.linspace(0.0, max(float(v.max()) for v in values.values()), count("bins", bins) + 1)
    for (name, v), colour in zip(values.items(), CYCLE, strict=False):
        weights = np.full(len(v), 1 / len(v))
        ax.hist(v, bins=list(edges), weights=weights, color=colour, alpha=0.25)
        ax.hist(v, bins=list(edges), weights=weights, color=colour, histtype="step", label=name)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.set(xlabel="predictive entropy (nats)", ylabel="share of inputs")
    ax.legend()
    return ax


def _numpy(x: Tensor) -> Array:
    return np.asarray(x.detach().cpu().double())


def _flat(x: Tensor) -> Array:
    return _numpy(x).reshape(-1)


def _density(distribution: Distribution, w: Tensor) -> Array:
    log_density: Tensor = distribution.log_prob(w)
    return _numpy(log_density.exp())


def _entropies(name: str, x: Tensor) -> Array:
    if tensor(name, x).ndim != 1 or x.numel() == 0 or not x.isfinite().all():
        raise ValueError(f"{name} must hold finite entropies, [n], got shape {list(x.shape)}")
    return _numpy(x)


def _with_scales(guide: Any) -> AutoSoftplusNormal:
    if not (hasattr(guide, "loc") and hasattr(guide, "scale") and hasattr(guide, "site_names")):
        raise TypeError(f"guide must have loc and scale of its sites, got {type(guide).__name__}")
    found: AutoSoftplusNormal = guide
    return found


def _sites(guide: AutoSoftplusNormal, sites: Sequence[str] | None) -> list[str]:
    """The sites asked for, by default all weight matrices and kernels."""
    names = _with_scales(guide).site_names if sites is None else list(sites)
    if sites is None:
        names = [name for name in names if guide.loc(name).ndim >= 2]
    if not names:
        raise ValueError("sites must name at least one site, got none")
    return names


def _ridges(ax: Axes, rows: Mapping[str, Array], *, log: bool = False) -> None:
    """Histograms of log counts one above the other, on common bins, all of one height."""
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
