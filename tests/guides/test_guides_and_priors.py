# SPDX-License-Identifier: Apache-2.0
"""Guides with priors; and the posteriors that guides must reach, exactly."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO

import pyro_bbb as bbb
from tests._support.guide_names import ANY_MODEL

NORMALS = ("softplus_normal", "normal", "low_rank", "full_rank")
WEIGHT, BIAS = "network.fc1.weight", "network.fc1.bias"


def make_model(prior, likelihood=None, sizes=(2, 3, 1), n=12):
    network = bbb.BayesianMLP(list(sizes), activation=torch.nn.Tanh, prior=prior)
    likelihood = likelihood or bbb.likelihoods.Gaussian(0.5)
    return bbb.BayesianModel(network, likelihood, num_data=n)


# --- each with several ---

IMPROPER = ("log_uniform", "normal_jeffreys")  # for few guides: tests/priors/test_sparse_priors
PRIORS, GUIDES = [name for name in bbb.priors.PRIORS if name not in IMPROPER], ANY_MODEL
PAIRS = [  # each guide with every fifth prior, each prior with every fifth guide
    (name, prior)
    for i, name in enumerate(GUIDES)
    for j, prior in enumerate(PRIORS)
    if (i + j) % 5 == 0
]


@pytest.mark.parametrize(("name", "prior"), PAIRS)
def test_every_guide_trains_and_predicts_with_every_prior(name, prior):
    model = make_model(prior)
    guide = bbb.guides.make(name, model, **({"size": 2} if name == "ensemble" else {}))
    x = torch.randn(12, 2)
    before = {name: value.detach().clone() for name, value in guide.named_parameters()}
    options = {"epochs": 3, "lr": 0.01, "num_particles": 2, "progress": False}
    try:
        history = bbb.fit(model, guide, (x, x.sum(1)), **options)
    except bbb.guides.NoModeError as error:  # three epochs end at no mode, and say so
        assert name == "laplace"
        history = error.history
    else:
        assert bbb.predict(model, guide, x, num_samples=4).sample_means.shape == (4, 12, 1)
    assert all(map(math.isfinite, history.loss)) and len(history) == 3
    moved = {
        name for name, value in guide.named_parameters() if not torch.equal(value, before[name])
    }
    still = set(before) - moved
    # behind the flow's last layer, which starts at 0, the first gradients are 0; masks hold some
    assert not still or (name == "flow" and all("arn" in key for key in still))


# --- without data ---


@pytest.mark.parametrize("name", [*NORMALS, "flow"])
def test_without_data_a_guide_returns_to_its_prior(name):
    """The KL alone, from a start 1.5 away and half as wide.

    20,000 draws resolve means to .007 and second moments to .010, and the last steps still scatter.
    Over 16 seeds both together have standard deviations of up to .022 and .023: 6 to the limits.
    """
    model = make_model(dist.Normal(0.0, 1.0), sizes=(2, 1))
    start = {"init_rho": -0.43} if name == "softplus_normal" else {"init_scale": 0.5}
    guide = bbb.guides.make(name, model, init_loc=1.5, **start)
    blind = pyro.poutine.block(model, hide=["obs"])
    optim = bbb.JointOptim(torch.optim.Adam, {"lr": 0.05})
    elbo = Trace_ELBO(num_particles=64, vectorize_particles=True, max_plate_nesting=1)
    svi = SVI(blind, guide, optim, elbo)
    for step in range(300):
        optim.set_lr(0.05 * math.cos(step / 300 * math.pi / 2))
        svi.step(torch.zeros(4, 2), torch.zeros(4))
    draws = guide.sample_posterior(20_000)
    joined = torch.cat([draws[WEIGHT].flatten(1), draws[BIAS]], dim=1)  # [S, 3]
    assert joined.mean(0).abs().max() < 0.13
    assert (joined.T @ joined / 20_000 - torch.eye(3)).abs().max() < 0.16


@pytest.mark.parametrize("name", ["delta", "laplace"])
def test_without_data_a_point_returns_to_the_priors_mode(name):
    nothing = bbb.likelihoods.Gaussian(1e9)  # observations that say 1e-18 of a prior's nat
    model = make_model(dist.Normal(0.0, 0.7), nothing, sizes=(2, 1)).double()
    guide = bbb.guides.make(name, model, init_loc=1.5).double()
    data = torch.ones(12, 2, dtype=torch.float64), torch.zeros(12, dtype=torch.float64)
    bbb.fit(model, guide, data, epochs=300, batch_size=12, lr=0.1, progress=False)
    assert max(value.abs().max() for value in guide.median().values()) < 1e-3
    if name == "laplace":
        expected = 0.7 * torch.eye(3, dtype=torch.float64)
        torch.testing.assert_close(guide.parts[0].scale_tril, expected, rtol=1e-7, atol=1e-9)


# --- the exact posterior of linear regression ---


class Regression:
    """Correlated inputs, known noise; the posterior and the evidence by linear algebra."""

    def __init__(self):
        n, prior, sigma = 24, 0.5, 0.8
        # orthonormal columns of mean 0: the posterior's covariance is the same for every seed
        columns = torch.linalg.qr(torch.cat([torch.ones(n, 1), torch.randn(n, 3)], 1))[0][:, 1:]
        correlate = torch.tensor([[1.0, 0.6, 0.0], [0.0, 0.8, 0.3], [0.0, 0.0, 0.5]])
        x = math.sqrt(n) * columns @ correlate
        design = torch.cat([x, torch.ones(n, 1)], dim=1)  # [n, 4]
        y = design @ torch.tensor([0.7, -0.4, 0.2, 0.5]) + sigma * torch.randn(n)
        self.precision = design.T @ design / sigma**2 + torch.eye(4) / prior**2
        self.covariance = self.precision.inverse()
        self.mean = self.covariance @ design.T @ y / sigma**2
        evidence = sigma**2 * torch.eye(n) + prior**2 * design @ design.T
        self.log_evidence = dist.MultivariateNormal(torch.zeros(n), evidence).log_prob(y).item()
        likelihood = bbb.likelihoods.Gaussian(sigma)
        self.model = make_model(dist.Normal(0.0, prior), likelihood, sizes=(3, 1), n=n)
        self.args = x, y
        self.start = {"fc1.weight": self.mean[None, :3], "fc1.bias": self.mean[3:]}

    def exact(self, name):
        """A guide set to the exact posterior."""
        guide = bbb.guides.make(name, self.model, init_loc=self.start, **RANK.get(name, {}))
        if name == "full_rank":
            factor = torch.linalg.cholesky(self.covariance)
            guide.scale = factor.diagonal()
            guide.scale_tril = factor / factor.diagonal()[:, None]
        elif name == "low_rank":
            scale = torch.linalg.eigvalsh(self.covariance)[0].sqrt() / 2
            remainder = self.covariance - scale**2 * torch.eye(4)
            guide.scale = scale.expand(4).clone()
            guide.cov_factor.data.copy_(torch.linalg.cholesky(remainder) / scale)
        else:
            guide.approximate(self.args)
        return guide


RANK = {"low_rank": {"rank": 4}}
EXACT = ["full_rank", "low_rank", "laplace"]


@pytest.fixture
def regression():
    torch.set_default_dtype(torch.float64)
    return Regression()


@pytest.mark.parametrize("name", EXACT)
def test_at_the_exact_posterior_every_draw_has_the_log_evidence(regression, name):
    guide = regression.exact(name)
    for _ in range(20):
        loss = Trace_ELBO().loss(regression.model, guide, *regression.args)
        assert loss == pytest.approx(-regression.log_evidence, rel=1e-10)


@pytest.mark.parametrize("name", ["full_rank", "low_rank"])
@pytest.mark.parametrize("batches", [1, 3])
def test_at_the_exact_posterior_sticking_the_landing_has_no_gradient(regression, name, batches):
    """Draw by draw, and over the minibatches of an epoch, with the same draws, in sum."""
    guide = regression.exact(name)
    size = 24 // batches
    for x, y in zip(*(tensor.split(size) for tensor in regression.args), strict=True):
        pyro.set_rng_seed(3)
        with bbb.sticking_the_landing():
            Trace_ELBO().loss_and_grads(regression.model, guide, x, y, size / 24)
    for parameter in guide.parameters():
        assert parameter.grad.abs().max() < 1e-9


def test_fit_reaches_the_exact_posterior(regression):
    """Within a third of what the best independent Normals miss."""
    guide = bbb.guides.FullRank(regression.model, init_scale=0.3)
    options = {"estimator": "stl", "num_particles": 8, "batch_size": 24, "lr": 0.1, "seed": 0}
    bbb.fit(regression.model, guide, regression.args, epochs=600, progress=False, **options)
    posterior, exact = guide.get_posterior(), regression.covariance
    off = (posterior.mean.detach() - regression.mean) / exact.diagonal().sqrt()
    assert off.abs().max() < 0.1

    def missed(covariance):  # 0 for the exact one, in any units of the weights
        return (covariance @ regression.precision - torch.eye(4)).abs().max().item()

    mean_field = missed(regression.precision.diagonal().reciprocal().diag())
    assert missed(posterior.covariance_matrix.detach()) < mean_field / 3
    assert mean_field > 0.5
