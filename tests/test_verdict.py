# SPDX-License-Identifier: Apache-2.0
"""The verdict on posteriors that are known to be right, or to be wrong in a known way."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_bbb as bbb
from pyro_bbb.evaluation import _verdict
from pyro_bbb.likelihoods import Bernoulli, Gaussian, Poisson

ON, OFF = "on the data", "off the data"


@pytest.fixture(autouse=True)
def rare_chance(monkeypatch):
    """Chance levels that a right posterior exceeds with probability 1e-8, and no chains."""
    monkeypatch.setattr(_verdict, "_FALSE_ALARM", 1e-8)

    def no_chains(*args, **kwargs):
        raise bbb.DivergedError(0, 1)

    monkeypatch.setattr(_verdict, "sample", no_chains)


class Conjugate:
    """Linear regression with a standard Normal prior, whose posterior is a Normal."""

    def __init__(self, x, noise=0.5, assumed=None, seed=0):
        torch.manual_seed(seed)
        assumed = noise if assumed is None else assumed
        n, d = x.shape
        y = x @ torch.randn(d, 1) + noise * torch.randn(n, 1)
        network = bbb.BayesianMLP([d, 1], prior=dist.Normal(0.0, 1.0))
        self.model, self.data = bbb.BayesianModel(network, Gaussian(assumed), n), (x, y)
        design = torch.cat([x, torch.ones(n, 1)], 1).double()
        self.precision = design.T @ design / assumed**2 + torch.eye(d + 1)
        self.mean = torch.linalg.solve(self.precision, design.T @ y.double() / assumed**2)[:, 0]
        self.covariance = torch.linalg.inv(self.precision)

    def draws(self, covariance=None, number=2000):
        covariance = self.covariance if covariance is None else covariance
        normal = torch.distributions.MultivariateNormal(self.mean, covariance)
        weights = normal.sample((number,)).float()
        (w, b), (weight, bias) = weights.split([weights.shape[1] - 1, 1], 1), self.sites
        return {weight: w[:, None], bias: b}

    @property
    def sites(self):
        return list(self.model.latent_shapes())

    @property
    def mean_field(self):
        """The covariance of the best factorised Normal."""
        return (1 / self.precision.diagonal()).diag()

    def chains(self, number=4):
        by_chain = {name: x.unflatten(0, (number, -1)) for name, x in self.draws().items()}
        return as_chains(by_chain)


def as_chains(by_chain):
    plain = torch.zeros(next(iter(by_chain.values())).shape[:2])
    ones = torch.ones(len(plain))
    return bbb.Chains(by_chain, plain, plain.bool(), plain, plain.long(), ones, 1.0)


def failed(verdict):
    return [row.name for row in verdict.rows if row.passed is False]


def inputs(n=300, d=3, correlation=0.0, seed=1):
    torch.manual_seed(seed)
    x = torch.randn(n, d)
    return math.sqrt(1 - correlation) * x + math.sqrt(correlation) * torch.randn(n, 1)


# --- right posteriors ---


def test_exact_posteriors_are_trusted():
    for seed in range(5):
        problem = Conjugate(inputs(seed=seed), seed=seed)
        verdict = bbb.check(problem.model, problem.chains(), problem.data, seed=0)
        assert verdict.sentence == "Trust the band on the data and off it."
        assert "R-hat, off the data" in str(verdict) and not verdict.reference
        verdict = bbb.check(
            problem.model, problem.draws(), problem.data, reference=problem.chains(), seed=0
        )
        assert verdict.sentence == "Trust the band on the data and off it."
        assert verdict == verdict and not failed(verdict)


def test_a_guide_that_is_exact_is_trusted_by_its_weights():
    x = torch.linalg.qr(torch.cat([torch.ones(100, 1), torch.randn(100, 3)], 1))[0][:, 1:] * 10
    problem = Conjugate(x)  # orthogonal columns: the posterior is factorised, of equal scales
    scale = float(problem.covariance[0, 0].sqrt())
    weight, bias = problem.sites
    loc = {weight: problem.mean[None, :3].float(), bias: problem.mean[3:].float()}
    rho = math.log(math.expm1(scale))
    guide = bbb.AutoSoftplusNormal(problem.model, init_loc=loc, init_rho=rho)
    verdict = bbb.check(problem.model, guide, problem.data, seconds=1, seed=0)
    assert verdict.sentence == "Trust the band on the data and off it."
    assert {"Pareto k", "negative ELBO per example"} <= {row.name for row in verdict.rows}
    wide = bbb.AutoSoftplusNormal(problem.model, init_loc=loc, init_rho=rho - 2)
    narrow = bbb.check(problem.model, wide, problem.data, seconds=1, seed=0)
    assert failed(narrow) == ["Pareto k"] and "Pareto k" in narrow.sentence
    assert narrow.sentence.startswith("Trust the band on the data; do not trust it off the data")


def test_counts_and_classes_that_are_right_are_trusted():
    torch.manual_seed(0)
    x = torch.randn(2000, 2)
    outputs = x @ torch.tensor([[0.6], [-0.4]]) + 0.5
    for likelihood in (Poisson(), Bernoulli()):
        y = likelihood(outputs).sample()
        model = bbb.BayesianModel(bbb.BayesianMLP([2, 1]), likelihood, 2000)
        weight, bias = model.latent_shapes()
        draws = {
            weight: torch.tensor([[0.6, -0.4]]).expand(200, 1, 2) + 0.01 * torch.randn(200, 1, 2),
            bias: 0.5 + 0.01 * torch.randn(200, 1),
        }
        right = bbb.check(model, draws, (x, y), seconds=0, seed=0)
        assert right.sentence.startswith("Trust the band on the data; off the data nothing could")
        sure = {name: 4 * values for name, values in draws.items()}
        assert failed(bbb.check(model, sure, (x, y), seconds=0, seed=0))[0] == "calibration, all"


# --- wrong ones ---


def test_a_factorised_posterior_of_correlated_weights_has_the_known_ratio_of_deviations():
    problem = Conjugate(inputs(d=2, correlation=0.98))
    off = torch.tensor([[-2.0, 2.0]])  # where the inputs never are
    verdict = bbb.check(
        problem.model,
        problem.draws(problem.mean_field),
        problem.data,
        probes=off,
        reference=problem.chains(),
        seed=0,
    )
    direction = torch.tensor([-2.0, 2.0, 1.0]).double()
    exact, found = (direction @ c @ direction for c in (problem.covariance, problem.mean_field))
    (row,) = (row for row in verdict.rows if row.name == "sd / the chains', off the data")
    # two estimates of a deviation by 2,000 draws each have an error of 0.022
    assert row.value == pytest.approx(math.sqrt(found / exact), rel=6 * 0.022)
    assert row.value < 0.3
    assert "do not trust it off the data: sd 0." in verdict.sentence
    assert verdict.sentence.endswith("Next: bbb.sample(model, data)")


def test_chains_that_do_not_mix_are_no_reference():
    problem = Conjugate(inputs())
    stuck = {name: values.clone() for name, values in problem.chains().by_chain.items()}
    for values in stuck.values():
        values[1::2] += 0.5
    verdict = bbb.check(problem.model, problem.draws(), problem.data, reference=as_chains(stuck))
    assert "nothing could be compared" in verdict.sentence and not failed(verdict)


def test_chains_that_do_not_mix_are_seen():
    problem = Conjugate(inputs())
    by_chain = {name: values.clone() for name, values in problem.chains().by_chain.items()}
    for values in by_chain.values():
        values[0] += 0.5
    verdict = bbb.check(problem.model, as_chains(by_chain), problem.data, seed=0)
    assert {"R-hat, on the data", "R-hat, off the data"} <= set(failed(verdict))
    assert "the chains disagree, R-hat" in verdict.sentence
    diverging = problem.chains()
    diverging.diverging[:, ::2] = True
    verdict = bbb.check(problem.model, diverging, problem.data, seed=0)
    assert failed(verdict) == ["diverging draws"] and "50.0% of the draws" in verdict.sentence


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_a_wrong_noise_is_seen(factor):
    problem = Conjugate(inputs(), noise=0.5, assumed=0.5 * factor)
    verdict = bbb.check(problem.model, problem.chains(), problem.data, seed=0)
    assert "calibration, all" in failed(verdict)
    assert "% of the targets (all). Next: another likelihood" in verdict.sentence


def test_noise_that_depends_on_the_input_is_seen_in_a_slice():
    x = inputs(n=512, d=2)
    problem = Conjugate(x, noise=0.0, assumed=1.0)
    y = problem.data[1] + torch.where(x[:, :1] > 0.6745, 2.5, 0.6) * torch.randn(512, 1)
    verdict = bbb.check(problem.model, problem.chains(), (x, y), seed=0)
    (row,) = (row for row in verdict.rows if "quarter" in row.name)
    assert row.name == "calibration, input 0, quarter 4" and not row.passed


def test_a_point_has_no_density_and_a_poor_elbo_fails_everywhere():
    problem = Conjugate(inputs())
    point = bbb.check(problem.model, bbb.guides.make("delta", problem.model), problem.data, seed=0)
    assert not any("Pareto" in row.name for row in point.rows)
    far = bbb.AutoSoftplusNormal(problem.model, init_loc=30.0)
    verdict = bbb.check(problem.model, far, problem.data, seconds=1, seed=0)
    assert failed(verdict)[0] == "negative ELBO per example"
    assert "ignores the data has a better ELBO. Next: train longer" in verdict.sentence


# --- its parts ---


def test_inputs_off_the_data_are_in_the_gap_and_beyond():
    torch.manual_seed(0)
    x = torch.cat([torch.linspace(-2.5, -1, 40), torch.linspace(0.8, 2.5, 40)])[:, None]
    off = _verdict._off(x)[:, 0]
    gap, beyond = (off > -1) & (off < 0.8), off.abs() > 2.5
    assert len(off) == 64 and (gap | beyond).all() and gap.sum() > 10 and beyond.sum() > 10


def test_it_draws_what_it_has():
    problem = Conjugate(inputs())
    for reference in (None, problem.chains()):
        verdict = bbb.check(problem.model, problem.chains(), problem.data, reference=reference)
        left, right = verdict.plot().axes
        assert left.get_ylabel() == "coverage"
        on, off, _ = right.lines
        gold = verdict.functions[ON][:1000] if reference is None else verdict.reference[ON]
        torch.testing.assert_close(torch.tensor(on.get_xdata()), gold.std(0))
        torch.testing.assert_close(torch.tensor(off.get_ydata()), verdict.functions[OFF].std(0))


def test_pyros_own_chains_are_chains():
    problem = Conjugate(inputs(n=50))
    kernel = pyro.infer.HMC(problem.model, step_size=0.05, num_steps=4)
    mcmc = pyro.infer.MCMC(kernel, 40, 10, disable_progbar=True)
    mcmc.run(*problem.data)
    verdict = bbb.check(problem.model, mcmc, problem.data, seed=0)
    assert {"R-hat, on the data", "ESS, off the data"} <= {row.name for row in verdict.rows}
