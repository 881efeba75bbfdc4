# SPDX-License-Identifier: Apache-2.0
r"""Predictions of training rows as if each had been left out, from draws given all rows.

With $p_{si}$ the likelihood of row i by draw s of the posterior at temperature T, the posterior
without row i weighs draw s in proportion to $p_{si}^{-1/T}$ (Gelfand et al. 1992).

- `leave_one_out_weights` are these weights at T = 1, truncated (Ionides 2008).
- `log_prob_left_out` is first-order in 1/T (Watanabe 2010, WAIC). At low temperatures the weights
  would be those of the worst draw alone, which is not as bad as a row left out.
"""

import math

from torch import Tensor


def leave_one_out_weights(log_likelihood: Tensor) -> Tensor:
    r"""Return logarithms of weights of the draws for each row, ``[S, n]``, which add up to 1.

    Args:
        log_likelihood: log-likelihoods of the rows by each draw, ``[S, n]``.
    """
    # at most sqrt(S) times the mean weight
    largest = (-log_likelihood).logsumexp(0) - math.log(len(log_likelihood)) / 2
    return (-log_likelihood).minimum(largest).log_softmax(0)


def log_prob_left_out(log_likelihood: Tensor, temperature: float) -> Tensor:
    r"""Return $\log E[p_i] - \mathrm{Var}[\log p_i] / T$ of rows left out, ``[n]``.

    Args:
        log_likelihood: log-likelihoods of the rows by each draw, ``[S, n]``.
        temperature: T, of the posterior that was drawn from.
    """
    seen = log_likelihood.logsumexp(0) - math.log(len(log_likelihood))
    return seen - log_likelihood.var(0) / temperature
