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
    "antithetic": lambda x: ar(x, -0.7),
    "scales differ": lambda x: x * (1.0 + torch.arange(len(x)))[:, None, None],
}


def ar(noise, rho):
    """Stationary chains of first order, from white noise ``[chains, draws, ...]``."""
    values = [noise[:, 0]]
    for step in noise.unbind(1)[1:]:
        values.append(rho * values[-1] + math.sqrt(1 - rho**2) * step)
    return torch.stack(values, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2, 10), (3, 11), (4, 200), (8, 41)])
def test_chains_are_judged_as_by_arviz(kind, shape):
    torch.manual_seed(0)
    values = KINDS[kind](torch.randn(*shape, 5, dtype=torch.double))
    columns = [values[..., i].numpy() for i in range(5)]
    expected = [arviz.rhat(column) for column in columns]
    np.testing.assert_allclose(metrics.r_hat(values), expected, rtol=1e-9)
    for name in ("bulk", "tail", "mean", "sd"):
        expected = [arviz.ess(column, method=name) for column in columns]
        np.testing.assert_allclose(metrics.ess(values, name), expected, rtol=1e-9)


@pytest.mark.parametrize("rho", [0.0, 0.9, -0.5])
def test_an_autoregressive_process_has_its_known_size(rho):
    torch.manual_seed(1)
    chains = ar(torch.randn(10, 2_000, 100, dtype=torch.double), rho)
    expected = 20_000 * (1 - rho) / (1 + rho)
    # 100 estimates of some percent each are averaged, and lags are truncated
    assert float(metrics.ess(chains, "mean").mean()) == pytest.approx(expected, rel=0.05)
    assert float(metrics.r_hat(chains).max()) < 1.02


def test_trailing_dimensions_blocks_and_ranks(monkeypatch):
    torch.manual_seed(2)
    values = torch.randn(3, 20, 2, 3)
    one_by_one = [metrics.ess(values[..., i, j]) for i in range(2) for j in range(3)]
    assert torch.equal(metrics.ess(values), torch.stack(one_by_one).view(2, 3))
    monkeypatch.setattr("pyro_bbb.metrics._convergence._BLOCK", 100)
    torch.testing.assert_close(metrics.ess(values.double().exp()), metrics.ess(values))


def test_constant_and_infinite_draws():
    values = torch.randn(2, 8, 3)
    values[..., 1] = 4.0
    values[0, 0, 2] = math.inf
    assert metrics.r_hat(values).isnan().tolist() == [False, True, True]
    assert metrics.ess(values)[1] == 16 and metrics.ess(values)[2].isnan()


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("number", [30, 101, 4_000])
def test_pareto_k_is_arvizs(scale, number):
    weights = scale * np.random.default_rng(0).standard_normal(number)
    expected = float(arviz.psislw(weights)[1])
    assert metrics.pareto_k(weights) == pytest.approx(expected, rel=1e-9)
    assert metrics.pareto_k(weights + 5) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("k", [0.3, 0.7, 1.2])
def test_pareto_k_finds_the_shape_of_a_pareto_tail(k):
    weights = genpareto.ppf((np.arange(100_000) + 0.5) / 100_000, k)  # quantiles, not draws
    assert metrics.pareto_k(np.log(weights)) == pytest.approx(k, abs=0.03)


def test_pareto_k_of_equal_weights_and_of_a_single_large_one():
    assert metrics.pareto_k(torch.zeros(100)) == -math.inf
    single = torch.full((100,), -math.inf)
    single[3] = 0.0
    assert metrics.pareto_k(single) == math.inf
