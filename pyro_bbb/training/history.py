# SPDX-License-Identifier: Apache-2.0
"""Record of a training run: the negative ELBO and its parts, per epoch and per step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from pyro_bbb._utils.tables import as_markdown
from pyro_bbb.training.objectives import LossParts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from pyro_bbb.training._checkpoint import Progress

PRINTED = ["epoch", "neg. ELBO per example", "NLL (nats)", "KL (nats)", "lr", "seconds"]


@dataclass(frozen=True, repr=False)
class Record:
    """Series of the loss and its parts, in nats.

    Everywhere ``loss = kl_weight * kl + nll``, and with `Trace_ELBO` ``kl = log_guide -
    log_prior``.

    Args:
        loss: negative ELBO.
        kl: KL from prior to guide, unweighted.
        log_prior: log-density of the draws under the prior.
        log_guide: log-density of the draws under the guide.
        nll: negative log-likelihood of the examples, summed.
        kl_weight: factor of the KL.
        lr: learning rate.
    """

    loss: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    log_prior: list[float] = field(default_factory=list)
    log_guide: list[float] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    kl_weight: list[float] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.loss)

    def __repr__(self) -> str:
        return f"Record({len(self):,} steps{self._ends()})"

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the parts of the loss, by `plots.loss_parts`; without ``ax`` in a new figure."""
        from pyro_bbb import plots

        return plots.loss_parts(plots.axes(ax), self)

    def _ends(self) -> str:
        return f", neg. ELBO {self.loss[0]:.4g} -> {self.loss[-1]:.4g}" if self.loss else ""

    def append(self, parts: LossParts, lr: float) -> None:
        """Add one entry to every series."""
        for name, value in vars(parts).items():
            getattr(self, name).append(value)
        self.lr.append(lr)


@dataclass(frozen=True, repr=False)
class History(Record):
    """The record of `fit`: one entry per epoch, and the same per step in `steps`.

    An epoch's ``loss`` and ``nll`` are sums over its minibatches, times ``num_data`` over the
    examples in them, so they estimate those of the whole data though a sampler repeats rows or
    leaves some out; ``kl``, ``log_prior`` and ``log_guide`` are averages weighted like the loss.
    Where every step of an epoch was skipped they are NaN.

    Args:
        seconds: wall time of each epoch.
        steps: the record per step, of those that were taken.
        skipped: numbers, from 1, of the steps left out, whose loss or gradient was not finite.
        interrupted: whether Ctrl-C ended the training.
        num_data: examples in the training set.
        baseline_per_example: the objective, in nats per example, of the best of some posteriors
            that ignore the data (`docs/guide/trained.md`); ``None`` for points, for a training of
            fewer than 25 steps, and before the end of training.
        baseline_nll_per_example: the negative log-likelihood of the best of them by that alone.
        validation_loss: negative log predictive density of the validation data after each epoch,
            in nats per example; empty without ``validation``.
        best_epoch: index of the epoch whose parameters are kept, where ``patience`` was given.
    """

    seconds: list[float] = field(default_factory=list)
    steps: Record = field(default_factory=Record)
    skipped: list[int] = field(default_factory=list)
    interrupted: bool = False
    num_data: int = 1
    baseline_per_example: float | None = None
    baseline_nll_per_example: float | None = None
    validation_loss: list[float] = field(default_factory=list)
    best_epoch: int | None = None

    @property
    def neg_elbo_per_example(self) -> list[float]:
        """The loss of each epoch in nats per example; at other temperatures than 1 tempered."""
        return [loss / self.num_data for loss in self.loss]

    def __repr__(self) -> str:
        steps = f"{len(self):,} epochs, {len(self.steps):,} steps"
        skipped = f", {len(self.skipped):,} skipped" if self.skipped else ""
        interrupted = ", interrupted" if self.interrupted else ""
        took = f", {math.fsum(self.seconds):.3g} s"
        if self.best_epoch is not None:
            best = self.validation_loss[self.best_epoch]
            took += f", best validation {best:.4g} after epoch {self.best_epoch + 1:,}"
        return f"History({steps}{self._ends()}{took}{skipped}{interrupted})"

    def _repr_markdown_(self) -> str:
        """Up to five epochs, from the first to the last."""
        at = sorted({round(i * (len(self) - 1) / 4) for i in range(5)}) if len(self) else []
        loss, validated = self.neg_elbo_per_example, bool(self.validation_loss)
        rows = [
            [f"{i + 1:,}", f"{loss[i]:.4g}", f"{self.nll[i]:,.0f}", f"{self.kl[i]:,.0f}"]
            + [f"{self.lr[i]:.2g}", f"{self.seconds[i]:.2g}"]
            + ([f"{self.validation_loss[i]:.4g}"] if validated else [])
            for i in at
        ]
        columns = PRINTED + ["validation (nats)"] * validated
        return f"`{self!r}`\n\n{as_markdown(columns, rows)}"

    def completed(self, progress: Progress, interrupted: bool = False) -> History:
        """Return the record of a run that has ended; points have no ELBO, and no baseline."""
        new = replace(self, best_epoch=progress.best_epoch, interrupted=interrupted)
        if progress.baseline is None or not self.log_guide or self.log_guide[-1] == 0.0:
            return new
        loss, nll = progress.baseline
        return replace(new, baseline_per_example=loss, baseline_nll_per_example=nll)

    def close_epoch(self, num_steps: int, seconds: float, examples: int | None = None) -> None:
        """Add an epoch of the latest ``num_steps`` steps, over ``num_data`` examples by default."""
        self.seconds.append(seconds)
        if num_steps == 0:
            self.append(LossParts(*[math.nan] * 6), math.nan)
            return
        last = {f.name: getattr(self.steps, f.name)[-num_steps:] for f in fields(Record)}
        weights = last["kl_weight"]
        means = {key: _mean(last[key], weights) for key in ("kl", "log_prior", "log_guide")}
        scale = self.num_data / (examples or self.num_data)
        sums = {key: scale * math.fsum(last[key]) for key in ("loss", "nll", "kl_weight")}
        self.append(LossParts(**sums, **means), last["lr"][-1])

    def series(self) -> dict[str, list[float]]:
        """Every series of numbers by name, those of the steps as ``steps.loss`` and so on."""
        own = {f.name: getattr(self, f.name) for f in fields(Record)}
        steps = {f"steps.{f.name}": getattr(self.steps, f.name) for f in fields(Record)}
        return own | {"seconds": self.seconds, "validation_loss": self.validation_loss} | steps

    def as_dict(self) -> dict[str, Any]:
        """All series as plain lists, for JSON."""
        return asdict(self)


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted mean; a plain one where all weights are 0."""
    weights = weights if any(weights) else [1.0] * len(values)
    total = math.fsum(w * value for w, value in zip(weights, values, strict=True))
    return total / math.fsum(weights)
