# SPDX-License-Identifier: Apache-2.0
r"""Posterior of a regression by infinitely wide networks, corrected by rows left out.

`fit_wide` predicts each training row from all others, with means m and variances v, noise included,
for J draws of the scales. The residuals decide on three corrections of new rows' variances:

1. Noise by input: a second wide network regresses the logarithm of the squared standardised
   residuals on the inputs, and the exponential of its mean multiplies the variances, within the
   range that the rows have. The means stay as they are. It is kept if it raises the log-density of
   the rows left out.
2. Tails: the distributions are Student's t with $\nu$ degrees of freedom and scales $c \sqrt v$.
   For each $\nu$, c makes intervals of 90 % hold 90 % of the rows left out; $\nu$ maximises their
   log-density.
3. Off the data: a variance v of the function becomes $q + \gamma^2 (v - q)$ if it is above q, as it
   is for one in ten of the rows left out one by one. $\gamma$ maximises the log-density of thirds
   of the rows along each input, each left out as a whole, as a gap or a tail of the data would be.
   If intervals of 95 % hold fewer than 95 % of these rows, $\gamma$ is raised by up to a half.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy.stats import t as student
from torch import Tensor

from pyro_bbb._utils.files import LoadError
from pyro_bbb._utils.threads import use_threads
from pyro_bbb.distributions.observation import Normal, StudentT
from pyro_bbb.persistence.archive import write
from pyro_bbb.prediction import GaussianPrediction
from pyro_bbb.sklearn._skewed_columns import SkewedColumns
from pyro_bbb.sklearn._wide_network import LeftOut, WideNetwork, blocks_left_out, fit_wide
from pyro_bbb.training.history import History

_FREEDOMS = (3.0, 4.0, 6.0, 10.0, 20.0, 1000.0)  # degrees of freedom; the last stands for a Normal
_LEVEL = 0.9  # of the intervals that the corrections make right on rows left out
_LEAST_ROWS, _NOISE_ROWS = 100, 300  # of corrections; of noise by input, whose evidence decides
_LEAST_GAIN = 2.0  # nats by which a correction must raise the log-density of all rows left out
_LEAST_QUANTILE = 1e-3  # constant targets have residuals of 0
_LEAST_SQUARE = 1e-3  # a squared standard Normal is smaller with a probability of 0.025
_MEAN_LOG_CHI2 = -1.2703628454614782  # of the logarithm of a squared standard Normal
_FEW_DRAWS = 8  # draws of the scales; a single one beyond
_MOST_WORK, _MANY_ROWS = 5e7, 20_000  # this work for the evidence, or this many rows
_RATIO = 1e9  # of the largest weight of a row to the least
_STRETCHES = [2 ** (i / 4) for i in range(13)]  # gamma, from 1 to 8
_STRETCH_LEVEL = 0.95  # of the intervals that it makes hold blocks left out
_STRETCH_ROWS, _STRETCH_DRAWS, _MOST_ABOVE = 500, 3, 1.5  # rows and draws of scales that choose it


@dataclass(frozen=True)
class Output:
    """Corrected posterior of one target.

    Args:
        network: posterior of the target's mean.
        noise: network whose mean is the logarithm of the variances' factor, or None.
        freedom: degrees of freedom of Student's t.
        scale: factor c of the standard deviations.
        log_factors: least and largest logarithm of the noise's factor.
        threshold: variance q of the function, before noise and tails.
        stretch: factor gamma of the standard deviation beyond that.
    """

    network: WideNetwork
    noise: WideNetwork | None
    freedom: float
    scale: float
    log_factors: tuple[float, float] = (0.0, 0.0)
    threshold: float = 0.0
    stretch: float = 1.0

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return means, variances of the function and of the noise, ``[J, n]``."""
        mean, variance = self.network.moments(x)
        factor = self.factor(x)
        return mean, self.stretched(variance) * factor, self.network.noise * factor

    def factor(self, x: Tensor) -> Tensor:
        """Return the factor ``[n]`` of the variances, by noise and tails."""
        factor = torch.full_like(x[:, 0], self.scale**2)
        if self.noise is None:
            return factor
        return factor * self.noise.mean(x)[0].clamp(*self.log_factors).exp()

    def stretched(self, variance: Tensor) -> Tensor:
        """Return variances of the function that are larger off the data."""
        return variance + (self.stretch**2 - 1) * (variance - self.threshold).clamp_min(0.0)


@dataclass(frozen=True)
class WidePosterior:
    """Corrected posteriors of all targets.

    Args:
        outputs: one for each target.
        skewed: columns that the networks see a second time, transformed.
        num_seen: rows, or their weights, that it was learned from.
    """

    outputs: tuple[Output, ...]
    skewed: SkewedColumns
    num_seen: float

    model = None  # in the place of a model with latents
    has_unit = True  # targets are standardised
    sharpness = 1.0  # of classes, which it does not predict
    learns_on = False  # from further rows, as their prior
    num_passes, num_weights = 1, 0
    corrected_by_rows_left_out = True
    saved_kind = "wide network"

    @property
    def guide(self) -> WidePosterior:
        """The posterior itself."""
        return self

    @property
    def history(self) -> History:
        """An empty record, as there are no steps."""
        return History()

    def predict(
        self, x: Tensor, num_samples: int, seed: int, n_jobs: int | None = None
    ) -> GaussianPrediction:
        """Return the posterior predictive: a mixture over the draws of the scales."""
        with torch.no_grad(), use_threads(n_jobs):
            x = self.skewed(x)
            moments = [torch.stack(output.moments(x)) for output in self.outputs]
            mean, variance, noise = torch.stack(moments, -1)  # each [J, n, t]
        freedom = torch.tensor([output.freedom for output in self.outputs], dtype=mean.dtype)
        scale = (variance + noise).sqrt()
        tails = freedom / (freedom - 2)  # variance of Student's t of scale 1
        if (freedom == _FREEDOMS[-1]).all():
            components: Any = Normal(mean, scale)
            tails = torch.ones_like(tails)
        else:
            components = StudentT(freedom.expand_as(mean), mean, scale)
        function = (tails * variance).mean(0) + mean.var(0, correction=0)
        return GaussianPrediction(
            components,
            "outputs",
            function_std=function.sqrt(),
            noise_std=(tails * noise).mean(0).sqrt(),
        )

    def __str__(self) -> str:
        return "posterior of an infinitely wide network in closed form"

    # --- saving ---

    def save(self, path: str | PathLike[str], metadata: Mapping[str, Any]) -> None:
        """Write a folder, of `tensors` and of metadata in JSON's types."""
        content = json.loads(json.dumps(metadata, allow_nan=False))
        write(Path(path), self.saved_kind, {"metadata": content}, self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        """Return all that `from_tensors` needs."""
        tensors = {f"skewed.{name}": values for name, values in vars(self.skewed).items()}
        for i, output in enumerate(self.outputs):
            numbers = [output.freedom, output.scale, *output.log_factors]
            numbers += [output.threshold, output.stretch]
            tensors[f"{i}.numbers"] = torch.tensor(numbers, dtype=torch.double)
            for name in ("network", "noise"):
                network = getattr(output, name)
                values = {} if network is None else vars(network)
                tensors |= {f"{i}.{name}.{key}": x.contiguous() for key, x in values.items()}
        return tensors

    @classmethod
    def from_tensors(
        cls, tensors: dict[str, Tensor], columns: int, num_seen: float
    ) -> WidePosterior:
        """Return the posterior of saved tensors for a number of input columns."""
        count = sum(name.endswith(".numbers") for name in tensors)
        try:
            skewed = _saved_skewed(tensors, columns)
            columns += len(skewed.column)
            outputs = tuple(_output(tensors, str(i), columns) for i in range(count))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise LoadError(f"the tensors are not those of a wide network: {error!r}") from error
        return cls(outputs, skewed, num_seen)


def _saved_skewed(tensors: dict[str, Tensor], columns: int) -> SkewedColumns:
    """Return the transforms of saved tensors, whose form is checked."""
    prefix = "skewed."
    skewed = SkewedColumns(
        **{k.removeprefix(prefix): x for k, x in tensors.items() if k.startswith(prefix)}
    )
    column, *numbers = vars(skewed).values()
    inside = column.dtype == torch.long and ((column >= 0) & (column < columns)).all()
    for x in numbers:
        if not (x.shape == column.shape and x.dtype == torch.double and x.isfinite().all()):
            raise ValueError(f"transforms must be finite, in double precision, got {x}")
    if not (column.dim() == 1 and inside and (skewed.std > 0).all()):
        raise ValueError(f"transforms must be of columns below {columns}, got {column}")
    return skewed


def _output(tensors: dict[str, Tensor], i: str, columns: int) -> Output:
    freedom, scale, least, most, threshold, stretch = numbers = tensors[f"{i}.numbers"].tolist()
    in_range = [freedom in _FREEDOMS, scale > 0, least <= most, threshold >= 0, stretch >= 1]
    if not (all(in_range) and all(map(math.isfinite, numbers))):
        raise ValueError(f"degrees of freedom and factors must be in range, got {numbers}")
    draws = len(tensors[f"{i}.network.theta"])
    network = _saved_network(tensors, f"{i}.network.", columns, draws)
    has_noise = f"{i}.noise.theta" in tensors
    noise = _saved_network(tensors, f"{i}.noise.", columns, 1) if has_noise else None
    if min(network.reduction.shape) < 1 or (noise is not None and noise.reduction.numel()):
        raise ValueError("the network must have variances, and that of the noise must have none")
    return Output(network, noise, freedom, scale, (least, most), threshold, stretch)


def _saved_network(
    tensors: dict[str, Tensor], prefix: str, columns: int, draws: int
) -> WideNetwork:
    """Return the network of the tensors under a prefix, whose form is checked."""
    fields = {k.removeprefix(prefix): x for k, x in tensors.items() if k.startswith(prefix)}
    network = WideNetwork(**fields)
    rows, sides = len(network.inducing), network.reduction.shape[1:]
    shapes = {name: tuple(x.shape) for name, x in fields.items()}
    expected = {
        "theta": (draws, columns + 4),
        "inducing": (rows, columns),
        "weight": (draws, rows),
        "reduction": (draws, rows, rows) if any(sides) else (draws, 0, 0),
    }
    if shapes != expected:
        raise ValueError(f"tensors must have the shapes {expected}, got {shapes}")
    if not all(x.dtype == torch.double and x.isfinite().all() for x in fields.values()):
        raise ValueError("tensors must be finite, in double precision")
    return network


# --- learning ---


def learn_wide(
    x: Tensor, y: Tensor, weight: Tensor | None, seed: int, n_jobs: int | None
) -> WidePosterior:
    """Return the posterior of standardised inputs ``[n, d]`` and targets ``[n, t]``.

    Args:
        x: inputs.
        y: targets.
        weight: weights ``[n]`` of the rows, or None.
        seed: of the choice of rows and the draws of scales.
        n_jobs: processor threads; by default one.
    """
    with torch.inference_mode(False), torch.no_grad(), use_threads(n_jobs):
        weight = torch.ones(len(x), dtype=x.dtype) if weight is None else weight.clone()
        if not weight.max() <= _RATIO * weight.min():
            raise ValueError(
                f"sample_weight must differ by a factor of {_RATIO:g} at most between rows for "
                f"inference='wide', got {float(weight.min()):g} and {float(weight.max()):g}: give "
                "the smallest 0, or take inference='variational'"
            )
        num_seen, weight = float(weight.sum()), weight / weight.max()  # whose sum is finite
        skewed = SkewedColumns.learn(x, weight)
        columns, x = x.shape[1], skewed(x)
        merged = [_merged(x, column, weight) for column in y.T]
        outputs = tuple(_learn_output(*rows, columns, seed) for rows in merged)
    return WidePosterior(outputs, skewed, num_seen)


def _merged(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the different rows, with weights around 1: a row is left out with its copies."""
    rows = torch.cat([x, y[:, None]], 1)
    different, group = rows.unique(dim=0, return_inverse=True)
    total = torch.zeros(len(different), dtype=weight.dtype).index_add(0, group, weight)
    mean_weight = total.square().sum() / total.sum()  # of rows drawn by weight
    return different[:, :-1].clone(), different[:, -1].clone(), total / mean_weight


def _learn_output(x: Tensor, y: Tensor, weight: Tensor, columns: int, seed: int) -> Output:
    """Return the posterior of one target of different rows ``[n, columns + k]``."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    work = (x.shape[1] + 40) * min(len(x), 400) ** 2  # of the evidence's curvature and chain
    single = work > _MOST_WORK or len(x) > _MANY_ROWS
    draws = 1 if single else _FEW_DRAWS
    # a row of weight w has the information of w rows on the function: noise variance / w
    network, left_out = fit_wide(x, y, 1 / weight, order, draws=draws, seed=seed)
    if len(x) < _LEAST_ROWS:
        return Output(network, None, _FREEDOMS[-1], 1.0)
    rows = left_out.rows
    # predictions of the rows as new ones, of weight 1
    variance = left_out.variance + network.noise * (1 - 1 / weight[rows])
    left_out = replace(left_out, variance=variance.clamp_min(1e-12))
    # correction 3, the threshold q
    function_variance = (left_out.variance - network.noise).clamp_min(0.0).mean(0)
    threshold = float(function_variance.quantile(_LEVEL))
    # correction 2: tails, with the variances as they are
    tails = _tails(y[rows], left_out, weight[rows])
    output = Output(network, None, tails.freedom, tails.scale, threshold=threshold)
    # correction 1: noise by input, kept if it raises the log-density
    noise, log_factor = _noise_by_input(x[rows], y[rows], weight[rows], left_out, seed)
    by_input = replace(left_out, variance=log_factor.exp() * left_out.variance)
    noisy_tails = _tails(y[rows], by_input, weight[rows])
    if noisy_tails.log_density > tails.log_density + _LEAST_GAIN:
        output = replace(
            output,
            noise=noise.without_variance(),
            freedom=noisy_tails.freedom,
            scale=noisy_tails.scale,
            log_factors=(float(log_factor.min()), float(log_factor.max())),
        )
    # correction 3, the factor gamma
    few = order[:_STRETCH_ROWS]
    return replace(output, stretch=_stretch(output, x[few], y[few], weight[few], columns))


def _noise_by_input(
    x: Tensor, y: Tensor, weight: Tensor, left_out: LeftOut, seed: int
) -> tuple[WideNetwork, Tensor]:
    """Return the network of the noise's log-factor, and each row's by the other rows, ``[m]``."""
    squares = (y - left_out.mean).square() / left_out.variance
    # the residual of a row that another repeats is near 0, and would make its logarithm rule
    logs = squares.mean(0).clamp_min(_LEAST_SQUARE).log() - _MEAN_LOG_CHI2
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    noise, from_others = fit_wide(
        x,
        logs,
        1 / weight,
        order,
        draws=1,
        evidence_rows=_NOISE_ROWS,
        left_out=torch.arange(len(x)),
        seed=seed,
    )
    return noise, from_others.mean[0]


class _Tails(NamedTuple):
    """Student's t of rows left out: log-density of all, degrees of freedom, factor c."""

    log_density: float
    freedom: float
    scale: float


def _tails(y: Tensor, left_out: LeftOut, weight: Tensor) -> _Tails:
    """Return the tails of largest log-density of rows left out.

    For each number of degrees of freedom the scale is that at which central intervals of
    probability 0.9 hold 0.9 of the rows.
    """
    mean, variance = left_out.mean, left_out.variance  # [J, n]
    ordered, order = _distance(y, mean, variance).sort()
    share = weight[order].cumsum(0) / weight.sum()
    position = (share < _LEVEL).sum().clamp_max(len(y) - 1)
    end = max(float(ordered[position]), _LEAST_QUANTILE)
    best = _Tails(-math.inf, _FREEDOMS[-1], 1.0)
    for freedom in _FREEDOMS:
        scale = end / _quantile(_LEVEL, freedom)
        per_row = _log_prob(y, mean, scale**2 * variance, freedom)
        best = max(best, _Tails(float(weight @ per_row), freedom, scale))
    return best


def _stretch(output: Output, x: Tensor, y: Tensor, weight: Tensor, columns: int) -> float:
    """Return the factor of standard deviations off the data, by blocks of rows left out."""
    blocks = blocks_left_out(x, y, 1 / weight, output.network.theta[:_STRETCH_DRAWS], columns)
    if blocks is None:
        return 1.0
    factor, mean = output.factor(x)[blocks.rows], blocks.mean
    y, weight = y[blocks.rows], weight[blocks.rows]
    noise = output.network.noise[:_STRETCH_DRAWS]
    of_function = (blocks.variance - noise / weight).clamp_min(0.0)  # negative by rounding alone
    end = _quantile(_STRETCH_LEVEL, output.freedom)

    def variance(stretch: float) -> Tensor:
        return (replace(output, stretch=stretch).stretched(of_function) + noise) * factor

    def log_density(stretch: float) -> float:
        return float(weight @ _log_prob(y, mean, variance(stretch), output.freedom))

    def holds(stretch: float) -> bool:
        inside = _distance(y, mean, variance(stretch)) <= end
        return bool(weight @ inside.to(weight) >= _STRETCH_LEVEL * weight.sum())

    best = max(_STRETCHES, key=log_density)
    enough = next(filter(holds, _STRETCHES), math.inf)
    return min(max(best, enough), _MOST_ABOVE * best)


def _distance(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Return distances ``[n]`` from the mixtures' means, in their standard deviations."""
    spread = (variance.mean(0) + mean.var(0, correction=0)).sqrt()
    return (y - mean.mean(0)).abs() / spread


def _log_prob(y: Tensor, mean: Tensor, variance: Tensor, freedom: float) -> Tensor:
    """Return log-densities ``[n]`` of mixtures of Student's t."""
    t = StudentT(torch.full_like(mean, freedom), mean, variance.sqrt())
    return t.log_prob(y).logsumexp(0) - math.log(len(mean))


def _quantile(level: float, freedom: float) -> float:
    """Return the end of the central interval of a probability."""
    return float(student.ppf((1 + level) / 2, freedom))
