# SPDX-License-Identifier: Apache-2.0
"""Early stopping of an estimator's training at a plateau of its ELBO."""

from __future__ import annotations

import math
from statistics import fmean

from pyro_bbb.training import EpochEnd

_DECAY = 1.0  # epochs of the falling rate, for each epoch before


class Plateau:
    """Learning-rate schedule and callback of `fit` that end training at a plateau.

    The rate stays until the negative ELBO, averaged over ``n_iter_no_change`` epochs, is lower than
    the lowest average before by less than a fraction ``tol`` of the total decrease since the first
    one. The negative log-likelihood of the first average is capped at ``constant_nll``, that of
    constant outputs, so that a bad start does not make every later decrease look small. Then the
    rate falls to 0 along a cosine, in as many epochs as have passed; ``max_epochs`` is the limit.
    """

    def __init__(
        self, max_epochs: int, n_iter_no_change: int, tol: float, constant_nll: float = math.inf
    ) -> None:
        self.max_epochs, self.window, self.tol = max_epochs, n_iter_no_change, tol
        self.constant_nll = constant_nll
        self.means: list[float] = []  # of the negative ELBO, in each window
        self.last = max_epochs  # epochs in total, those of the falling rate included
        self.first = math.ceil(max_epochs / (1 + _DECAY))  # epoch from which on the rate falls

    def __call__(self, progress: float) -> float:
        """Return the factor of the learning rate after a fraction of ``max_epochs``."""
        epochs = progress * self.max_epochs
        falling = (epochs - self.first) / max(1, self.last - self.first)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, falling))))

    def callback(self, end: EpochEnd) -> bool:
        """Return whether training ends after an epoch."""
        done = end.epoch + 1
        if done < self.first and done % self.window == 0 and not self._improves(end):
            self.first, self.last = done, done + math.ceil(_DECAY * done)
        return done >= self.last

    def _improves(self, end: EpochEnd) -> bool:
        self.means.append(fmean(end.history.loss[-self.window :]))
        *before, mean = self.means
        if not before:
            self.first_mean = mean
            if self.constant_nll < math.inf:
                nll = fmean(end.history.nll[-self.window :])
                self.first_mean -= max(0.0, nll - self.constant_nll)
            return True
        least = min(before)
        return least - mean > self.tol * (self.first_mean - least)
