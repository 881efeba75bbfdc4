# SPDX-License-Identifier: Apache-2.0
"""The variational last layer against exact posteriors, and draws of its weights by plain torch."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from torch import nn
from torch.nn import functional as F

import pyro_bbb as bbb
from pyro_bbb import likelihoods
from pyro_bbb.elbo import minibatch_elbo

N, PRIOR = 30, 0.5
WEIGHT, BIAS = "network.head.weight", "network.head.bias"
COVARIANCES = ["shared", "per_output"]


class Net(nn.Module):
    """A trunk of three features, and a head; ``after`` works on its outputs."""

    def __init__(self, out=2, after=None, bias=True):
        super().__init__()
        self.trunk, self.head = nn.Linear(3, 3), nn.Linear(3, out, bias)
        self.after = after or (lambda module, x: module.head(torch.tanh(module.trunk(x))))

    def forward(self, x):
        return self.after(self, x)


def make(likelihood=None, net=None, prior=None, where="head", **options):
    prior = prior or dist.Normal(0.2, PRIOR)
    network = bbb.bayesianize(net or Net(), prior=prior, where=where)
    model = bbb.BayesianModel(network, likelihood or likelihoods.Gaussian(0.8), num_data=N)
    guide = bbb.guides.make("vbll", model, **{"init_scale": 0.3} | options)
    for name, parameter in guide.named_parameters():
        with torch.no_grad():
            parameter.add_(0.4 * torch.randn_like(parameter) * ("locs" not in name))
    return model, guide


def features(model, x):
    """The head's inputs and a one, ``[n, 4]``."""
    with torch.no_grad():
        hidden = torch.tanh(model.network.trunk(x))
    return torch.cat([hidden, torch.ones(len(x), 1)], 1)


def posterior(guide):
    """Means ``[out, 4]`` and Cholesky factors ``[out, 4, 4]`` of the rows of (W, b)."""
    params = {name: p.detach() for name, p in guide.named_parameters()}
    loc = torch.cat([params["locs.weight"], params["locs.bias"][:, None]], 1)
    scale = F.softplus(torch.cat([params["rhos.weight"], params["rhos.bias"][:, None]], 1))
    lower = torch.zeros(len(scale), 4, 4)
    lower[:, :3, :3] = params["lowers.weight"]
    lower[:, 3, :3] = params["lowers.bias"]
    factor = scale[:, :, None] * (lower.tril(-1) + torch.eye(4))
    return loc, factor.expand(len(loc), 4, 4)


def closed_form(model, guide, x, y, kl_weight=1.0):
    elbo = minibatch_elbo("mean_field", 1)
    pair = guide.in_closed_form(model)
    with pyro.validation_enabled(False):
        loss = elbo.differentiable_loss(*pair, x, y, kl_weight)
    return loss, elbo.take_parts()


# --- linear regression, where it is exact ---


def exact(phi, y, sigma):
    """Means ``[out, 4]`` and covariances ``[out, 4, 4]``, and the log evidence in nats."""
    precisions = [phi.T @ phi / s**2 + torch.eye(4) / PRIOR**2 for s in sigma]
    shifts = [phi.T @ y[:, i] / s**2 + 0.2 / PRIOR**2 for i, s in enumerate(sigma)]
    means = [torch.linalg.solve(*system) for system in zip(precisions, shifts, strict=True)]
    log_evidence = 0.0
    for i, s in enumerate(sigma):
        marginal = PRIOR**2 * phi @ phi.T + s**2 * torch.eye(N)
        log_evidence += dist.MultivariateNormal(0.2 * phi.sum(1), marginal).log_prob(y[:, i])
    return torch.stack(means), torch.stack(precisions).inverse(), float(log_evidence)


def linear_regression(covariance):
    sigma = torch.tensor([0.8, 0.8] if covariance == "shared" else [0.8, 0.5])
    net = Net()
    net.trunk.requires_grad_(False)
    model, guide = make(likelihoods.Gaussian(sigma), net, covariance=covariance)
    x, y = torch.randn(N, 3), torch.randn(N, 2)
    return model, guide, x, y, exact(features(model, x), y, sigma)


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_at_the_exact_posterior_the_elbo_is_the_log_evidence(double, covariance):
    """So it is the optimum, and every gradient is 0."""
    model, guide, x, y, (mean, cov, log_evidence) = linear_regression(covariance)
    factor = torch.linalg.cholesky(cov)[: len(guide.rhos["weight"])]  # of one row, or of each
    scale = factor.diagonal(dim1=1, dim2=2)
    lower, rho = factor / scale[:, :, None], scale.expm1().log()
    values = {
        "locs": (mean[:, :3], mean[:, 3]),
        "rhos": (rho[:, :3], rho[:, 3]),
        "lowers": (lower[:, :3, :3], lower[:, 3, :3]),
    }
    with torch.no_grad():
        for group, pair in values.items():
            for name, value in zip(("weight", "bias"), pair, strict=True):
                getattr(guide, group)[name].copy_(value)
    loss, _ = closed_form(model, guide, x, y)
    assert loss.item() == pytest.approx(-log_evidence, abs=1e-9)
    loss.backward()
    assert all(p.grad.abs().max() < 1e-9 for p in guide.parameters())


def test_fit_ends_at_the_exact_posterior_of_linear_regression(double):
    model, guide, x, y, (mean, cov, _) = linear_regression("shared")
    options = {"batch_size": N, "lr": 0.1, "engine": "eager", "progress": False}
    bbb.fit(model, guide, (x, y), epochs=250, **options)
    loc, factor = posterior(guide)
    torch.testing.assert_close(loc, mean, rtol=0, atol=1e-4)
    torch.testing.assert_close(factor @ factor.mT, cov, rtol=0, atol=1e-4)


# --- the objective ---


EXACT = {
    "Gaussian": lambda: likelihoods.Gaussian(0.8),
    "learned": lambda: likelihoods.Gaussian.learned(torch.tensor([0.5, 2.0])),
    "Poisson": likelihoods.Poisson,
}
BOUNDED = {"Categorical": likelihoods.Categorical, "Bernoulli": likelihoods.Bernoulli}


def targets(likelihood):
    bits = torch.randint(0, 2, (N, 2))
    by_likelihood = {"Categorical": bits[:, 0], "Bernoulli": bits.float(), "Poisson": 2 * bits}
    return by_likelihood.get(likelihood, torch.randn(N, 2))


def nll_of_draws(model, guide, x, y, draws=4000):
    """The negative log-likelihood of drawn heads, ``[draws]``, by torch's own distributions."""
    loc, factor = posterior(guide)
    rows = torch.distributions.MultivariateNormal(loc, scale_tril=factor).sample((draws,))
    outputs = features(model, x) @ rows.mT  # [draws, N, out]
    likelihood = type(model.likelihood).__name__
    if likelihood == "Categorical":
        log_probs = torch.distributions.Categorical(logits=outputs).log_prob(y)
    elif likelihood == "Bernoulli":
        log_probs = torch.distributions.Bernoulli(logits=outputs).log_prob(y)
    elif likelihood == "Poisson":
        log_probs = torch.distributions.Poisson(outputs.exp()).log_prob(y)
    else:
        scale = torch.as_tensor(model.likelihood.scale).detach()
        log_probs = torch.distributions.Normal(outputs, scale).log_prob(y)
    return -log_probs.flatten(1).sum(1)


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("likelihood", [*EXACT, *BOUNDED])
def test_the_expected_log_likelihood_is_that_of_drawn_heads(double, likelihood, covariance):
    """6 standard errors of 4,000 draws; a bound on its side."""
    model, guide = make((EXACT | BOUNDED)[likelihood](), covariance=covariance)
    x, y = torch.randn(N, 3), targets(likelihood)
    nll = closed_form(model, guide, x, y)[1].nll
    draws = nll_of_draws(model, guide, x, y)
    excess, error = nll - draws.mean(), draws.std() / math.sqrt(len(draws))
    if likelihood in EXACT:
        assert excess.abs() < 6 * error
    else:
        assert -6 * error < excess < 0.2 * draws.mean()  # above, and of the same size
        with torch.no_grad():
            for rho in guide.rhos.parameters():
                rho.fill_(-20.0)
        nll = closed_form(model, guide, x, y)[1].nll
        point = nll_of_draws(model, guide, x, y, 1).item()
        assert nll == pytest.approx(point, rel=1e-6)  # tight without variance


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_the_kl_is_torchs_and_is_weighted_alone(double, covariance):
    model, guide = make(covariance=covariance)
    loc, factor = posterior(guide)
    q = torch.distributions.MultivariateNormal(loc, scale_tril=factor)
    p = torch.distributions.MultivariateNormal(torch.full((4,), 0.2), PRIOR**2 * torch.eye(4))
    expected = torch.distributions.kl_divergence(q, p).sum().item()
    x, y = torch.randn(N, 3), torch.randn(N, 2)
    unweighted = closed_form(model, guide, x, y)[1]
    for weight in (0.0, 0.25):
        loss, terms = closed_form(model, guide, x, y, weight)
        assert terms.kl == pytest.approx(expected, rel=1e-10)
        assert terms.log_guide == pytest.approx(-q.entropy().sum().item(), rel=1e-10)
        assert loss.item() == pytest.approx(weight * expected + unweighted.nll, rel=1e-10)


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_by_pyro_alone_it_draws_and_scores_the_same_normal(double, covariance):
    """Trace_ELBO over 8,000 draws has the closed form's mean; each draw the Normal's density."""
    model, guide = make(covariance=covariance)
    x, y = torch.randn(N, 3), torch.randn(N, 2)
    loc, factor = posterior(guide)
    q = torch.distributions.MultivariateNormal(loc, scale_tril=factor)
    trace = pyro.poutine.trace(guide).get_trace(x, y)
    rows = torch.cat([trace.nodes[WEIGHT]["value"], trace.nodes[BIAS]["value"][:, None]], 1)
    assert trace.log_prob_sum().item() == pytest.approx(q.log_prob(rows).sum().item(), rel=1e-10)
    many = Trace_ELBO(num_particles=200, vectorize_particles=True, max_plate_nesting=1)
    losses = torch.stack([many.differentiable_loss(model, guide, x, y) for _ in range(40)]).detach()
    expected = closed_form(model, guide, x, y)[0].item()
    # 6 standard errors of 40 means
    assert abs(losses.mean() - expected) < 6 * losses.std() / math.sqrt(40)
    before = guide.lowers.weight.detach().clone()
    SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), Trace_ELBO()).step(x, y)
    assert not torch.equal(guide.lowers.weight, before)


def test_draws_medians_and_quantiles_are_those_of_the_normal(double):
    """20,000 draws; 6 standard errors of 8 means and 20 second moments."""
    _, guide = make(covariance="per_output")
    loc, factor = posterior(guide)
    draws = guide.sample_posterior(20_000)
    rows = torch.cat([draws[WEIGHT], draws[BIAS].unsqueeze(-1)], -1) - loc
    white = torch.linalg.solve_triangular(factor, rows.unsqueeze(-1), upper=False).squeeze(-1)
    assert white.mean(0).abs().max() < 6 / math.sqrt(20_000)
    second = torch.einsum("sod,soe->ode", white, white) / 20_000
    assert (second - torch.eye(4)).abs().max() < 6 * math.sqrt(2 / 20_000)
    assert torch.equal(guide.median()[BIAS], loc[:, 3])
    quantiles = guide.quantiles([0.5, 0.975])[WEIGHT]
    sd = factor.square().sum(-1).sqrt()[:, :3]
    torch.testing.assert_close(quantiles[0], loc[:, :3])
    torch.testing.assert_close(quantiles[1], loc[:, :3] + 1.959963984540054 * sd)


# --- training ---


@pytest.mark.parametrize("likelihood", ["learned", "Categorical"])
def test_captured_and_eager_steps_train_head_trunk_and_noise_alike(double, likelihood):
    histories, pairs = [], []
    for engine in ("eager", "compiled"):
        torch.manual_seed(1)
        model, guide = make((EXACT | BOUNDED)[likelihood]())
        before = {k: v.detach().clone() for k, v in [*guide.state_dict().items()]}
        trunk = model.network.trunk.weight.detach().clone()
        x, y = torch.randn(N, 3), targets(likelihood)
        options = {"epochs": 4, "batch_size": 10, "progress": False, "seed": 2}
        histories.append(bbb.fit(model, guide, (x, y), engine=engine, lr=0.02, **options))
        assert all(not torch.equal(v, before[k]) for k, v in guide.state_dict().items())
        assert not torch.equal(model.network.trunk.weight, trunk)
        pairs.append({**model.state_dict(), **guide.state_dict()})
    for name, value in pairs[0].items():
        torch.testing.assert_close(value, pairs[1][name], rtol=1e-6, atol=1e-9)
    assert histories[0].loss == pytest.approx(histories[1].loss, rel=1e-7)
    steps = histories[0].steps
    for loss, kl, nll in zip(steps.loss, steps.kl, steps.nll, strict=True):
        assert loss == pytest.approx(kl / 3 + nll, rel=1e-9)


def test_by_drawn_weights_any_prior_and_likelihood_trains():
    mixture = bbb.ScaleMixtureNormal(0.5, 1.0, 0.1)
    model, guide = make(likelihoods.StudentT(4.0), prior=mixture)
    x = torch.randn(N, 3)
    options = {"epochs": 2, "loss": "trace", "num_particles": 2, "progress": False}
    bbb.fit(model, guide, (x, x[:, :2]), **options)
    assert bbb.predict(model, guide, x, num_samples=3).sample_means.shape == (3, N, 2)


# --- prediction and files ---


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_predictions_have_the_moments_of_the_features(covariance):
    """Exactly, where noise is Normal; else by 2,000 draws: 6 standard errors of their moments."""
    model, guide = make(covariance=covariance)
    x, (loc, factor) = torch.randn(N, 3), posterior(guide)
    prediction, phi = bbb.predict(model, guide, x), features(model, x)
    sd = (phi @ factor).square().sum(-1).sqrt().T  # [N, out]
    assert prediction.sampler == "outputs"
    torch.testing.assert_close(prediction.mean, phi @ loc.T)
    torch.testing.assert_close(prediction.epistemic_std, sd)
    torch.testing.assert_close(prediction.aleatoric_std, torch.full((N, 2), 0.8))
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=7)
    torch.testing.assert_close(bbb.predict(model, guide, batches).epistemic_std, sd)
    torch.testing.assert_close(bbb.predict(model, guide, x, linearized=True).epistemic_std, sd)
    torch.testing.assert_close(bbb.predict_mean(model, guide, x).mean, phi @ loc.T)
    model.likelihood = likelihoods.StudentT(5.0, 0.8)
    draws = bbb.predict(model, guide, x, num_samples=2000, seed=1).sample_means
    assert draws.shape == (2000, N, 2)
    assert ((draws.mean(0) - phi @ loc.T) / sd).abs().max() < 6 / math.sqrt(2000)
    assert (draws.std(0) / sd - 1).abs().max() < 6 / math.sqrt(4000)


def test_the_head_may_be_the_network_and_a_layer_of_a_sequence():
    x, y = torch.randn(N, 3), torch.randn(N, 1)
    for layers in ([nn.Linear(3, 4), nn.ReLU(), bbb.BayesianLinear(4, 1)], [nn.Linear(3, 1)]):
        network = nn.Sequential(*layers)
        network = network if len(layers) > 1 else bbb.bayesianize(network[0])
        model = bbb.BayesianModel(network, likelihoods.Gaussian(), N)
        guide = bbb.guides.make("vbll", model)
        bbb.fit(model, guide, (x, y), epochs=1, progress=False)
        assert bbb.predict(model, guide, x[0:1], num_samples=2).mean.shape == (1, 1)


# --- what it cannot do ---


def fitted(**options):
    model, guide = make(**options)
    return bbb.fit(model, guide, (torch.randn(N, 3), torch.randn(N, 2)), epochs=1, progress=False)


def latent_noise():
    return likelihoods.Gaussian(dist.LogNormal(0.0, 1.0))


class Convolution(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv1d(1, 1, 2))


REFUSED = {
    "two layers, one named": (
        lambda: make(where=None, head="head"),
        ValueError,
        r"no latents but the head's, 'network.head', got \['network.trunk.weight', 'network.trunk",
    ),
    "latent noise": (
        lambda: make(latent_noise(), head="head"),
        ValueError,
        r"got \['likelihood.scale'\] too",
    ),
    "a bias alone": (lambda: make(where="head.bias"), TypeError, "Bayesian linear layer, got"),
    "a convolution": (
        lambda: make(net=Convolution(), where="0"),
        TypeError,
        "head must be a Bayesian linear layer, got PyroConv1d",
    ),
    "a mixture": (
        lambda: fitted(prior=bbb.ScaleMixtureNormal(0.5, 1.0, 0.1)),
        ValueError,
        "needs a Normal prior .* got ScaleMixtureNormal; .*loss='trace'",
    ),
    "StudentT": (
        lambda: fitted(likelihood=likelihoods.StudentT(3.0)),
        ValueError,
        "needs Gaussian, .* got StudentT",
    ),
    "heteroscedastic": (
        lambda: fitted(likelihood=likelihoods.HeteroscedasticGaussian(), net=Net(out=4)),
        ValueError,
        r"Normal of outputs \[\d+, 4\]; or draw weights by fit\(loss='trace'\)",
    ),
    "after the head": (
        lambda: fitted(net=Net(after=lambda m, x: 2 * m.head(m.trunk(x)))),
        ValueError,
        "outputs are those of the head, run once",
    ),
    "twice": (
        lambda: fitted(net=Net(out=3, after=lambda m, x: m.head(m.head(x))[:, :2])),
        ValueError,
        "outputs are those of the head, run once",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_closed_form_is_refused_with_the_reason(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("options", [{"estimator": "flipout"}, {"num_particles": 2}])
def test_a_step_that_draws_nothing_takes_no_estimator_and_one_particle(options):
    model, guide = make()
    data = torch.randn(N, 3), torch.randn(N, 2)
    with pytest.raises(ValueError, match="a closed form without draws needs estimator 'reparam'"):
        bbb.fit(model, guide, data, epochs=1, progress=False, **options)


def test_a_prediction_past_the_head_is_refused_and_by_weights_it_works():
    model, guide = make(net=Net(after=lambda m, x: 2 * m.head(m.trunk(x))))
    x = torch.randn(N, 3)
    with pytest.raises(ValueError, match=r"predict\(estimator='reparam'\)"):
        bbb.predict(model, guide, x)
    assert bbb.predict(model, guide, x, num_samples=2, estimator="reparam").mean.shape == (N, 2)
