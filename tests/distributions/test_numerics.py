# SPDX-License-Identifier: Apache-2.0
"""Extreme but legal numbers in float32, float64 and bfloat16, against mpmath or float64.

Ordinary ones are in `test_distributions`, `test_kl`, `test_likelihoods` and `test_metrics`. What is
allowed is in units of the dtype's rounding: a few times that of the largest term of a sum.
"""

import math

import mpmath
import numpy as np
import pyro.distributions as dist
import pytest
import torch
from torch.autograd import grad
from torch.distributions import kl_divergence

import pyro_bbb as bbb
from pyro_bbb import likelihoods, metrics
from pyro_bbb.distributions import (
    ScaleMixtureNormal,
    SoftplusNormal,
    SummedNormal,
    map_tensors,
    softplus,
)
from pyro_bbb.distributions.observation import (
    Normal,
)
from pyro_bbb.guides._mean_field import reparameterize
from pyro_bbb.prediction import ClassificationPrediction, RegressionPrediction

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: str(x)[6:])


@pytest.fixture(autouse=True)
def fifty_digits():
    with mpmath.workdps(50):
        yield


def tensors(*numbers, dtype, **options):
    return [torch.tensor(number, dtype=dtype, **options) for number in numbers]


def units(actual, expected, scale, dtype):
    """Errors over the rounding of numbers of size ``scale``."""
    actual, expected, scale = (np.asarray(x, dtype=np.float64) for x in (actual, expected, scale))
    return np.abs(actual - expected) / (scale * torch.finfo(dtype).eps)


# --- the scale mixture ---

PIS = [1e-30, 1e-7, 0.5, 1 - 2**-8]
RATIOS = [1.0, 10.0, 1e3, 1e6, 1e10, 1e15]


def exact_mixture(w, pi, sigma1, sigma2):
    """Log-density, its derivatives in all four arguments, and the sizes of their largest terms."""
    w, pi, *sigmas = map(mpmath.mpf, (w, pi, sigma1, sigma2))
    weights = pi, 1 - pi
    normals = [mpmath.npdf(w / s) / s for s in sigmas]
    total = mpmath.fsum(p * n for p, n in zip(weights, normals, strict=True))
    shares = [p * n / total for p, n in zip(weights, normals, strict=True)]
    squares = [(w / s) ** 2 for s in sigmas]
    score = -mpmath.fsum(r * w / s**2 for r, s in zip(shares, sigmas, strict=True))
    in_sigma = [r * (q - 1) / s for r, q, s in zip(shares, squares, sigmas, strict=True)]
    values = mpmath.log(total), score, (normals[0] - normals[1]) / total, *in_sigma
    sizes = [max(abs(values[0]), 1), abs(score), sum(normals) / total]
    sizes += [(q + 1) / s for q, s in zip(squares, sigmas, strict=True)]
    return [float(x) for x in values], [float(x) for x in sizes]


def extreme_weights(sigma1, sigma2, dtype):
    """0, both signs from 1e-30 to 1e6, and where the components cross."""
    size = torch.logspace(-30, 6, 19, dtype=torch.float64)
    cross = torch.logspace(-1, 1.5, 13, dtype=torch.float64)
    sizes = [torch.zeros(1), -size, size, cross * min(sigma1, sigma2), cross * max(sigma1, sigma2)]
    return torch.cat([x.double() for x in sizes]).to(dtype)


@every_dtype
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("swapped", [False, True])
def test_the_mixture_and_its_derivatives_are_right_to_rounding(ratio, swapped, dtype):
    for pi in PIS if dtype != torch.bfloat16 else PIS[1:3]:
        numbers = (pi, 1.0, 1 / ratio) if not swapped else (pi, 1 / ratio, 1.0)
        parameters = tensors(*numbers, dtype=dtype, requires_grad=True)
        w = extreme_weights(*numbers[1:], dtype).requires_grad_()
        log_prob = ScaleMixtureNormal(*(p.expand(len(w)) for p in parameters)).log_prob(w)
        # one derivative for each weight: those of parameters by copies of them
        copies = [p.detach().expand(len(w)).clone().requires_grad_() for p in parameters]
        by_copy = grad(ScaleMixtureNormal(*copies).log_prob(w).sum(), [w, *copies])
        rounded = [p.item() for p in parameters]
        exact, sizes = zip(*(exact_mixture(x, *rounded) for x in w.tolist()), strict=True)
        exact, sizes = np.array(exact).T, np.array(sizes).T
        representable = np.abs(exact) < torch.finfo(dtype).max
        fixed = ScaleMixtureNormal(*(p.detach() for p in parameters))
        (in_place,) = grad(fixed.log_prob(w).sum(), w)
        # exponents are differences of numbers of about |ln pi| + |ln ratio|
        allowed = 8 + 4 * abs(math.log(pi)) + 4 * math.log(ratio)
        values = [log_prob, *by_copy]
        for k, value in enumerate(values):
            ok, value = representable[k], value.detach().double().numpy()
            assert units(value[ok], exact[k, ok], sizes[k, ok] + 1e-300, dtype).max() <= allowed, k
        ok = representable[1]
        error = units(in_place[ok].double(), exact[1, ok], sizes[1, ok] + 1e-300, dtype)
        assert error.max() <= allowed


@every_dtype
def test_the_summed_mixture_is_finite_and_right_at_extremes(dtype):
    for ratio in RATIOS:
        w = extreme_weights(1.0, 1 / ratio, dtype)
        w = w[w.abs() < 1e3].requires_grad_()
        parameters = tensors(0.3, 1.0, 1 / ratio, dtype=dtype, requires_grad=True)
        mixture = ScaleMixtureNormal(*parameters).expand(w.shape)
        total = mixture.to_event(1).log_prob(w)
        gradients = grad(total, [w, *parameters], retain_graph=True)
        elementwise = grad(mixture.log_prob(w).sum(), [w, *parameters])
        exact = [exact_mixture(x, *(p.item() for p in parameters))[0][0] for x in w.tolist()]
        assert units(total.item(), sum(exact), np.abs(exact).sum(), dtype) <= 4
        for gradient, expected in zip(gradients, elementwise, strict=True):
            assert gradient.isfinite().all() and torch.equal(gradient, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_components_too_far_apart_for_the_dtype_are_refused(dtype):
    sigmas = tensors(1.0, 1e-20, dtype=dtype)
    for pair in (sigmas, sigmas[::-1]):
        with pytest.raises(ValueError, match="sigma1 / sigma2 must be within a factor of 2e\\+19"):
            ScaleMixtureNormal(0.5, *pair)


@every_dtype
def test_the_distribution_function_of_the_mixture_keeps_its_lower_tail(dtype):
    pi, sigma1, sigma2 = parameters = tensors(0.25, 1.0, 2**-6, dtype=dtype)
    w = torch.tensor([-12, -9, -5, -1, -0.05, -1e-30, 0, 1e-30, 0.05, 3, 1e6], dtype=dtype)
    actual = ScaleMixtureNormal(*parameters).cdf(w)

    def exact(x):
        first, second = (mpmath.ncdf(mpmath.mpf(x) / s.item()) for s in (sigma1, sigma2))
        return float(pi.item() * first + (1 - pi.item()) * second)

    expected = np.array([exact(x) for x in w.tolist()])
    # of e^(-z^2/2) it is the exponent that is rounded
    size = expected * (4 + w.clamp(-13, 0).square().double().numpy())
    assert units(actual.double(), expected, size, dtype).max() <= 1


# --- the posterior's Normal, rho from -40 to 40 ---


def over_rho(dtype):
    rho = torch.linspace(-40, 40, 321, dtype=torch.float64).to(dtype)
    loc = torch.linspace(-3, 3, 321, dtype=torch.float64).to(dtype)
    return loc.requires_grad_(), rho.requires_grad_()


def exact_scales(rho):
    return np.array([float(mpmath.log1p(mpmath.exp(x))) for x in rho.tolist()])


@every_dtype
def test_a_draw_and_its_density_are_right_for_every_rho(dtype):
    loc, rho = over_rho(dtype)
    noise = torch.randn(321, dtype=dtype)
    value, _, log_q = reparameterize(loc, rho, noise)
    noise, sigma = noise.double().numpy(), exact_scales(rho)
    drawn = loc.detach().double().numpy() + sigma * noise
    assert units(value.detach().double(), drawn, np.abs(drawn) + sigma, dtype).max() <= 4
    exact = -(noise**2) / 2 - np.log(sigma) - math.log(2 * math.pi) / 2
    assert units(log_q.item(), exact.sum(), np.abs(exact).sum(), dtype) <= 2
    in_loc, in_rho = grad(log_q + value.sum(), (loc, rho))
    slope = np.array([float(1 / (1 + mpmath.exp(-x))) for x in rho.tolist()])  # of the softplus
    exact = slope * (noise - 1 / sigma)
    size = slope * (np.abs(noise) + 1 / sigma)
    assert units(in_rho.double(), exact, size, dtype).max() <= 8
    assert torch.equal(in_loc, torch.ones_like(in_loc))


@every_dtype
def test_the_density_at_another_value_is_right_for_every_rho(dtype):
    loc, rho = over_rho(dtype)
    loc = torch.zeros_like(loc).requires_grad_()
    sigma = exact_scales(rho)
    value = torch.as_tensor(sigma * np.linspace(-30, 30, 321)).to(dtype)
    z = value.double().numpy() / sigma
    exact = -(z**2) / 2 - np.log(sigma) - math.log(2 * math.pi) / 2
    q = SoftplusNormal(loc, rho)
    log_prob = q.log_prob(value)
    assert units(log_prob.detach().double(), exact, np.abs(exact) + 1 + z**2, dtype).max() <= 4
    total = q.to_event(1).log_prob(value)
    assert units(total.item(), exact.sum(), np.abs(exact).sum(), dtype) <= 4
    for objective in (log_prob.sum(), total):
        in_loc, in_rho = grad(objective, (loc, rho), retain_graph=True)
        assert units(in_loc.double(), z / sigma, (np.abs(z) + 1) / sigma, dtype).max() <= 8
        slope = np.array([float(1 / (1 + mpmath.exp(-x))) for x in rho.tolist()]) / sigma
        assert units(in_rho.double(), slope * (z**2 - 1), slope * (z**2 + 1), dtype).max() <= 16


# --- divergences ---

PRIORS = {"normal": dist.Normal, "summed": SummedNormal, "laplace": dist.Laplace}


def exact_kl(kind, d, scale, b):
    """The divergence and its derivatives in d = loc - prior's loc and in the scale."""
    d, scale, b = map(mpmath.mpf, (d, scale, b))
    if kind == "laplace":
        r = d / scale
        peak = mpmath.sqrt(2 / mpmath.pi) * mpmath.exp(-(r**2) / 2)
        side = mpmath.erf(r / mpmath.sqrt(2))
        first = (scale * peak + d * side) / b
        entropy = mpmath.log(2 * mpmath.pi * mpmath.e * scale**2) / 2
        terms = first, mpmath.log(2 * b), entropy
        return terms[0] + terms[1] - terms[2], side / b, peak / b - 1 / scale, terms
    terms = (scale**2 + d**2) / (2 * b**2), mpmath.log(b / scale), mpmath.mpf("0.5")
    return sum(terms[:2]) - terms[2], d / b**2, scale / b**2 - 1 / scale, terms


@every_dtype
@pytest.mark.parametrize("b", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("kind", PRIORS)
def test_a_divergence_and_its_derivatives_are_right_for_every_rho(kind, b, dtype):
    loc, rho = over_rho(dtype)
    shape = loc.shape
    q = SoftplusNormal(loc, rho)
    p = PRIORS[kind](*tensors(0.0, b, dtype=dtype)).expand(shape)
    kl = kl_divergence(q, p)
    total = kl_divergence(q.to_event(1), p.to_event(1))
    scales = exact_scales(rho)
    rounded = p.scale[0].item()
    pairs = zip(loc.tolist(), scales, strict=True)
    exact, in_d, in_scale, terms = zip(
        *(exact_kl(kind, d, s, rounded) for d, s in pairs), strict=True
    )
    exact, in_d, in_scale = (np.array([float(x) for x in y]) for y in (exact, in_d, in_scale))
    size = np.array([float(sum(map(abs, t))) for t in terms])
    assert units(kl.detach().double(), exact, size, dtype).max() <= 8
    assert units(total.item(), exact.sum(), size.sum(), dtype) <= 4
    slope = np.array([float(1 / (1 + mpmath.exp(-x))) for x in rho.tolist()])
    for objective in (kl.sum(), total):
        of_loc, of_rho = grad(objective, (loc, rho), retain_graph=True)
        size = np.abs(in_d) + 1e-3 / rounded
        assert units(of_loc.double(), in_d, size, dtype).max() <= 8
        size = slope * (np.abs(in_scale) + 1 / scales)
        assert units(of_rho.double(), slope * in_scale, size, dtype).max() <= 16


# --- sums over very many weights ---


def summed_in_double(function, *rows):
    """Adds up a function of equal parts of tensors, each in float64."""
    chunks = zip(*(x.flatten().split(10**6) for x in rows), strict=True)
    return math.fsum(function(*(x.double() for x in chunk)).sum().item() for chunk in chunks)


@pytest.mark.parametrize("number", [10**6, pytest.param(10**7, marks=pytest.mark.slow)])
def test_sums_over_many_weights_are_those_of_float64(number):
    loc, rho = torch.randn(2, 1000, number // 1000) * torch.tensor([0.1, 1.0])[:, None, None]
    rho -= 5
    mixture = ScaleMixtureNormal(0.25, 1.0, math.exp(-6))
    double = map_tensors(mixture, torch.Tensor.double)
    scale = torch.tensor(0.3)
    normal, laplace = SummedNormal(torch.tensor(0.0), scale), dist.Laplace(torch.tensor(0.0), scale)
    with torch.no_grad():
        noise = torch.randn_like(loc)
        w, _, log_density = reparameterize(loc.flatten(), rho.flatten(), noise.flatten())
        w, q = w.view_as(loc), SoftplusNormal(loc, rho).to_event()

        def log_q(noise, rho):
            return -0.5 * noise.square() - softplus(rho).log() - 0.5 * math.log(2 * math.pi)

        results = {
            "log q": (log_density, summed_in_double(log_q, noise, rho)),
            "mixture": (
                mixture.expand(w.shape).to_event().log_prob(w),
                summed_in_double(double.log_prob, w),
            ),
            "normal": (
                normal.expand(w.shape).to_event().log_prob(w),
                summed_in_double(dist.Normal(0.0, scale.double()).log_prob, w),
            ),
        }
        for name, prior in {"kl to normal": normal, "kl to laplace": laplace}.items():
            exact = map_tensors(prior, torch.Tensor.double)
            results[name] = (
                kl_divergence(q, prior.expand(w.shape).to_event(2)),
                summed_in_double(
                    lambda loc, rho, p=exact: kl_divergence(SoftplusNormal(loc, rho), p), loc, rho
                ),
            )
    for name, (value, expected) in results.items():
        assert value.dtype == torch.float32
        # the promise is 1e-5
        assert value.item() == pytest.approx(expected, rel=1e-6), name


# --- likelihoods ---


def scored(likelihood, outputs, y):
    log_prob = likelihood(outputs).log_prob(likelihood.prepare(y, outputs))
    return log_prob, grad(log_prob.sum(), outputs)[0]


@every_dtype
def test_classes_with_large_logits_keep_their_digits(dtype):
    outputs = torch.tensor(
        [
            [1e4, 1e4 - 1, -1e4],
            [1e4 - 0.5, 1e4, 0],
            [-1e4, 2 - 1e4, -9999],
            [0, 0, 1e-3],
            [1, 0, 9],
        ],
        dtype=dtype,
    ).requires_grad_()
    y = torch.tensor([0, 1, 2, 0, 1])
    exact = outputs.detach().double().requires_grad_()
    expected = torch.log_softmax(exact, -1).gather(1, y[:, None]).squeeze(1)
    log_prob, gradient = scored(likelihoods.Categorical(), outputs, y)
    size = expected.detach().abs() + 1
    assert units(log_prob.detach().double(), expected.detach(), size, dtype).max() <= 2
    (expected,) = grad(expected.sum(), exact)
    assert units(gradient.double(), expected, 1, dtype).max() <= 2
    # only the shape changes
    expanded = likelihoods.Categorical()(outputs).expand([2, 5])
    assert torch.equal(expanded.log_prob(y), log_prob.expand(2, 5))


@every_dtype
def test_yes_or_no_with_large_logits(dtype):
    logits = [1e4, 120, 88, 50, 1, 1e-3, 0, -1e-3, -1, -50, -88, -120, -1e4]
    outputs = torch.tensor(logits, dtype=dtype)[:, None].requires_grad_()
    for y in (0.0, 1.0):
        target = torch.full((len(logits), 1), y)
        log_prob, gradient = scored(likelihoods.Bernoulli(), outputs, target)
        signed = [mpmath.mpf(x) * (1 - 2 * y) for x in outputs.flatten().tolist()]
        exact = np.array([float(-mpmath.log1p(mpmath.exp(x))) for x in signed])
        assert units(log_prob.detach().double(), exact, np.abs(exact) + 1, dtype).max() <= 2
        exact = np.array([float((2 * y - 1) / (1 + mpmath.exp(-x))) for x in signed])
        assert units(gradient.flatten().double(), exact, 1, dtype).max() <= 2


@every_dtype
def test_counts_and_rates_large_and_small(dtype):
    count = [0.0, 1.0, 3.0, 0.0, 150.0, 1010.0, 1e6, 1e7, 0.0, 7.0]
    log_rate = [-1000.0, -80.0, -300.0, -20.0, 5.0, 6.9, 13.8125, 16.125, 60.0, 60.0]
    outputs = torch.tensor(log_rate, dtype=dtype)[:, None].requires_grad_()
    y = torch.tensor(count)[:, None]
    log_prob, gradient = scored(likelihoods.Poisson(), outputs, y)
    pairs = zip(y.to(dtype).flatten().tolist(), outputs.flatten().tolist(), strict=True)
    pairs = [(mpmath.mpf(n), mpmath.mpf(x)) for n, x in pairs]
    exact = np.array([float(n * x - mpmath.exp(x) - mpmath.loggamma(n + 1)) for n, x in pairs])
    inside = 1e-13 * np.array([float(n * abs(x) + mpmath.exp(x)) for n, x in pairs])  # of float64
    error = np.abs(log_prob.detach().double().numpy() - exact)
    assert (error <= torch.finfo(dtype).eps * np.abs(exact) + inside).all()
    exact = np.array([float(n - mpmath.exp(x)) for n, x in pairs])
    error = np.abs(gradient.flatten().double().numpy() - exact)
    assert (error <= torch.finfo(dtype).eps * np.abs(exact) + inside).all()


@every_dtype
@pytest.mark.parametrize("df", [0.125, 1.0, 30.0, 2.0**14, 2.0**20, 2.0**26])
def test_heavy_tails_far_out_and_almost_normal_ones(df, dtype):
    z = torch.tensor([0.0, 0.5, -3.0, 1e3, 1e10, -1e20, 1e30], dtype=dtype)[
        :, None
    ].requires_grad_()
    log_prob, gradient = scored(likelihoods.StudentT(df, 2.0), z, torch.zeros(7, 1))
    f, values = mpmath.mpf(df), [mpmath.mpf(x) / 2 for x in z.flatten().tolist()]
    constant = mpmath.loggamma((f + 1) / 2) - mpmath.loggamma(f / 2)
    constant -= mpmath.log(f * mpmath.pi) / 2 + mpmath.log(2)
    exact = np.array([float(constant - (f + 1) / 2 * mpmath.log1p(x**2 / f)) for x in values])
    inside = 1e-15 * df * math.log(df + 2)  # of float64
    error = np.abs(log_prob.detach().double().numpy() - exact)
    assert (error <= 2 * torch.finfo(dtype).eps * (np.abs(exact) + 1) + inside).all()
    exact = np.array([float(-(f + 1) * x / (f + x**2) / 2) for x in values])
    assert units(gradient.flatten().double(), exact, np.abs(exact) + 1e-300, dtype).max() <= 4


@every_dtype
@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1.0, 1e10, 1e30])
def test_noise_of_every_size(scale, dtype):
    (scale,) = tensors(scale, dtype=dtype)
    z = torch.tensor([0.0, 1e-3, 1.0, -3.0, 37.0], dtype=dtype)[:, None]
    outputs = (z * scale).requires_grad_()
    log_prob, gradient = scored(likelihoods.Gaussian(scale), outputs, torch.zeros(5, 1))
    exact_z = outputs.detach().double().flatten().numpy() / scale.item()
    log_scale = math.log(scale.item())
    exact = -(exact_z**2) / 2 - log_scale - math.log(2 * math.pi) / 2
    size = np.abs(exact) + abs(log_scale) + 1
    assert units(log_prob.detach().double(), exact, size, dtype).max() <= 4
    if 1e-20 < scale < 1e20:  # its derivative is representable
        in_z = gradient.flatten().double() * scale.double()
        assert units(in_z, -exact_z, np.abs(exact_z) + 1, dtype).max() <= 4


@every_dtype
def test_noise_that_depends_on_the_input_for_raw_scales_of_every_size(dtype):
    raw = torch.tensor([-40.0, -20.0, -1.0, 0.0, 3.0, 20.0, 40.0, 1e4], dtype=dtype)
    outputs = torch.stack([torch.zeros_like(raw), raw], 1).requires_grad_()
    scales = exact_scales(raw)
    y = torch.as_tensor(1.5 * scales).to(dtype)[:, None]
    log_prob, gradient = scored(likelihoods.HeteroscedasticGaussian(), outputs, y)
    z = y.flatten().double().numpy() / scales
    exact = -(z**2) / 2 - np.log(scales) - math.log(2 * math.pi) / 2
    size = np.abs(exact) + np.abs(np.log(scales)) + 1
    assert units(log_prob.detach().double(), exact, size, dtype).max() <= 4
    assert units(gradient[:, 0].double(), z / scales, z / scales, dtype).max() <= 4
    slope = np.array([float(1 / (1 + mpmath.exp(-x))) for x in raw.tolist()]) / scales
    assert units(gradient[:, 1].double(), slope * (z**2 - 1), slope * z**2, dtype).max() <= 8


# --- summaries of predictions ---


def exact_summary(log_probs):
    """Entropy, its two parts and the log-probabilities of the mean, in float64."""
    x = log_probs.double()
    mean = x.logsumexp(0) - math.log(len(x))
    entropy = -(mean.exp() * mean).nan_to_num(0.0).sum(-1)
    aleatoric = -(x.exp() * x).nan_to_num(0.0).sum(-1).mean(0)
    epistemic = (x.exp() * (x - mean)).nan_to_num(0.0).sum(-1).mean(0)
    return entropy, aleatoric, epistemic, mean


def from_1_to_below_1e_40(draws, dtype):
    """Probabilities of 10 inputs and 6 classes from almost 1 down to 1e-80, and 0."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(-4, 2, 10, dtype=torch.float64)[:, None]
    logits = spread * torch.randn(draws, 10, 6, generator=generator, dtype=torch.float64)
    logits[:, 0] = torch.tensor([0.0, -92.0, -120.0, -180.0, -math.inf, -5.0])  # 1e-40, ..., 0
    return torch.log_softmax(logits, -1).to(dtype)


@every_dtype
@pytest.mark.parametrize("draws", [1, 7, 300])
def test_the_parts_of_the_entropy_are_right_for_minute_probabilities(draws, dtype):
    log_probs = from_1_to_below_1e_40(draws, dtype)
    prediction = ClassificationPrediction(log_probs)
    names = "entropy", "aleatoric", "epistemic", "log_probs"
    for name, expected in zip(names, exact_summary(log_probs), strict=True):
        value = getattr(prediction, name)
        assert value.dtype == dtype and not value.isnan().any()
        finite = expected.isfinite()
        assert torch.equal(finite, value.isfinite())
        # of a class in between it is the logarithm, at most that of the draws in number, that is
        # rounded
        size = expected.abs().clamp(min=1 + math.log(draws))
        assert units(value[finite].double(), expected[finite], size[finite], dtype).max() <= 4, name
    total = prediction.aleatoric.double() + prediction.epistemic.double()
    allowed = 8 * torch.finfo(dtype).eps * (1 + math.log(draws))
    assert (prediction.entropy.double() - total).abs().max() <= allowed
    assert prediction.epistemic.min() >= -allowed


@every_dtype
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_summaries_of_a_regression_follow_its_unit(scale, dtype):
    loc, (unit,) = torch.linspace(-2, 2, 8, dtype=dtype), tensors(scale, dtype=dtype)
    components = Normal((loc * unit)[:, None, None], unit.expand(8, 1, 1))
    prediction = RegressionPrediction(components)
    exact = map_tensors(components, torch.Tensor.double)
    centres, width = exact.loc.flatten() / unit.double(), 1.0
    allowed = 4 * torch.finfo(dtype).eps
    for actual, expected in (
        (prediction.epistemic_std, centres.std(correction=0)),
        (prediction.aleatoric_std, width),
        (prediction.std, math.hypot(1, centres.std(correction=0))),
    ):
        assert (actual / unit).item() == pytest.approx(float(expected), rel=allowed)
    for level in (1e-3, 0.5, 0.95, 1 - 1e-9):
        for end in prediction.interval(level):
            tail = (1 - level) / 2
            z = (end / unit).double().item() - centres.numpy()
            below = min(float(np.mean([mpmath.ncdf(x) for x in z])), 1.0)
            above = float(np.mean([mpmath.ncdf(-x) for x in z]))
            density = float(np.mean([mpmath.npdf(x) for x in z]))
            rounding = density * 8 * allowed * abs(float(end / unit)) + 1e-15
            assert min(abs(below - tail), abs(above - tail)) <= rounding + 1e-3 * tail * (
                tail < 1e-6
            )


@every_dtype
def test_the_log_density_of_a_mixture_of_draws_far_apart(dtype):
    loc = torch.tensor([0.0, 1e3, -1e6], dtype=dtype)[:, None, None]
    prediction = RegressionPrediction(Normal(loc, torch.ones_like(loc)))
    for y in (0.5, 1e3, -1e6, 40.0):
        (target,) = tensors([[y]], dtype=dtype)
        densities = [mpmath.npdf(mpmath.mpf(target.item()) - x) for x in loc.flatten().tolist()]
        exact = float(mpmath.log(mpmath.fsum(densities) / 3))
        assert units(prediction.log_prob(target).item(), exact, abs(exact) + 1, dtype) <= 4


# --- metrics and schedules ---


def test_metrics_keep_probabilities_at_the_ends_of_their_range():
    probs = torch.tensor([[1.0, 1e-40], [1e-300, 1.0], [0.5, 0.5]], dtype=torch.float64)
    expected = -(math.log(1e-40) + math.log(1e-300) + math.log(0.5)) / 3
    assert metrics.nll(probs, torch.tensor([1, 0, 0])) == pytest.approx(expected, rel=1e-14)
    assert metrics.nll(probs, torch.tensor([0, 1, 1])) == pytest.approx(math.log(2) / 3, rel=1e-14)
    far = torch.tensor([1e200, 3e300], dtype=torch.float64)
    assert metrics.auroc(far, -far) == 1.0 and metrics.auroc(far * 1e-200, far) == 0.0
    tiny = torch.tensor([1e-30, -1e-30])
    assert metrics.rmse(tiny, torch.zeros(2)) == pytest.approx(1e-30, rel=1e-6)
    assert metrics.rmse(tiny.double() * 1e60, torch.zeros(2)) == pytest.approx(1e30, rel=1e-6)


@pytest.mark.parametrize("num_batches", [1, 2, 10, 60, 1074, 100_000])
def test_blundell_weights_are_exact_for_very_many_batches(num_batches):
    schedule = bbb.KLSchedule("blundell")
    where = {"num_batches": num_batches, "batch_size": 1, "num_data": num_batches}
    weights = [schedule.weight(batch=i, **where) for i in range(1, num_batches + 1)]
    assert math.fsum(weights) == pytest.approx(1.0, rel=1e-15) and min(weights) >= 0
    with mpmath.workdps(40):
        last = mpmath.mpf(2) ** num_batches - 1
        for i in {1, 2, min(num_batches, 53), min(num_batches, 1000)} & {*range(num_batches + 1)}:
            exact = float(mpmath.mpf(2) ** (num_batches - i) / last)
            assert weights[i - 1] == pytest.approx(exact, rel=4e-16)


# --- all of it in low precision ---

KINDS = {
    "classes": (likelihoods.Categorical, 3),
    "yes or no": (likelihoods.Bernoulli, 1),
    "known noise": (lambda: likelihoods.Gaussian(0.5), 1),
    "noise by input": (likelihoods.HeteroscedasticGaussian, 2),
    "counts": (likelihoods.Poisson, 1),
    "varied counts": (likelihoods.NegativeBinomial, 1),
    "heavy tails": (lambda: likelihoods.StudentT(4.0), 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_in_bfloat16_trains_in_it_and_predicts_in_single_precision(kind):
    make, outputs = KINDS[kind]
    x = torch.randn(20, 4)
    y = (x[:, :1] > 0).long() if kind != "classes" else torch.randint(0, 3, (20,))
    network = bbb.BayesianMLP([4, 8, outputs])
    model = bbb.BayesianModel(network, make(), num_data=20).bfloat16()
    guide = bbb.AutoSoftplusNormal(model)
    assert {parameter.dtype for parameter in guide.parameters()} == {torch.bfloat16}
    targets = y.bfloat16() if kind in ("known noise", "noise by input", "heavy tails") else y
    history = bbb.fit(model, guide, (x.bfloat16(), targets), epochs=2, progress=False, seed=0)
    assert all(math.isfinite(loss) for loss in history.loss)
    draws = guide.sample_posterior(10)
    low = bbb.predict(model, draws, x.bfloat16())
    draws = {name: value.float() for name, value in draws.items()}
    high = bbb.predict(model.float(), draws, x.bfloat16().float())
    for name in ("probs", "entropy", "mean", "std"):
        if hasattr(low, name):
            actual, expected = getattr(low, name), getattr(high, name)
            assert actual.dtype == torch.float32
            torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)
