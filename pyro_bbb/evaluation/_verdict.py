# SPDX-License-Identifier: Apache-2.0
r"""A verdict on a posterior: where to trust its band, and the next method where not.

- Chains: $\hat R$ and effective size of the network's *functions* on and off the data; weights may
  be permuted. Half a chain of $m$ independent draws has $\hat R^2 \approx 1 + 1/(m-1)$: a size of
  100 makes 1.04 for four chains; many short ones pass at 1.2 (Brooks and Gelman 1998), with 3 each.
- Guides: the ELBO beats posteriors that ignore the data, and the Pareto $\hat k$ of $p(D,z)/q(z)$
  is at most 0.7 (Vehtari et al. 2024). A larger one means only that no weights correct the guide:
  where reference chains are affordable they decide instead, by the 1-Wasserstein distance of
  functions in the chains' standard deviations (at most 0.25 above that between their halves) and
  the ratio of standard deviations (0.8 to 1.25).
- Data: with leave-one-out weights $r_{is} \propto 1/p(y_i|z_s)$, at most $\sqrt S$ times their mean
  (Ionides 2008), $u_i = \sum_s r_{is} F(y_i|z_s)$ is uniform, and $P(|2u-1| \le c) = c$ is the
  coverage of intervals, in all and in slices. Errors are below 0.1, or the chance level
  $P(\sup|F_n - F| > \epsilon) \le 2 e^{-2n\epsilon^2}$ (Massart 1990; of a mean, Hoeffding 1963).
  Where weights are those of fewer than ten draws, $1 / \sum_s r_{is}^2 < 10$, for more than 5 % of
  the rows, as far from the posterior, all are $1/S$: targets are then predicted with themselves,
  which shows an error, and never that there is none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from pyro.infer import MCMC
from torch import Tensor, nn

from pyro_bbb import metrics
from pyro_bbb._utils.context import evaluating, seeded
from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.tables import as_text
from pyro_bbb._utils.validation import at_least_zero, count, kind
from pyro_bbb.data import as_tensors
from pyro_bbb.likelihoods import align
from pyro_bbb.mcmc import Chains, DivergedError, probe_inputs, sample, spread_rows
from pyro_bbb.models import BayesianModel
from pyro_bbb.prediction import ClassificationPrediction, leave_one_out_weights, predict
from pyro_bbb.training import least_costs, negative_elbo
from pyro_bbb.training.objectives import NonFiniteError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ON, OFF = "on the data", "off the data"
_INPUTS, _ROWS = 64, 512  # where functions are compared, and targets checked
_AFFORDABLE = 4096  # most rows, and latents, for densities of all data and reference chains
_FALSE_ALARM, _TOLERANCE = 1e-3, 0.1  # of all checks of the targets together; of a probability
_FEW_DRAWS, _ROWS_BY_FEW = 10, 0.05  # that leave a row out; most rows left out by fewer
_SAMPLE = "bbb.sample(model, data)"
_LIKELIHOOD = "another likelihood, see docs/guide/regression_noise.md"


class Row(NamedTuple):
    """One check: its value, limit and outcome, the region it is about, and words for a failure."""

    name: str
    value: float
    limit: str
    passed: bool | None  # None where it decides nothing
    region: str | None  # None for both
    reason: str
    remedy: str = _SAMPLE


@locked
def check(
    model: BayesianModel,
    posterior: Any,
    data: Any,
    *,
    probes: Any = None,
    reference: Chains | None = None,
    num_samples: int = 1000,
    seconds: float = 30.0,
    seed: int | None = None,
) -> Verdict:
    """Check whether a posterior is converged, fits the data, and where to trust its band.

        print(bbb.check(model, guide, (x, y)))

    Args:
        model: the model.
        posterior: what `predict` takes: a trained guide, `Chains`, a Pyro `MCMC`, or draws by name.
        data: the training data ``(x, y)``, or a map-style dataset of pairs.
        probes: inputs off the data, ``[m, ...]``; by default made from ``x`` of shape
            ``[n, features]``, between its rows and beyond them.
        reference: chains to compare with; by default those of `sample`, for a guide or draws by
            name, where latents and rows are at most 4,096.
        num_samples: draws of the posterior, at least 100.
        seconds: time for reference chains, and for more than 100 importance weights; 0 leaves the
            chains out. More than 4,096 latents or rows leave out both.
        seed: makes the result a function of this number, where the time suffices.

    Returns:
        The checks, which print as a table and one sentence.

    Raises:
        ValueError: data that do not fit the model or its ``num_data``, a number out of range, or an
            improper prior.
    """
    kind("model", model, BayesianModel)
    if model.has_improper_prior:
        raise ValueError(
            "model must have proper priors: under an improper one there is no exact posterior to "
            "check against. Use bbb.evaluate on rows left out"
        )
    count("num_samples", num_samples, 100), at_least_zero("seconds", seconds)
    x, y = as_tensors(data)
    if len(y) != model.num_data:
        raise ValueError(f"data must hold all {model.num_data} training rows, got {len(y)}")
    end, size = time.perf_counter() + seconds, sum(map(math.prod, model.latent_shapes().values()))
    affordable = max(len(y), size) <= _AFFORDABLE
    with seeded(seed), evaluating(model):
        inputs = {ON: x[spread_rows(len(y), _INPUTS)]}
        if probes is not None:
            inputs[OFF] = probes
        elif isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point():
            inputs[OFF] = _off(x[spread_rows(len(y), _ROWS)])
        shape, diverging = _chains(posterior)
        functions = _functions(model, posterior, inputs, math.prod(shape) or num_samples)
        # the posterior alone: its predictions of the data, its chains, its ELBO and weights
        data_rows, calibration = _data_rows(model, posterior, x, y, num_samples)
        rows = list(_chain_rows(functions, shape, diverging)) if diverging is not None else []
        if affordable and isinstance(posterior, nn.Module):
            rows += _guide_rows(model, posterior, x, y, end - 3 / 4 * seconds)
        # reference chains, in the time that is left
        if affordable and seconds > 0 and diverging is None and reference is None:
            off, left = inputs.get(OFF), max(1.0, end - time.perf_counter())
            with suppress(DivergedError):
                reference = sample(model, (x, y), probes=off, seconds=left, progress=False)
        gold = {} if reference is None else _functions(model, reference, inputs, 10**6)
    if reference is not None:
        rows = _with_reference(rows, functions, gold, tuple(reference.diverging.shape))
    decisive = [
        row for row in rows if row.passed is False or (row.passed and "ELBO" not in row.name)
    ]
    if not decisive or not all(row.passed for row in decisive):
        # the noise may be right, and the posterior wrong: take its remedy first
        remedy = next((row.remedy for row in decisive if not row.passed), _SAMPLE)
        data_rows = [row._replace(remedy=remedy) for row in data_rows]
    return Verdict((*rows, *data_rows), calibration, functions, gold)


@dataclass(frozen=True, repr=False)
class Verdict:
    """Checks of a posterior, made by `check`; it prints as their table and a sentence.

    Args:
        rows: the checks.
        calibration: leave-one-out probabilities below the targets, ``[n, d]``, or those of the
            classes and the labels; empty where the likelihood has no distribution function.
        functions: draws of the posterior's functions on and off the data, ``[draws, values]``.
        reference: draws of the reference chains' functions; empty without such chains.
    """

    rows: tuple[Row, ...]
    calibration: tuple[Tensor, ...] = field(compare=False)
    functions: dict[str, Tensor] = field(compare=False)
    reference: dict[str, Tensor] = field(compare=False)

    @property
    def sentence(self) -> str:
        """Sentence on where to trust the band, and the next step."""
        failed = [row for row in self.rows if row.passed is False]
        for row in failed:
            if row.region != OFF:
                return f"Do not trust the band on the data: {row.reason}. Next: {row.remedy}"
        checked = any(row.passed and row.region == ON for row in self.rows)
        on = "Trust the band" if checked else "It is not known whether to trust the band"
        if failed:
            text = f"do not trust it off the data: {failed[0].reason}. Next: {failed[0].remedy}"
        elif any(row.passed and row.region != ON for row in self.rows):
            return "Trust the band on the data and off it."
        else:
            text = f"off the data nothing could be compared. Next: {_SAMPLE}"
        return f"{on} on the data; {text}"

    def __str__(self) -> str:
        marks = {True: "passed", False: "FAILED", None: ""}
        rows = [[row.name, f"{row.value:.2f}", row.limit, marks[row.passed]] for row in self.rows]
        return f"{as_text(['check', 'value', 'limit', ''], rows)}\n\n{self.sentence}"

    def __repr__(self) -> str:
        return f"Verdict({self.sentence!r})"

    def plot(self, figure: Figure | None = None) -> Figure:
        """Draw the calibration, and the functions' deviations against those of the reference.

        To the right a dot is an input; above the line the posterior is wider than the reference, or
        without one than the first half of its own draws. ``figure`` is as for `Evaluation.plot`.
        """
        from matplotlib.figure import Figure

        from pyro_bbb import plots

        with plots.style():
            figure = Figure(figsize=(7.4, 3.4)) if figure is None else figure
            left, right = kind("figure", figure, Figure).subplots(1, 2)
            if self.calibration:
                draw = plots.reliability if len(self.calibration) == 2 else plots.coverage
                draw(left, *self.calibration)
            for (at, values), color in zip(self.functions.items(), plots.CYCLE, strict=False):
                gold = self.reference[at] if self.reference else values.tensor_split(2)[0]
                right.plot(gold.std(0), values.std(0), ".", color=color, label=at)
            right.axline((0, 0), slope=1, color=plots.BLACK, linestyle=":", linewidth=1.0)
            right.set(xlabel="sd of the reference", ylabel="sd of the posterior")
            right.set(xlim=(0, None), ylim=(0, None))
            right.legend()
        return figure


def _off(x: Tensor) -> Tensor:
    """Return inputs farther from the data ``[n, features]`` than 95 % of these from each other."""
    sd = x.std(0, correction=0).clamp(min=torch.finfo(x.dtype).tiny)
    between = torch.cdist(x / sd, x / sd).fill_diagonal_(math.inf).min(1).values
    candidates = probe_inputs(x, 16 * _INPUTS)
    distance, order = torch.cdist(candidates / sd, x / sd).min(1).values.sort(descending=True)
    far = max(_INPUTS, int((distance > between.quantile(0.95)).sum()))
    return candidates[order[spread_rows(far, _INPUTS)]]


def _functions(
    model: BayesianModel, posterior: Any, inputs: Mapping[str, Any], num_samples: int
) -> dict[str, Tensor]:
    """Return drawn means, or class probabilities, ``[draws, values]`` by region."""
    values = {}
    for region, x in inputs.items():
        y: Any = predict(model, posterior, x, num_samples=num_samples, estimator="reparam")
        draws = y.sample_probs if hasattr(y, "sample_probs") else y.sample_means
        values[region] = draws.flatten(1).double().cpu()
    return values


def _chains(posterior: Any) -> tuple[tuple[int, ...], int | None]:
    """Return the numbers of chains and draws, and how many diverged; (0,), None for no chains."""
    if isinstance(posterior, Chains):
        return tuple(posterior.diverging.shape), int(posterior.diverging.sum())
    if not isinstance(posterior, MCMC):
        return (0,), None
    first = next(iter(posterior.get_samples(group_by_chain=True).values()))
    diverging = posterior.diagnostics().get("divergences", {})
    return tuple(first.shape[:2]), sum(map(len, diverging.values()))


def _chain_rows(
    functions: Mapping[str, Tensor], shape: tuple[int, ...], diverging: int
) -> Iterator[Row]:
    """Check that chains agree at 95 % of the functions' values."""
    for region, values in functions.items():
        by_chain = values.unflatten(0, (2, -1) if shape[0] == 1 else shape)  # one by its halves
        r_hat, ess = metrics.r_hat(by_chain), metrics.ess(by_chain)
        moving = ~r_hat.isnan()
        if moving.any():
            r = float(r_hat[moving].quantile(0.95, interpolation="lower"))
            text = f"the chains disagree, R-hat {r:.2f}"
            yield Row(f"R-hat, {region}", r, "<= 1.2", r <= 1.2, region, text)
            size = float(ess[moving].quantile(0.05))
            text = f"there are only {size:.0f} effective draws"
            yield Row(f"ESS, {region}", size, ">= 100", size >= 100, region, text)
    fraction = diverging / math.prod(shape)
    text = f"{fraction:.1%} of the draws diverged"
    yield Row("diverging draws", fraction, "<= 0.01", fraction <= 0.01, None, text)


def _guide_rows(
    model: BayesianModel, guide: nn.Module, x: Any, y: Tensor, end: float
) -> Iterator[Row]:
    """Check the ELBO and the importance weights, by at most 1,000 draws before ``end``."""
    objective, losses = negative_elbo(model, guide, loss="trace"), list[float]()
    device = next(guide.parameters()).device
    x, y = x.to(device), y.to(device)
    with torch.no_grad():
        for number in range(1000):
            if number >= 100 and time.perf_counter() > end:
                break
            with suppress(NonFiniteError):  # a draw of weight 0
                losses.append(float(objective(x, y)))
            if objective.parts is None or objective.parts.log_guide == 0:
                return  # points have no density
    nats = torch.tensor(losses)
    # the baseline is an estimate, by four draws
    loss, limit = float(nats.mean()), least_costs(model, [(x, y)])[0] + 2 * float(nats.std())
    text = "a posterior that ignores the data has a better ELBO"
    numbers = loss / len(y), f"<= {limit / len(y):.2f}", loss <= limit
    yield Row("negative ELBO per example", *numbers, None, text, "train longer, at temperature 1")
    k = metrics.pareto_k(-nats)
    text = f"importance weights cannot correct the guide, Pareto k {k:.2f}"
    yield Row("Pareto k", k, "<= 0.7", k <= 0.7, None if k <= 0.7 else OFF, text)


def _with_reference(
    rows: list[Row],
    functions: Mapping[str, Tensor],
    gold: Mapping[str, Tensor],
    shape: tuple[int, ...],
) -> list[Row]:
    """Return the checks with those against reference chains, whose functions are ``gold``."""
    mixed = dict.fromkeys(gold, True)
    for row in _chain_rows(gold, shape, 0):
        mixed[row.region or ON] &= bool(row.passed)
    if all(mixed.values()):  # functions decide, and not the weights behind them
        rows = [row._replace(passed=None) if "Pareto" in row.name else row for row in rows]
    for region, values in gold.items():
        rows += _reference_rows(region, functions[region], values, mixed[region])
    return rows


def _reference_rows(region: str, values: Tensor, gold: Tensor, mixed: bool) -> Iterator[Row]:
    """Check draws of functions against those of chains, ``[draws, values]``, if these are mixed."""
    levels = (torch.arange(200, dtype=gold.dtype) + 0.5) / 200

    def distance(a: Tensor, b: Tensor) -> float:
        return float((a.quantile(levels, 0) - b.quantile(levels, 0)).abs().mean() / spread)

    spread = gold.std(0).mean()
    floor, far = distance(*gold.tensor_split(2)), distance(values, gold)
    ratio, sure = float(values.std(0).mean() / spread), mixed and floor <= 0.25
    text, passed = f"sd {ratio:.2f} of the chains'", 0.8 <= ratio <= 1.25 if sure else None
    yield Row(f"sd / the chains', {region}", ratio, "0.8 to 1.25", passed, region, text)
    text, passed = f"functions {far:.2f} sd from the chains'", far <= 0.25 + floor if sure else None
    limit = f"<= {0.25 + floor:.2f}"
    yield Row(f"distance to chains, {region}", far, limit, passed, region, text)


def _data_rows(
    model: BayesianModel, posterior: Any, x: Any, y: Tensor, num_samples: int
) -> tuple[list[Row], tuple[Tensor, ...]]:
    """Check the leave-one-out predictions of the targets; return them, too."""
    rows = spread_rows(len(y), _ROWS)
    x, y = x[rows], y[rows]
    prediction = predict(model, posterior, x, num_samples=num_samples, estimator="reparam")
    if isinstance(prediction, ClassificationPrediction):
        labels = prediction.labels(y.to(prediction.probs.device)).reshape(len(y), -1)
        log_probs = prediction.sample_log_probs.double()
        log_probs = log_probs.reshape(len(log_probs), *labels.shape, -1)  # [S, n, parts, C]
        label_log_probs = log_probs.gather(3, labels.expand(log_probs.shape[:3]).unsqueeze(3))
        weights, by_few = _leave_out(label_log_probs.sum((2, 3)))
        probs = (weights[:, :, None, None] * log_probs.exp()).sum(0)
        confidence, label = probs.max(-1)
        slices = _slices(x, "confidence", confidence.mean(1))
        residual = (label == labels).double() - confidence
        calibration = probs.flatten(0, 1).cpu(), labels.flatten().cpu()
        return _calibration(residual, _confidence_error, slices, by_few), calibration
    family, mean = prediction.components, prediction.mean
    y = align(y.to(mean.device), mean.shape[1:])
    try:
        below, at = (family.cdf(y - step).double() for step in (family.support.is_discrete * 1, 0))
    except NotImplementedError:
        return [], ()
    weights, by_few = _leave_out(family.log_prob(y).double().flatten(2).sum(2))
    between = below + torch.rand_like(below[0]) * (at - below)  # of counts within their step
    u = torch.einsum("sn,sn...->n...", weights, between).flatten(1).clamp(0, 1)
    slices = _slices(x, "predicted mean", mean.flatten(1)[:, 0])
    values = torch.cat([u, (2 * u - 1).abs()], 1)
    return _calibration(values, _interval_error, slices, by_few), (u.cpu(),)


def _leave_out(log_likelihood: Tensor) -> tuple[Tensor, list[Row]]:
    """Return weights of draws ``[S, n]`` that leave rows out, or 1 / S and the failed check."""
    weights = leave_one_out_weights(log_likelihood).exp()
    few = 1 / weights.square().sum(0) < min(_FEW_DRAWS, len(weights))
    fraction, name = float(few.double().mean()), f"rows left out by < {_FEW_DRAWS} draws"
    if fraction <= _ROWS_BY_FEW:
        return weights, []
    row = Row(name, fraction, f"<= {_ROWS_BY_FEW:.2f}", None, ON, "")
    return torch.full_like(weights, 1 / len(weights)), [row]


def _slices(x: Any, name: str, key: Tensor) -> dict[str, Tensor]:
    """Return rows by quarters of a prediction, and of the first ten inputs ``[n, features]``."""
    keys = {name: key}
    if isinstance(x, Tensor) and x.dim() == 2:
        keys |= {f"input {j}": column for j, column in enumerate(x.T[:10])}
    quarters = {name: values.argsort().tensor_split(4) for name, values in keys.items()}
    return {f"{n}, quarter {i}": rows for n, q in quarters.items() for i, rows in enumerate(q, 1)}


def _confidence_error(residual: Tensor) -> tuple[float, str]:
    """Return the error of the confidence, from right (1 or 0) less confidence, and its words."""
    text = f"the accuracy is {float(residual.mean()):+.0%} off the confidence"
    return float(residual.mean(0).abs().max()), text


def _interval_error(values: Tensor) -> tuple[float, str]:
    """Return the largest distance of u, |2u - 1| (columns) from uniform laws, and its words."""
    ordered, n = values.sort(0).values, len(values)
    steps = torch.arange(n + 1).to(ordered)[:, None] / n
    fraction = float((values.tensor_split(2, 1)[1] <= 0.9).double().mean())
    error = float(torch.maximum(steps[1:] - ordered, ordered - steps[:-1]).max())
    return error, f"90 % intervals hold {fraction:.0%} of the targets"


def _calibration(
    values: Tensor,
    judge: Callable[[Tensor], tuple[float, str]],
    slices: Mapping[str, Tensor],
    by_few: list[Row],
) -> list[Row]:
    """Check values ``[n, d]`` in all and in the worst slice; with ``by_few`` they cannot pass."""
    tests = (1 + len(slices)) * values.shape[1]

    def row(name: str, values: Tensor) -> Row:
        chance = math.sqrt(math.log(2 * tests / _FALSE_ALARM) / (2 * len(values)))
        (error, text), most = judge(values), max(_TOLERANCE, chance)
        numbers = error, f"<= {most:.2f}", (None if by_few else True) if error <= most else False
        return Row(f"calibration, {name}", *numbers, ON, f"{text} ({name})", _LIKELIHOOD)

    in_slices = [row(name, values[rows]) for name, rows in slices.items() if len(rows)]
    return [*by_few, row("all", values), max(in_slices, key=lambda row: row.value)]
