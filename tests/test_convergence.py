# SPDX-License-Identifier: Apache-2.0
"""R-hat, effective sample size and Pareto k against ArviZ and known laws."""

import math
import warnings

import numpy as np
import pytest
import torch
from scipy.stats import genpareto

from pyro_bbb import metrics

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # announces version 1 on import
    import arviz

KINDS = {
    "independent": lambda x: x,
    "random walk": lambda x: x.cumsum(1),
    "with ties": lambda x: (2 * x).round(),
    "apart": lambda x: x + 3 * torch.arange(len(x))[:, None, None],
    "antithetic": lambda x: autoregressive(x, -0.7),
}


def autoregressive(noise, rho):
    """Stationary chains of first order, from white noise ``[chains, draws, ...]``."""
    values = [noise[:, 0]]
    for step in noise.unbind(1)[1:]:
        values.append(rho * values[-1] + math.sqrt(1 - rho**2) * step)
    return torch.stack(values, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2, 10), (3, 11), (4, 200)])
def test_chains_are_judged_as_by_arviz(kind, shape, monkeypatch):
    monkeypatch.setattr("pyro_bbb.metrics._BLOCK", 100)
    torch.manual_seed(0)
    values = KINDS[kind](torch.randn(*shape, 6, dtype=torch.double)).unflatten(2, (2, 3))
    columns = [column.numpy() for column in values.flatten(2).unbind(2)]
    expected = np.reshape([arviz.rhat(column) for column in columns], (2, 3))
    np.testing.assert_allclose(metrics.r_hat(values), expected, rtol=1e-9)
    for name in ("bulk", "tail", "mean", "sd"):
        expected = np.reshape([arviz.ess(column, method=name) for column in columns], (2, 3))
        np.testing.assert_allclose(metrics.ess(values, name), expected, rtol=1e-9)


@pytest.mark.parametrize("rho", [0.0, 0.9, -0.5])
def test_an_autoregressive_process_has_its_known_size(rho):
    torch.manual_seed(1)
    chains = autoregressive(torch.randn(10, 2_000, 100, dtype=torch.double), rho)
    # 100 estimates of some percent each are averaged, and lags are truncated
    expected = pytest.approx(20_000 * (1 - rho) / (1 + rho), rel=0.05)
    assert float(metrics.ess(chains, "mean").mean()) == expected


def test_constant_and_infinite_draws():
    values = torch.randn(2, 8, 3)
    values[..., 1], values[0, 0, 2] = 4.0, math.inf
    assert metrics.r_hat(values).isnan().tolist() == [False, True, True]
    assert metrics.ess(values)[1] == 16 and metrics.ess(values)[2].isnan()


@pytest.mark.parametrize(("number", "scale"), [(30, 0.1), (101, 1.0), (4_000, 3.0)])
def test_pareto_k_is_arvizs(number, scale):
    weights = scale * np.random.default_rng(0).standard_normal(number)
    expected = pytest.approx(float(arviz.psislw(weights)[1]), rel=1e-9)
    assert metrics.pareto_k(weights) == expected and metrics.pareto_k(weights + 8) == expected


def test_pareto_k_of_a_pareto_tail_of_equal_weights_and_of_a_single_large_one():
    weights = genpareto.ppf((np.arange(100_000) + 0.5) / 100_000, 0.7)  # quantiles, not draws
    assert metrics.pareto_k(np.log(weights)) == pytest.approx(0.7, abs=0.03)
    assert metrics.pareto_k(torch.zeros(100)) == -math.inf
    assert metrics.pareto_k(torch.eye(100)[3].log()) == math.inf
