# SPDX-License-Identifier: Apache-2.0
r"""SWAG: a Normal of the moments of the iterates that an optimiser goes through at the end.

$$q(z) = N\Big(\bar z,\ \tfrac12 \operatorname{diag}(v)
  + \tfrac{1}{2 (K - 1)} \sum_k d_k d_k^\top\Big), \qquad d_k = z_k - \bar z_k$$

with $\bar z$ and $v$ the mean and variances of all iterates, $\bar z_k$ the mean up to iterate k,
and K the last iterates (Maddox et al. 2019, "A Simple Baseline for Bayesian Uncertainty in Deep
Learning", Algorithm 1). An ensemble of these is MultiSWAG (Wilson and Izmailov 2020, "Bayesian Deep
Learning and a Probabilistic Perspective of Generalization").
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from pyro_bbb._utils.inputs import as_inputs, call_arguments
from pyro_bbb._utils.validation import below_one, count
from pyro_bbb.guides._autoguides import PointThenNormal
from pyro_bbb.guides._base import as_batches
from pyro_bbb.guides.covariance import CovariancePart, LateTensors, LowRankPlusDiagonal
from pyro_bbb.guides.initial_values import InitLoc
from pyro_bbb.latents import substituted


class TooFewIteratesError(RuntimeError):
    """Error of `SWAG`: training ended before two iterates were collected.

    Args:
        number: of iterates that were collected.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.history: Any = None  # of the training, where `fit` raised it
        super().__init__(
            f"two iterates or more make a SWAG posterior, {number} were collected: train to the "
            "end of fit, or with a smaller start or every; guide.median() has the point"
        )


class Iterates(LateTensors):
    """Moments of vectors ``[d]``, and the deviations of the last ones ``[rank, d]``."""

    number: Tensor
    mean: Tensor
    squares: Tensor  # sum over vectors of squared deviations from the mean of all
    deviations: Tensor  # of each from the mean up to it, the oldest replaced by the newest

    def __init__(self) -> None:
        super().__init__(number=None, mean=None, squares=None, deviations=None)

    @property
    def count(self) -> int:
        """Number of vectors."""
        return 0 if self.mean is None else int(self.number)

    @torch.no_grad()
    def add(self, z: Tensor, rank: int) -> None:
        """Update the running moments (Welford 1962)."""
        if self.mean is None:
            number = torch.zeros((), dtype=torch.int64, device=z.device)
            mean, squares = torch.zeros_like(z), torch.zeros_like(z)
            self.set(
                number=number, mean=mean, squares=squares, deviations=z.new_zeros(rank, len(z))
            )
        self.number += 1
        before = z - self.mean
        self.mean += before / self.number
        after = z - self.mean
        self.squares.addcmul_(before, after)
        self.deviations[(self.count - 1) % rank] = after


class SWAG(PointThenNormal):
    r"""Point in training, whose iterates become a Normal at the end of `fit`.

    From a fraction of the training on, `fit` collects the unconstrained latents at equal distances.
    Their mean becomes the guide's, also where training goes on. The learning rate stays constant
    then, at what ``lr_schedule`` gives at ``start``: by default half of the highest.
    ``lr_schedule="constant"`` makes a wider posterior. The paper's optimiser is SGD with momentum,
    which needs another ``lr``: the loss is a sum over the minibatch, and the gradient of one
    of ``size`` members is divided by that.

    Running statistics of BatchNorm layers in training mode are computed again, for the mean alone,
    and also serve the draws; an ensemble's are those of its last member. Ordinary parameters of the
    model keep their last values.

    Args:
        model: a `BayesianModel`.
        rank: the most iterates whose deviations from the mean make the low-rank part, at least 2.
        start: fraction of the training, in [0, 1), after which iterates are collected. For a
            network that is trained already it may be 0.
        every: steps from one iterate to the next. By default an epoch, or less where ``rank``
            iterates would not fit in.
        init_loc: initial point, see `AutoSoftplusNormal`.

    Raises:
        TypeError: the model is no `BayesianModel`.
        ValueError: a number out of range.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        rank: int = 20,
        start: float = 0.5,
        every: int | None = None,
        init_loc: InitLoc | None = None,
    ) -> None:
        if not hasattr(model, "num_data"):
            raise TypeError(f"model must be a BayesianModel, got {type(model).__name__}")
        super().__init__(model, init_loc=init_loc)
        self._rank = count("rank", rank, least=2)
        self._start = below_one("start", start)
        self._every = None if every is None else count("every", every)
        self.iterates: Iterates = Iterates()
        self._find_declared()

    @property
    def start(self) -> float:
        """Fraction of the training after which iterates are collected."""
        return self._start

    def plan(self, num_steps: int, epoch_steps: int) -> range:
        """Return numbers of the steps, from 1, after which `fit` calls `collect`.

        Args:
            num_steps: steps of the training.
            epoch_steps: steps of an epoch.

        Raises:
            ValueError: these are fewer than two.
        """
        num_steps, epoch_steps = count("num_steps", num_steps), count("epoch_steps", epoch_steps)
        steps = range(1, num_steps + 1)
        first = max(1, bisect_right(steps, self._start, key=lambda step: step / num_steps))
        every = self._every or min(epoch_steps, max(1, (num_steps + 1 - first) // self._rank))
        planned = range(-(-first // every) * every, num_steps + 1, every)
        if len(planned) < 2:
            raise ValueError(
                f"SWAG with start={self._start}, every={every} would collect {len(planned)} "
                f"iterates in {num_steps} steps, and needs two: train longer, or with a smaller "
                "start or every"
            )
        return planned

    def collect(self) -> None:
        """Add the present point as the next iterate."""
        self.iterates.add(self.loc, self._rank)

    @torch.no_grad()
    def approximate(self, data: Any) -> None:
        """Make the iterates a Normal; `fit` does it at its end.

        Args:
            data: the training set, as one pair ``(x, y)`` or as batches of such. Only a network
                with BatchNorm layers runs on it.

        Raises:
            TooFewIteratesError: fewer than two were collected since training began.
        """
        batches, seen = as_batches(data), self.iterates
        if seen.count < 2:
            raise TooFewIteratesError(seen.count)
        last = seen.deviations[: seen.count]
        factor = last.T.div(math.sqrt(2 * (len(last) - 1))).contiguous()
        self.covariance[0].set(factor=factor, scale=(seen.squares / (2 * seen.count)).sqrt())
        self.loc.copy_(seen.mean)
        seen.forget()
        renew_running_statistics(self.model, self.median(), batches)

    def reset(self) -> None:
        """Return to the point, for further training, and forgets the iterates."""
        super().reset()
        self.iterates.forget()

    def _unknown_parts(self) -> list[CovariancePart]:
        return [LowRankPlusDiagonal(slice(0, self.latent_dim))]


def batchnorms(model: Any) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers in training mode that keep running statistics, by path."""
    return {
        path: m
        for path, m in model.named_modules()
        if isinstance(m, _BatchNorm) and m.training and m.track_running_stats
    }


def renew_running_statistics(
    model: Any, values: dict[str, Tensor], batches: Iterable[tuple[Any, Any]]
) -> None:
    """Make BatchNorm's running statistics averages over the data, with these latents."""
    norms = list(batchnorms(model).values())
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # an average of equal weights
    try:
        with substituted(model, values):
            for x, _ in batches if norms else ():
                args, kwargs = call_arguments(as_inputs(x))
                model.network(*args, **kwargs)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
