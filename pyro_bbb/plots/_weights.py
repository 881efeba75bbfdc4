# SPDX-License-Identifier: Apache-2.0
"""Plots of weights: their posterior, their prior, and which of them can be removed."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter
from torch import Tensor
from torch.distributions import Distribution, Normal

from pyro_bbb._utils.colors import BLACK, BLUE, CYCLE, ORANGE, SKY, VERMILLION
from pyro_bbb._utils.validation import element_index, kind, tensor
from pyro_bbb.guides import AutoSoftplusNormal
from pyro_bbb.plots._axes import Array, as_numpy, flat, percent


def weight_locs(ax: Axes, guide: AutoSoftplusNormal, *, sites: Sequence[str] | None = None) -> Axes:
    """Draw the distribution of the posterior means, one row for each site.

    The height of a row is logarithmic in the count (a mixture prior piles most weights up at zero),
    and each row is as high as its fullest bin.

    Args:
        ax: where to draw.
        guide: a guide with ``loc`` and ``scale`` for each of its ``site_names``.
        sites: names of sites, from top to bottom. Default: all weight matrices and kernels, that is
            the latents of two or more dimensions.
    """
    names = _sites(guide, sites)
    _ridges(ax, {name: as_numpy(guide.loc(name)) for name in names})
    ax.set_xlabel("posterior mean of a weight")
    return ax


def weight_scales(
    ax: Axes, guide: AutoSoftplusNormal, *, sites: Sequence[str] | None = None
) -> Axes:
    """Draw the distribution of the posterior standard deviations, one row for each site.

    Scales of exactly 0 (pruned weights) are left out.

    Args:
        ax: where to draw.
        guide: a guide with ``loc`` and ``scale`` for each of its ``site_names``.
        sites: as for `weight_locs`.
    """
    names = _sites(guide, sites)
    scales = {name: as_numpy(guide.scale(name)) for name in names}
    _ridges(ax, {name: scale[scale > 0] for name, scale in scales.items()}, log=True)
    ax.set_xlabel("posterior standard deviation of a weight")
    return ax


def weight_density(
    ax: Axes, guide: AutoSoftplusNormal, name: str, index: int | tuple[int, ...]
) -> Axes:
    r"""Draw the posterior density of one weight, $N(w | \mu, \sigma^2)$, and where zero lies.

    Args:
        ax: where to draw.
        guide: a guide with ``loc`` and ``scale``.
        name: a site of the guide.
        index: position of the weight in that site.
    """
    element_index("index", index, _with_scales(guide).loc(name).shape)
    loc, scale = float(guide.loc(name)[index]), float(guide.scale(name)[index])
    if scale == 0:
        raise ValueError(f"index must be of a weight with a density, got one of scale 0, {index}")
    w = torch.linspace(min(loc - 4 * scale, 0.0), max(loc + 4 * scale, 0.0), 400)
    density = _density(Normal(loc, scale), w)
    ax.fill_between(as_numpy(w), density, color=SKY, alpha=0.4)
    ax.plot(as_numpy(w), density, color=BLUE, linewidth=2.0)
    ax.axvline(0.0, color=BLACK, linestyle=":", linewidth=1.0)
    ax.set(xlabel=f"{name}[{index}]", ylabel="posterior density", ylim=(0.0, None))
    ax.set_title(f"mean {loc:.3g}, sd {scale:.3g}, |mean|/sd {abs(loc) / scale:.2g}")
    return ax


def prior_density(ax: Axes, distribution: Distribution) -> Axes:
    """Draw a prior's density, and the two weighted components of a scale mixture.

    Args:
        ax: where to draw, with a logarithmic density axis of eight decades at most.
        distribution: a scalar distribution over the real line with a finite ``stddev``; one with
            ``pi``, ``sigma1`` and ``sigma2`` is a scale mixture.
    """
    if kind("distribution", distribution, Distribution).batch_shape:
        raise ValueError(f"distribution must be a scalar one, got {distribution}")
    width = 3 * float(distribution.stddev)
    if not 0 < width < math.inf:
        raise ValueError(f"distribution must have a finite stddev, got {distribution}")
    side = torch.logspace(-6, 0, 500, dtype=torch.float64) * width  # fine where a spike may be
    w = torch.cat([-side.flip(0), torch.zeros(1), side])
    density = _density(distribution, w)
    ax.plot(as_numpy(w), density, color=BLACK, linewidth=2.0, label="prior")
    if all(hasattr(distribution, name) for name in ("pi", "sigma1", "sigma2")):
        pi, sigma1, sigma2 = (float(getattr(distribution, n)) for n in ("pi", "sigma1", "sigma2"))
        for fraction, sigma, colour in ((pi, sigma1, BLUE), (1 - pi, sigma2, VERMILLION)):
            component = fraction * _density(Normal(0.0, sigma), w)
            label = f"{fraction:.2g} N(0, {sigma:.2g}²)"
            ax.plot(as_numpy(w), component, color=colour, linestyle="--", label=label)
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
    """Draw the accuracy of a network against the fraction of its weights set to zero.

    Args:
        ax: where to draw.
        fractions: removed fractions, in [0, 1].
        accuracies: accuracy at each, in [0, 1].
        reference: fractions and accuracies of a published curve to compare with.
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
    percent(ax.xaxis, ax.yaxis)
    ax.set(xlabel="weights removed, lowest signal-to-noise first", ylabel="accuracy")
    ax.set_ylim(0.0, 1.0)
    return ax


def snr_density_and_cdf(ax: Axes, snr: Mapping[str, Tensor]) -> Axes:
    r"""Draw density and cumulative fraction of the signal-to-noise ratio of all weights together.

    The ratio is in decibels, $10\log_{10}(|\mu|/\sigma)$: 0 dB where mean and standard deviation
    are equal.

    Args:
        ax: where to draw the density; the cumulative fraction gets a twin of it, on the right.
        snr: what `pyro_bbb.signal_to_noise` returned. Ratios that are 0 or
            infinite (pruned or deterministic weights) are left out.
    """
    ratios = [flat(tensor(name, r)) for name, r in kind("snr", snr, Mapping).items()]
    ratio = np.concatenate([np.zeros(0), *ratios])
    decibel = np.sort(10 * np.log10(ratio[(ratio > 0) & np.isfinite(ratio)]))
    if not len(decibel):
        raise ValueError("snr must hold a positive and finite ratio, got none")
    ax.hist(decibel, bins=60, density=True, color=SKY)
    ax.set(xlabel="signal-to-noise ratio |mean|/sd (dB)", ylabel="density (1/dB)")
    fraction = ax.twinx()
    fraction.plot(decibel, np.arange(1, len(decibel) + 1) / len(decibel), color=VERMILLION)
    percent(fraction.yaxis)
    fraction.set(ylabel="weights below", ylim=(0.0, 1.0))
    fraction.spines["right"].set_visible(True)
    fraction.yaxis.label.set_color(VERMILLION)
    return ax


def _density(distribution: Distribution, w: Tensor) -> Array:
    log_density: Tensor = distribution.log_prob(w)
    return as_numpy(log_density.exp())


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
