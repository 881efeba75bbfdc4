# SPDX-License-Identifier: Apache-2.0
"""The verdict on posteriors that are known to be right, or to be wrong in a known way."""

import math

import pyro
import pytest
import torch

import pyro_bbb as bbb
from pyro_bbb.evaluation import _verdict
from pyro_bbb.likelihoods import Bernoulli, Gaussian, Poisson

ON, OFF = "on the data", "off the data"
TRUST = "Trust the band on the data and off it."


@pytest.fixture(autouse=True)
def rare_chance(monkeypatch):
    """Chance levels that a right posterior exceeds with probability 1e-8, and no chains."""

    def no_chains(*args, **kwargs):
        raise bbb.DivergedError(0, 1)

    monkeypatch.setattr(_verdict, "_FALSE_ALARM", 1e-8)
    monkeypatch.setattr(_verdict, "sample", no_chains)


class Conjugate:
    """Linear regression with a standard Normal prior, whose posterior is a Normal."""

    def __init__(self, x, noise=0.5, assumed=0.5, seed=0):
        torch.manual_seed(seed)
        n, d = x.shape
        y = x @ torch.randn(d, 1) + noise * torch.randn(n, 1)
        network = bbb.BayesianMLP([d, 1], prior=pyro.distributions.Normal(0.0, 1.0))
        self.model, self.data = bbb.BayesianModel(network, Gaussian(assumed), n), (x, y)
        design = torch.cat([x, torch.ones(n, 1)], 1).double()
        self.precision = design.T @ design / assumed**2 + torch.eye(d + 1)
        self.mean = torch.linalg.solve(self.precision, design.T @ y.double() / assumed**2)[:, 0]
        self.covariance = torch.linalg.inv(self.precision)

    def draws(self, covariance=None):
        covariance = self.covariance if covariance is None else covariance
        normal = torch.distributions.MultivariateNormal(self.mean, covariance)
        return self.by_name(normal.sample((2000,)).float())

    def by_name(self, weights):
        weight, bias = self.model.latent_shapes()
        return {weight: weights[..., None, :-1], bias: weights[..., -1:]}

    def chains(self, shift=0.0):
        """Four chains of exact draws, every other one shifted."""
        by_chain = {name: x.unflatten(0, (4, -1)) for name, x in self.draws().items()}
        for values in by_chain.values():
            values[1::2] += shift
        plain = torch.zeros(4, 500)
        return bbb.Chains(by_chain, plain, plain.bool(), plain, plain.long(), torch.ones(4), 1.0)

    def check(self, posterior, data=None, **options):
        return bbb.check(self.model, posterior, data or self.data, seconds=1, seed=0, **options)


def failed(verdict):
    return [row.name for row in verdict.rows if row.passed is False]


def inputs(n=300, d=3, correlation=0.0, seed=1):
    torch.manual_seed(seed)
    x = torch.randn(n, d)
    return math.sqrt(1 - correlation) * x + math.sqrt(correlation) * torch.randn(n, 1)


@pytest.mark.parametrize("seed", range(2))
def test_exact_posteriors_are_trusted(seed):
    problem = Conjugate(inputs(seed=seed), seed=seed)
    verdict = problem.check(problem.chains())
    assert verdict.sentence == TRUST and not verdict.reference
    assert "R-hat, off the data" in str(verdict)
    assert problem.check(problem.draws(), reference=problem.chains()).sentence == TRUST


def test_a_guide_that_is_exact_is_trusted_by_its_weights():
    x = torch.linalg.qr(torch.cat([torch.ones(100, 1), torch.randn(100, 3)], 1))[0][:, 1:] * 10
    problem = Conjugate(x)  # orthogonal columns: the posterior is factorised, of equal scales
    loc = problem.by_name(problem.mean.float())
    rho = math.log(math.expm1(float(problem.covariance[0, 0].sqrt())))
    exact, narrow = (
        problem.check(bbb.AutoSoftplusNormal(problem.model, init_loc=loc, init_rho=rho - less))
        for less in (0, 2)
    )
    assert exact.sentence == TRUST
    assert {"Pareto k", "negative ELBO per example"} <= {row.name for row in exact.rows}
    assert failed(narrow) == ["Pareto k"] and "Pareto k" in narrow.sentence
    assert narrow.sentence.startswith("Trust the band on the data; do not trust it off the data")


@pytest.mark.parametrize("likelihood", [Poisson(), Bernoulli()])
def test_counts_and_classes_are_calibrated_only_if_right(likelihood):
    torch.manual_seed(0)
    x = torch.randn(2000, 2)
    y = likelihood(x @ torch.tensor([[0.6], [-0.4]]) + 0.5).sample()
    model = bbb.BayesianModel(bbb.BayesianMLP([2, 1]), likelihood, 2000)
    draws = torch.tensor([0.6, -0.4, 0.5]) + 0.01 * torch.randn(200, 3)
    weight, bias = model.latent_shapes()
    right, sure = (
        bbb.check(model, {weight: w[:, None, :2], bias: w[:, 2:]}, (x, y), seconds=0, seed=0)
        for w in (draws, 4 * draws)
    )
    assert right.sentence.startswith("Trust the band on the data; off the data nothing could be")
    assert failed(sure)[0] == "calibration, all"


def test_rows_that_no_draws_leave_out_are_not_judged_by_these_draws():
    """One draw in twenty is wrong everywhere, and has all of the weight that leaves a row out."""
    torch.manual_seed(0)
    x = torch.rand(200, 1) + 0.5
    x, y = torch.cat([x, -x]), torch.arange(400) < 200
    model = bbb.BayesianModel(bbb.BayesianMLP([1, 1]), Bernoulli(), 400)
    weight, bias = model.latent_shapes()
    draws = {weight: 20 + 12 * torch.randn(1000, 1, 1), bias: torch.zeros(1000, 1)}
    verdict = bbb.check(model, draws, (x, y.float()), seconds=0, seed=0)
    assert verdict.rows[0].name == "rows left out by < 10 draws" and verdict.rows[0].value > 0.5
    assert not failed(verdict)
    assert verdict.sentence.startswith("It is not known whether to trust the band on the data")


def test_a_factorised_posterior_of_correlated_weights_has_the_known_ratio_of_deviations():
    problem = Conjugate(inputs(d=2, correlation=0.98))
    factorised = (1 / problem.precision.diagonal()).diag()
    off = torch.tensor([[-2.0, 2.0]])  # where the inputs never are
    posterior = problem.draws(factorised)
    verdict = problem.check(posterior, probes=off, reference=problem.chains())
    at = torch.tensor([-2.0, 2.0, 1.0]).double()
    ratio = math.sqrt((at @ factorised @ at) / (at @ problem.covariance @ at))
    (row,) = (row for row in verdict.rows if row.name == "sd / the chains', off the data")
    # two estimates of a deviation by 2,000 draws each have an error of 0.022
    assert row.value == pytest.approx(ratio, rel=6 * 0.022) and row.value < 0.3
    assert "do not trust it off the data: sd 0." in verdict.sentence
    assert verdict.sentence.endswith("Next: bbb.sample(model, data)")


def test_chains_that_do_not_mix_are_seen_and_no_reference():
    problem = Conjugate(inputs())
    verdict = problem.check(problem.chains(shift=0.5))
    assert {"R-hat, on the data", "R-hat, off the data"} <= set(failed(verdict))
    assert "the chains disagree, R-hat" in verdict.sentence
    verdict = problem.check(problem.draws(), reference=problem.chains(shift=0.5))
    assert "nothing could be compared" in verdict.sentence and not failed(verdict)
    diverging = problem.chains()
    diverging.diverging[:, ::2] = True
    assert "50.0% of the draws diverged" in problem.check(diverging).sentence


def test_targets_are_predicted_without_themselves():
    problem = Conjugate(inputs(n=60, d=15))
    (x, y), verdict = problem.data, problem.check(problem.draws(), num_samples=2000)
    design = torch.cat([x, torch.ones(60, 1)], 1).double()
    leverage = ((design @ problem.covariance) * design).sum(1) / 0.5**2
    residual = (y[:, 0] - design @ problem.mean) / 0.5
    exact = torch.special.ndtr(residual / (1 - leverage).sqrt())
    error = (verdict.calibration[0][:, 0] - exact).abs().mean()
    with_themselves = torch.special.ndtr(residual / (1 + leverage).sqrt())
    assert error < 0.2 * (with_themselves - exact).abs().mean()


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_a_wrong_noise_is_seen(factor):
    problem = Conjugate(inputs(), assumed=0.5 * factor)
    verdict = problem.check(problem.chains())
    assert "calibration, all" in failed(verdict)
    assert "% of the targets (all). Next: another likelihood" in verdict.sentence


def test_noise_that_depends_on_the_input_is_seen_in_a_slice():
    problem = Conjugate(x := inputs(n=512, d=2), noise=0.0, assumed=1.0)
    y = problem.data[1] + torch.where(x[:, :1] > 0.6745, 2.5, 0.6) * torch.randn(512, 1)
    assert "calibration, input 0, quarter 4" in failed(problem.check(problem.chains(), (x, y)))


def test_a_point_has_no_density_and_a_poor_elbo_fails_everywhere():
    problem = Conjugate(inputs())
    point = problem.check(bbb.guides.make("delta", problem.model))
    assert not any("Pareto" in row.name for row in point.rows)
    verdict = problem.check(bbb.AutoSoftplusNormal(problem.model, init_loc=30.0))
    assert failed(verdict)[0] == "negative ELBO per example"
    assert "ignores the data has a better ELBO. Next: train longer" in verdict.sentence


def test_inputs_off_the_data_are_in_the_gap_and_beyond():
    torch.manual_seed(0)
    x = torch.cat([torch.linspace(-2.5, -1, 40), torch.linspace(0.8, 2.5, 40)])[:, None]
    off = _verdict._off(x)[:, 0]
    gap, beyond = (off > -1) & (off < 0.8), off.abs() > 2.5
    assert len(off) == 64 and (gap | beyond).all() and gap.sum() > 10 and beyond.sum() > 10


@pytest.mark.parametrize("compared", [False, True])
def test_it_draws_what_it_has(compared):
    problem = Conjugate(inputs())
    reference = problem.chains() if compared else None
    verdict = problem.check(problem.chains(), reference=reference)
    gold = verdict.reference[ON] if compared else verdict.functions[ON][:1000]
    on, off, _ = verdict.plot().axes[1].lines
    torch.testing.assert_close(torch.tensor(on.get_xdata()), gold.std(0))
    torch.testing.assert_close(torch.tensor(off.get_ydata()), verdict.functions[OFF].std(0))


def test_pyros_own_chains_are_chains():
    problem = Conjugate(inputs(n=50))
    kernel = pyro.infer.HMC(problem.model, step_size=0.05, num_steps=4)
    mcmc = pyro.infer.MCMC(kernel, 40, 10, disable_progbar=True)
    mcmc.run(*problem.data)
    assert {"R-hat, on the data"} <= {row.name for row in problem.check(mcmc).rows}
