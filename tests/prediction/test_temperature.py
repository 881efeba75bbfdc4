# SPDX-License-Identifier: Apache-2.0
"""Temperature scaling: known temperatures recovered, and the laws of the scaled predictive."""

import math

import pytest
import torch

import pyro_bbb as bbb
from pyro_bbb.distributions import observation as families
from pyro_bbb.prediction import ClassificationPrediction, RegressionPrediction
from tests._support.forged import rewrite

SIGMAS = 5  # two-sided false-alarm rate of each Monte Carlo comparison: 6e-7
S, N = 5, 4000

pytestmark = pytest.mark.usefixtures("double")


def classes(logits):
    return ClassificationPrediction(logits.log_softmax(-1))


def tempered(logits, temperature):
    """Mean probabilities of draws ``[n, S, C]`` at a temperature."""
    powers = logits.softmax(-1).mean(1) ** (1 / temperature)
    return powers / powers.sum(-1, keepdim=True)


def sample_classes(temperature, spread=1.0):
    """Logits of S draws ``[n, S, C]``, and labels of their mean at a temperature."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(N, 1, 4, generator=generator)
    logits = logits + spread * torch.randn(N, S, 4, generator=generator)
    return logits, tempered(logits, temperature).multinomial(1, generator=generator)[:, 0]


def predict_classes(logits):
    return classes(logits.transpose(0, 1))


def predict_reals(loc):
    """A mixture of Normals at ``loc [n, S, d]``, or of Student's t for more than one target."""
    loc = loc.transpose(0, 1)
    if loc.shape[-1] == 1:
        return RegressionPrediction(families.Normal(loc, 0.5))
    return RegressionPrediction(families.StudentT(4.0, loc, 0.5))


def sample_reals(temperature, d):
    """Locations of S draws, and targets of their mixture stretched around its mean."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)  # for Student's t
    loc = 3 + torch.randn(N, 1, d, generator=generator) + torch.randn(N, S, d, generator=generator)
    component = predict_reals(loc).components.sample()[torch.randint(S, (N,)), torch.arange(N)]
    return loc, loc.mean(1) + temperature * (component - loc.mean(1))


CASES = {
    "classes": (predict_classes, lambda t: sample_classes(t)),
    "classes of one draw": (predict_classes, lambda t: sample_classes(t, spread=0.0)),
    "normal": (predict_reals, lambda t: sample_reals(t, 1)),
    "student": (predict_reals, lambda t: sample_reals(t, 2)),
}


def neg_log_likelihood(kind, x, y, temperature):
    """The equation of the module, without the library."""
    t = torch.as_tensor(temperature)
    if kind.startswith("classes"):
        return -tempered(x, t)[torch.arange(N), y].log().mean()
    mean = x.mean(1)
    z = (mean + (y - mean) / t)[:, None]  # [n, 1, d]
    torch_family = torch.distributions.Normal(x, 0.5)
    if kind == "student":
        torch_family = torch.distributions.StudentT(4.0, x, 0.5)
    density = torch_family.log_prob(z).sum(-1).exp().mean(1)
    return y.shape[1] * t.log() - density.log().mean()


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("temperature", [0.4, 3.0])
def test_a_known_temperature_is_recovered(kind, temperature):
    predict_fn, sample = CASES[kind]
    x, y = sample(temperature)
    fitted = bbb.temperature_scaling(predict_fn, (x, y)).temperature
    log_t = torch.tensor(math.log(fitted), requires_grad=True)
    loss = neg_log_likelihood(kind, x, y, log_t.exp())
    (slope,) = torch.autograd.grad(loss, log_t, create_graph=True)
    (curvature,) = torch.autograd.grad(slope, log_t)
    assert abs(slope) < 1e-6 * curvature  # where T is best to six digits
    error = 1 / (N * curvature.item()) ** 0.5  # the inverse Fisher information
    assert math.log(fitted) == pytest.approx(math.log(temperature), abs=SIGMAS * error)
    losses = [neg_log_likelihood(kind, x, y, fitted * factor) for factor in (0.5, 0.9, 1.1, 2.0)]
    assert loss < min(losses) and loss <= neg_log_likelihood(kind, x, y, 1.0)


def test_the_factor_of_a_single_normal_has_a_closed_form():
    y = torch.randn(50, 2)
    plain = RegressionPrediction(families.Normal(torch.tensor([1.0, -2.0]).expand(1, 50, 2), 0.1))
    factor = bbb.temperature_scaling(lambda x: plain, (y, y)).temperature
    residuals = (y - torch.tensor([1.0, -2.0])) / 0.1
    assert factor == pytest.approx(residuals.square().mean().sqrt().item(), rel=1e-6)


# --- the scaled predictive ---


@pytest.mark.parametrize("temperature", [0.1, 1.0, 50.0])
def test_scaled_classes(temperature):
    logits, y = sample_classes(1.0)
    plain = predict_classes(logits)
    scaled = bbb.TemperatureScaled(predict_classes, temperature)(logits)
    torch.testing.assert_close(scaled.probs, tempered(logits, temperature))
    torch.testing.assert_close(scaled.sample_probs.sum(-1), torch.ones(S, N))
    assert torch.equal(scaled.label, plain.label)
    torch.testing.assert_close(scaled.entropy, scaled.aleatoric + scaled.epistemic)
    # draws pass a common channel, which adds no information
    assert (scaled.epistemic <= plain.epistemic + 1e-12).all()
    assert scaled.epistemic.mean() > 0.01 * plain.epistemic.mean()
    if temperature == 1:
        torch.testing.assert_close(scaled.sample_log_probs, plain.sample_log_probs)


def test_each_draw_moves_what_classes_lose():
    probs = torch.tensor([[[0.6, 0.3, 0.1]], [[0.2, 0.7, 0.1]], [[0.4, 0.2, 0.4]]])
    plain = ClassificationPrediction(probs.log())
    scaled = bbb.TemperatureScaled(lambda x: plain, 0.5)(None).sample_probs
    old = probs.mean(0)[0]  # 0.4, 0.4, 0.2
    new = old.square() / old.square().sum()  # 4/9, 4/9, 1/9
    lost = probs[..., 2] * (1 - new[2] / old[2])
    torch.testing.assert_close(scaled[..., 2], probs[..., 2] - lost)
    torch.testing.assert_close(scaled[..., :2], probs[..., :2] + 0.5 * lost[..., None])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 30.0])
def test_improbable_classes_keep_their_digits(temperature):
    """The probabilities underflow in single precision."""
    logits = torch.tensor([[[0.0, -90.0, -300.0]], [[-2.0, -70.0, -math.inf]]], dtype=torch.float32)
    plain = classes(logits)
    scaled = bbb.TemperatureScaled(lambda x: plain, temperature)(None)
    expected = (plain.log_probs.double() / temperature).log_softmax(-1).float()
    torch.testing.assert_close(scaled.log_probs, expected, rtol=1e-6, atol=1e-6)
    never = classes(torch.tensor([[[0.0, -math.inf, -1.0]]]))
    probs = bbb.TemperatureScaled(lambda x: never, temperature)(None).sample_probs
    assert probs[0, 0, 1] == 0 and probs.sum() == pytest.approx(1)


@pytest.mark.parametrize("d", [1, 2])
def test_scaled_reals_are_stretched_around_their_mean(d):
    loc, y = sample_reals(1.0, d)
    plain, t = predict_reals(loc), 2.5
    scaled = bbb.TemperatureScaled(predict_reals, t)(loc)
    z = plain.mean + (y - plain.mean) / t
    torch.testing.assert_close(scaled.mean, plain.mean)
    torch.testing.assert_close(scaled.aleatoric_std, t * plain.aleatoric_std)
    torch.testing.assert_close(scaled.epistemic_std, t * plain.epistemic_std)
    torch.testing.assert_close(scaled.cdf(y), plain.cdf(z))
    torch.testing.assert_close(scaled.log_prob(y), plain.log_prob(z) - d * math.log(t))


# --- no best temperature ---


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        ([[2.0, 0.0], [0.0, 1.0]], [0, 1]),  # all right: the best is 0
        ([[2.0, 0.0], [0.0, 1.0]], [1, 0]),  # all wrong: it is infinite
        ([[0.0, 0.0], [0.0, 0.0]], [1, 0]),  # no temperature matters
    ],
)
def test_no_temperature_is_best(logits, labels):
    x, y = torch.tensor(logits)[:, None].expand(-1, 3, -1), torch.tensor(labels)
    with pytest.raises(ValueError, match="data must have a best temperature"):
        bbb.temperature_scaling(predict_classes, (x, y))


def test_predictions_that_have_no_temperature():
    y = torch.tensor([[1.0], [2.0]])
    counts = RegressionPrediction(families.LogRatePoisson(torch.zeros(3, 2, 1)))
    with pytest.raises(TypeError, match="only Normals and Student's t"):
        bbb.temperature_scaling(lambda x: counts, (y, y))
    sure = ClassificationPrediction(torch.tensor([[[1.0, 0.0], [0.5, 0.5]]]).log())
    with pytest.raises(ValueError, match="probability 0"):
        bbb.temperature_scaling(lambda x: sure, (y, torch.tensor([1, 0])))


# --- files ---


def test_saved_and_loaded(tmp_path):
    first = bbb.TemperatureScaled(predict_classes, 1 / 3)
    first.save(tmp_path / "t.json")
    assert bbb.TemperatureScaled.load(tmp_path / "t.json", predict_classes) == first
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


@pytest.mark.parametrize("temperature", [0, math.nan, "hot"])
def test_temperatures_that_are_not_positive_are_errors(temperature, tmp_path):
    path = tmp_path / "t.json"
    bbb.TemperatureScaled(predict_classes, 2.0).save(path)
    rewrite(path, temperature=temperature)
    with pytest.raises(bbb.LoadError, match=r"t.json.*temperature must be|NaN"):
        bbb.TemperatureScaled.load(path, predict_classes)
    with pytest.raises((TypeError, ValueError), match="temperature must be"):
        bbb.TemperatureScaled(predict_classes, temperature)
