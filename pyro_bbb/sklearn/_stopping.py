# SPDX-License-Identifier: Apache-2.0
"""The end of an estimator's training, found from its ELBO."""

from __future__ import annotations

import math
from statistics import fmean

from pyro_bbb.training import EpochEnd

_DECAY = 1.0  # epochs of the falling rate, for each of those before


class Plateau:
    """Schedule of the learning rate, and callback of `fit`, that end training at a plateau.

    The rate stays until the negative ELBO, averaged over ``n_iter_no_change`` epochs, is lower than
    the lowest such average before by less than a fraction ``tol`` of all that it has fallen since
    the first one. That one's negative log-likelihood counts as ``constant_nll`` at most, that of
    constant outputs, so that a bad start makes no larger steps hardly lower. Then the rate falls
    to 0 along a cosine, in as many epochs as there were. All of this takes ``max_epochs`` at most.
    """

    def __init__(
        self, max_epochs: int, n_iter_no_change: int, tol: float, constant_nll: float = math.inf
    ) -> None:
        self.max_epochs, self.window, self.tol = max_epochs, n_iter_no_change, tol
        self.constant_nll = constant_nll
        self.means: list[float] = []  # of the negative ELBO, in each window
        self.last = max_epochs  # epochs with the falling rate included
        self.first = math.ceil(max_epochs / (1 + _DECAY))  # epoch from which on the rate falls

    def __call__(self, progress: float) -> float:
        """The factor of the learning rate after a fraction of ``max_epochs``."""
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
