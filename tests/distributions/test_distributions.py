# SPDX-License-Identifier: Apache-2.0
"""Densities, gradients and draws against scipy, torch, numerical integration and each other."""

import math

import numpy as np
import pyro
import pytest
import scipy.stats
import torch
from pyro import distributions as dist
from pyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from scipy.integrate import quad
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.distributions import constraints, kl_divergence, transforms

from pyro_bbb.distributions import (
    PrunedNormal,
    ScaleMixtureNormal,
    SoftplusNormal,
    map_tensors,
    softplus,
    without_validation,
)
from pyro_bbb.distributions.observation import (
    LogRatePoisson,
    NegativeBinomial,
    Normal,
    StudentT,
)

EPS32, EPS64 = np.finfo(np.float32).eps, np.finfo(np.float64).eps
ALPHA = 1e-6  # false-alarm rate of each Kolmogorov-Smirnov test below

# (pi, sigma1, sigma2): the paper's, swapped, equal, at the ends of pi, almost at them, far apart
MIXTURES = [
    (0.5, 1.0, math.exp(-6)),
    (0.25, 1.0, math.exp(-8)),
    (0.25, math.exp(-8), 1.0),
    (0.75, math.exp(-1), math.exp(-7)),
    (0.5, 2.0, 2.0),
    (0.0, 1.0, math.exp(-8)),
    (1.0, 1.0, math.exp(-8)),
    (0.0, math.exp(-8), 1.0),
    (1.0, math.exp(-8), 1.0),
    (1e-7, 3.0, 2.0),
    (1 - 1e-6, 0.01, 30.0),
]
mixtures = pytest.mark.parametrize(("pi", "sigma1", "sigma2"), MIXTURES)


def grid(dtype=torch.float64):
    """Weights of both signs from 0 to 50, dense around 0 where the components cross."""
    size = torch.cat([torch.zeros(1), torch.logspace(-8, math.log10(50), 4000)])
    return torch.cat([-size, size]).to(dtype)


def as_tensors(*numbers, dtype=torch.float64, **options):
    return [torch.tensor(number, dtype=dtype, **options) for number in numbers]


def relative_error(actual, expected, floor=0.0):
    expected = np.asarray(expected)
    return np.max(np.abs(np.asarray(actual) - expected) / np.maximum(np.abs(expected), floor))


def batched(dtype=torch.float64):
    """A mixture of batch shape [3, 2] from parameters of three shapes, the wider one changing."""
    pi = torch.tensor([[0.2], [0.5], [1.0]], dtype=dtype)
    sigma1 = torch.tensor([1.0, 0.01], dtype=dtype)
    return ScaleMixtureNormal(pi, sigma1, torch.tensor(0.1, dtype=dtype))


# --- ScaleMixtureNormal: density ---


@mixtures
def test_density_cdf_and_moments_agree_with_numerical_integration(pi, sigma1, sigma2):
    mixture = ScaleMixtureNormal(*as_tensors(pi, sigma1, sigma2))

    def density(w):
        return mixture.log_prob(torch.tensor(w, dtype=torch.float64)).exp().item()

    def integral(function, upper):
        """Integrate from -40 standard deviations, in pieces that end at a component's tails."""
        ends = sorted({k * s for k in (-40, -8, -2, 0, 2, 8, 40) for s in (sigma1, sigma2)})
        ends = [end for end in ends if end < upper] + [upper]
        pieces = zip(ends[:-1], ends[1:], strict=True)
        return math.fsum(quad(function, *piece, epsabs=1e-13)[0] for piece in pieces)

    wide = 40 * max(sigma1, sigma2)
    assert integral(density, wide) == pytest.approx(1, abs=1e-11)
    assert integral(lambda w: w * density(w), wide) == pytest.approx(mixture.mean.item(), abs=1e-11)
    second = integral(lambda w: w * w * density(w), wide)
    assert second == pytest.approx(mixture.variance.item(), rel=1e-10)
    for w in (-sigma1, -0.3 * sigma2, 0.0, 0.7 * sigma2, 2.0 * sigma1):
        cdf = mixture.cdf(torch.tensor(w, dtype=torch.float64)).item()
        assert cdf == pytest.approx(integral(density, w), abs=1e-11)
        normal = scipy.stats.norm.cdf
        by_scipy = pi * normal(w, 0, sigma1) + (1 - pi) * normal(w, 0, sigma2)
        assert cdf == pytest.approx(by_scipy, rel=1e-13)


# --- ScaleMixtureNormal: derivatives ---


def test_first_and_second_derivatives_in_value_and_parameters():
    torch.manual_seed(1)
    w = torch.randn(4, 1, dtype=torch.float64, requires_grad=True)
    pi = torch.tensor([0.2, 0.9, 0.5], dtype=torch.float64, requires_grad=True)
    sigma1 = torch.tensor([1.0, 0.3, 2.0], dtype=torch.float64, requires_grad=True)
    sigma2 = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)

    def log_prob(w, pi, sigma1, sigma2):
        return ScaleMixtureNormal(pi, sigma1, sigma2).log_prob(w)

    assert gradcheck(log_prob, (w, pi, sigma1, sigma2), check_batched_grad=True)
    assert gradgradcheck(log_prob, (w, pi, sigma1, sigma2))
    assert gradcheck(  # through a batch shape beyond the parameters'
        lambda *x: ScaleMixtureNormal(*x[1:]).expand([4, 3]).log_prob(x[0]),
        (w, pi, sigma1, sigma2),
    )


def test_vmap_over_values_and_over_parameters_is_a_loop():
    w, pi = torch.randn(5, 3, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    sigma = torch.rand(5, 2, dtype=torch.float64)

    def log_prob(w, pi, sigma):
        mixture = ScaleMixtureNormal(pi, sigma[0], sigma[1], validate_args=False)
        return mixture.expand([3]).log_prob(w).sum()

    loop = torch.stack([log_prob(*row) for row in zip(w, pi, sigma, strict=True)])
    torch.testing.assert_close(torch.vmap(log_prob)(w, pi, sigma), loop)
    only_values = torch.vmap(log_prob, (0, None, None))(w, pi[0], sigma[0])
    torch.testing.assert_close(
        only_values, torch.stack([log_prob(row, pi[0], sigma[0]) for row in w])
    )
    per_row = torch.vmap(torch.func.grad(log_prob, (0, 1, 2)))(w, pi, sigma)
    for i in range(5):
        leaves = [x[i].clone().requires_grad_() for x in (w, pi, sigma)]
        torch.testing.assert_close(
            tuple(x[i] for x in per_row), grad(log_prob(*leaves), leaves), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize(("pi", "sigma1", "sigma2"), MIXTURES[:5])
def test_a_mixture_from_its_log_odds_is_the_same(pi, sigma1, sigma2):
    w, (logit, *sigmas) = grid(), as_tensors(math.log(pi / (1 - pi)), sigma1, sigma2)
    by_logit = ScaleMixtureNormal.from_logit(logit, *sigmas).expand([8002])
    by_weight = ScaleMixtureNormal(*as_tensors(pi, sigma1, sigma2))
    torch.testing.assert_close(by_logit.log_prob(w), by_weight.log_prob(w), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(by_logit.pi[0], by_weight.pi)
    double = map_tensors(
        ScaleMixtureNormal.from_logit(*(x.float() for x in (logit, *sigmas))), to_double
    )
    exact = ScaleMixtureNormal.from_logit(*(x.float().double() for x in (logit, *sigmas)))
    assert torch.equal(double.log_prob(w), exact.log_prob(w))


@mixtures
def test_in_another_dtype_the_density_is_that_of_the_parameters(pi, sigma1, sigma2):
    """Not that of coefficients that were rounded to single precision before."""
    single = as_tensors(pi, sigma1, sigma2, dtype=torch.float32)
    double = map_tensors(ScaleMixtureNormal(*single).expand([8002]).to_event(1), to_double)
    exact = ScaleMixtureNormal(*(parameter.double() for parameter in single))
    w = grid()
    assert torch.equal(double.base_dist.log_prob(w), exact.log_prob(w))


# --- ScaleMixtureNormal: shapes, draws, domain ---


def test_batch_shapes_broadcast_and_expand():
    mixture, w = batched(), torch.randn(5, 3, 2, dtype=torch.float64)
    assert (mixture.batch_shape, mixture.event_shape) == ((3, 2), ())
    expanded = mixture.expand([5, 3, 2])
    loop = torch.stack(
        [
            ScaleMixtureNormal(
                mixture.pi[i, j], mixture.sigma1[i, j], mixture.sigma2[i, j]
            ).log_prob(w[:, i, j])
            for i in range(3)
            for j in range(2)
        ],
        -1,
    ).reshape(5, 3, 2)
    for actual in (mixture.log_prob(w), expanded.log_prob(w)):
        torch.testing.assert_close(actual, loop, rtol=1e-14, atol=1e-14)
    event = expanded.to_event(2)
    assert (event.batch_shape, event.event_shape) == ((5,), (3, 2))
    torch.testing.assert_close(event.log_prob(w), loop.sum((1, 2)))
    assert mixture.log_prob(torch.zeros((), dtype=torch.float64)).shape == (3, 2)
    assert expanded.sample((7,)).shape == (7, 5, 3, 2)
    for name in ("mean", "variance", "pi", "sigma1", "sigma2"):
        assert getattr(expanded, name).shape == (5, 3, 2)
    assert expanded.support is constraints.real


@pytest.mark.parametrize(
    ("pi", "sigma1", "sigma2"), [MIXTURES[0], MIXTURES[2], (0.2, 1.0, 3.0), MIXTURES[5]]
)
def test_draws_of_the_mixture_follow_its_cdf(pi, sigma1, sigma2):
    mixture = ScaleMixtureNormal(*as_tensors(pi, sigma1, sigma2))
    draws = mixture.expand([100]).sample((200,)).flatten().numpy()
    test = scipy.stats.kstest(draws, lambda w: mixture.cdf(torch.as_tensor(w)).numpy())
    assert test.pvalue > ALPHA


def test_components_are_chosen_per_entry_not_per_draw():
    # Squared entries of a row are independent: their correlation is 0 +- 1/sqrt(n). With one choice
    # per row it would be 0.25. 5 standard errors, false-alarm rate 6e-7.
    n = 20_000
    near = ScaleMixtureNormal(0.5, 1.0, 1e-3).expand([2]).sample((n,)).abs() > 0.01
    correlation = np.corrcoef(near.double().T.numpy())[0, 1]
    assert abs(correlation) < 5 / math.sqrt(n)


def test_values_are_validated_only_on_demand():
    nan = torch.tensor(math.nan)
    with pytest.raises(ValueError, match="within the support"):
        ScaleMixtureNormal(0.5, 1.0, 0.1, validate_args=True).expand([2]).log_prob(nan)
    quiet = ScaleMixtureNormal(0.5, 1.0, 0.1, validate_args=False).expand([2])
    assert quiet.log_prob(nan).isnan().all()
    with pytest.raises(ValueError, match="sigma1"):
        ScaleMixtureNormal(0.5, -1.0, 0.1, validate_args=True)
    ScaleMixtureNormal(0.5, -1.0, 0.1, validate_args=False)


def test_the_dtype_is_that_of_the_tensors_given():
    mixture = ScaleMixtureNormal(0.5, torch.tensor(1.0, dtype=torch.float64), 0.1)
    assert mixture.sample().dtype == mixture.variance.dtype == torch.float64
    assert ScaleMixtureNormal(1, 1, 1).sample().dtype == torch.float32


def test_nuts_and_a_stock_autoguide_accept_the_mixture():
    def model():
        w = pyro.sample("w", ScaleMixtureNormal(0.5, 1.0, 0.3).expand([2]).to_event(1))
        pyro.sample("y", dist.Normal(w.sum(), 0.5), obs=torch.tensor(1.0))

    mcmc = MCMC(NUTS(model), num_samples=10, warmup_steps=10, disable_progbar=True)
    mcmc.run()
    draws = mcmc.get_samples()["w"]
    assert draws.shape == (10, 2) and draws.isfinite().all() and draws.std() > 0
    guide = AutoNormal(model)
    loss = SVI(model, guide, Adam({"lr": 0.05}), Trace_ELBO()).step()
    assert math.isfinite(loss) and set(guide.median()) == {"w"}


# --- softplus ---


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")  # by torch's own forward mode
def test_softplus_has_torchs_derivatives_and_limits():
    rho = torch.tensor([-300.0, -5.0, -1e-8, 0.0, 1e-8, 5.0, 300.0], dtype=torch.float64)
    rho.requires_grad_()
    of_ours, of_torchs = (
        grad(f(rho).sum(), rho)[0] for f in (softplus, torch.nn.functional.softplus)
    )
    torch.testing.assert_close(of_ours, of_torchs, rtol=1e-15, atol=1e-100)
    assert gradgradcheck(softplus, rho[1:-1])
    tangent = torch.ones_like(rho)
    _, forward = torch.func.jvp(softplus, (rho.detach(),), (tangent,))
    torch.testing.assert_close(forward, of_torchs, rtol=1e-15, atol=1e-100)
    limits = softplus(torch.tensor([-math.inf, math.inf, math.nan])).tolist()
    assert limits[:2] == [0.0, math.inf] and math.isnan(limits[2])


# --- SoftplusNormal ---


def test_a_softplus_normal_expands_with_independent_noise():
    zeros = torch.zeros(3, dtype=torch.float64)
    q = SoftplusNormal(zeros, zeros).expand([4, 3])
    value = q.rsample((2,))
    assert value.shape == (2, 4, 3) and value.unique().numel() == 24
    assert isinstance(q, SoftplusNormal) and q.scale.shape == (4, 3)
    torch.testing.assert_close(
        q.log_prob(value), torch.distributions.Normal(0.0, math.log(2)).log_prob(value)
    )


# --- PrunedNormal ---


def pruned_normal():
    loc = torch.tensor([[0.5, -1.0], [2.0, 3.0]], dtype=torch.float64, requires_grad=True)
    rho = torch.tensor([[-3.0, -math.inf], [-math.inf, 1.0]], dtype=torch.float64)
    return PrunedNormal(loc, rho.requires_grad_()), loc, rho, rho.isfinite()


@pytest.mark.parametrize("shape", [(2, 2), (3, 2, 2)])
def test_removed_entries_are_zero_and_the_others_those_of_a_normal(shape):
    q, loc, rho, unpruned = pruned_normal()
    if len(shape) == 3:
        q = q.expand(shape)
    kept_everywhere = unpruned.expand(shape)
    value = q.rsample()
    assert value.shape == shape
    assert (value[~kept_everywhere] == 0).all() and (value[kept_everywhere] != 0).all()
    assert (q.scale[~kept_everywhere] == 0).all() and (q.mean[~kept_everywhere] == 0).all()
    plain = torch.distributions.Normal(loc, softplus(rho).where(unpruned, 1.0))
    for x in (value, q.sample(), torch.zeros(shape, dtype=torch.float64)):
        expected = plain.log_prob(x).where(unpruned, 0.0)
        torch.testing.assert_close(q.log_prob(x), expected, rtol=1e-12, atol=1e-12)


def test_removed_entries_have_no_gradient():
    q, loc, rho, unpruned = pruned_normal()
    value = q.rsample()
    normal = torch.distributions.Normal(torch.zeros_like(loc), 1.0)
    loss = q.log_prob(value).sum() - normal.log_prob(value).sum() + kl_divergence(q, normal).sum()
    for gradient in grad(loss, (loc, rho)):
        assert gradient.isfinite().all()
        assert torch.equal(gradient != 0, unpruned)


# --- LogRatePoisson, NegativeBinomial and StudentT ---


def test_poisson_probabilities_are_those_of_scipy():
    log_rate = torch.linspace(-10, 6, 33, dtype=torch.float64)[:, None]
    counts = torch.tensor([0.0, 1, 2, 5, 30, 400], dtype=torch.float64)
    poisson, reference = LogRatePoisson(log_rate), scipy.stats.poisson(np.exp(log_rate.numpy()))
    assert relative_error(poisson.log_prob(counts), reference.logpmf(counts), floor=1) < 1e-12
    for x in (counts, counts + 0.5, -1 - counts):
        cdf = poisson.cdf(x)
        torch.testing.assert_close(cdf, torch.as_tensor(reference.cdf(x)), rtol=1e-8, atol=1e-300)
    assert torch.equal(poisson.mean, log_rate.exp()) and torch.equal(poisson.mean, poisson.variance)


@pytest.mark.parametrize("r", [0.01, 0.5, 2.5, 30.0, 1e6])
def test_negative_binomial_probabilities_are_those_of_scipy(r):
    log_mean = torch.linspace(-10, 6, 33, dtype=torch.float64)[:, None]
    counts = torch.tensor([0.0, 1, 2, 5, 30, 400], dtype=torch.float64)
    mean = log_mean.exp()
    counted = NegativeBinomial(torch.tensor(r, dtype=torch.float64), logits=log_mean - math.log(r))
    reference = scipy.stats.nbinom(r, (r / (r + mean)).numpy())
    # at r = 1e6 the three log-gammas have 1.3e7 nats, and scipy's as well
    tolerance = 1e-12 * max(r, 1)
    assert relative_error(counted.log_prob(counts), reference.logpmf(counts), 1) < tolerance
    assert torch.equal(counted.cdf(counts.long()), counted.cdf(counts))
    for x in (counts, counts + 0.5, -1 - counts):
        expected = torch.as_tensor(reference.cdf(x.floor().numpy()))
        torch.testing.assert_close(counted.cdf(x), expected, rtol=1e-8, atol=1e-300)
    torch.testing.assert_close(counted.mean, mean)
    torch.testing.assert_close(counted.variance, mean + mean.square() / r)


def test_negative_binomial_far_out():
    r, logits = torch.tensor(0.01), torch.tensor([80.0, -80.0], requires_grad=True)
    counted = NegativeBinomial(r, logits=logits)
    log_prob = counted.log_prob(torch.tensor([0.0, 3.0]))
    of_count = math.lgamma(3.01) - math.lgamma(0.01) - math.log(6)
    torch.testing.assert_close(log_prob, torch.tensor([-0.8, of_count - 240]))
    torch.testing.assert_close(grad(log_prob.sum(), logits)[0], torch.tensor([-0.01, 3.0]))
    torch.testing.assert_close(counted.cdf(torch.zeros(2)), torch.tensor([math.exp(-0.8), 1.0]))


def test_the_cdf_of_student_t_is_that_of_scipy():
    df = torch.tensor([[0.5], [1.0], [3.0], [100.0]], dtype=torch.float64)
    loc, scale = torch.tensor([0.0, 2.0], dtype=torch.float64), torch.tensor(0.5)
    value = torch.tensor([[[-30.0]], [[0.0]], [[1.9]]], dtype=torch.float64, requires_grad=True)
    actual = StudentT(df, loc, scale.double()).expand([3, 4, 2]).cdf(value)
    expected = scipy.stats.t.cdf(value.detach(), df, loc, 0.5)
    assert actual.shape == (3, 4, 2)
    assert relative_error(actual.detach(), expected) < 1e-12
    assert StudentT(3.0).cdf(torch.zeros(2)).dtype == torch.float32
    assert torch.equal(StudentT(3.0).cdf(torch.zeros(2).long()), torch.full((2,), 0.5))


@pytest.mark.parametrize("family", [Normal, StudentT])
def test_what_is_no_number_is_refused_only_where_values_are_validated(family):
    value, arguments = torch.tensor(math.nan), (3.0, torch.tensor(1.0))
    with pytest.raises(ValueError, match="value"):
        family(*arguments, validate_args=True).log_prob(value)
    assert family(*arguments, validate_args=False).log_prob(value).isnan()


# --- map_tensors and without_validation ---


def nested():
    """Distributions that hold others, one of each kind."""
    normal = dist.Normal(torch.zeros(3), torch.ones(3))
    mixed = dist.MixtureSameFamily(dist.Categorical(torch.ones(3)), normal)
    affine = transforms.AffineTransform(torch.tensor(1.0), torch.tensor(2.0))
    transformed = dist.TransformedDistribution(
        dist.Normal(torch.tensor(0.0), torch.tensor(1.0)), [affine, transforms.ExpTransform()]
    )
    return {
        "event": normal.to_event(1),
        "mixture": mixed,
        "transformed": transformed,
        "blundell": ScaleMixtureNormal(0.5, 1.0, 0.1).expand([2]).to_event(1),
        "masked": dist.Gamma(torch.tensor(2.0), torch.tensor(3.0)).mask(torch.tensor(True)),
    }


NESTED = sorted(nested())


def to_double(x):
    return x.double() if x.is_floating_point() else x


@pytest.mark.parametrize("kind", NESTED)
def test_every_tensor_inside_is_mapped_in_a_copy(kind):
    original = nested()[kind]
    value = original.sample()
    before = original.log_prob(value)
    moved = map_tensors(original, to_double)
    assert type(moved) is type(original) and moved is not original
    assert moved.sample().dtype == moved.log_prob(value.double()).dtype == torch.float64
    torch.testing.assert_close(moved.log_prob(value.double()).float(), before)
    assert original.sample().dtype == torch.float32
    assert torch.equal(original.log_prob(value), before)
    meta = map_tensors(without_validation(original), lambda x: x.to("meta"))
    assert meta.log_prob(value.to("meta")).is_meta


@pytest.mark.parametrize("kind", NESTED)
def test_a_copy_without_validation_runs_in_vmap_and_leaves_the_original(kind):
    original = nested()[kind]
    strict = original._validate_args
    quiet, values = without_validation(original), original.sample((4,))
    loop = torch.stack([original.log_prob(value) for value in values])
    torch.testing.assert_close(torch.vmap(quiet.log_prob)(values), loop)
    assert not quiet._validate_args
    assert original._validate_args == strict


class Tempered(ScaleMixtureNormal):
    """A mixture with another log-density."""

    def log_prob(self, value):
        return 0.1 * super().log_prob(value)


class Shifted(SoftplusNormal):
    """A Normal with another log-density."""

    def log_prob(self, value):
        return super().log_prob(value) + 1.0


@pytest.mark.parametrize(
    "single",
    [Tempered(0.5, 1.0, 0.1), Shifted(torch.zeros(()), torch.zeros(()))],
    ids=["mixture", "Normal"],
)
def test_an_event_of_a_subclass_sums_its_log_density(single):
    value = torch.randn(2, 3)
    event = single.expand([2, 3]).to_event(2)
    torch.testing.assert_close(event.log_prob(value), single.log_prob(value).sum())


def test_swapped_sigmas_are_warned_of():
    with pytest.warns(UserWarning, match=r"sigma1=0.1 is below sigma2=1.0, but pi=0.25 .* swapped"):
        ScaleMixtureNormal(0.25, 0.1, 1.0)
    ScaleMixtureNormal(0.5, 0.1, 1.0)  # the same density either way
