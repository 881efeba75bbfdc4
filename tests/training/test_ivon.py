# SPDX-License-Identifier: Apache-2.0
"""IVON: the algorithm written out step by step, conjugate posteriors, and all that `fit` offers."""

import math

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_bbb as bbb
from pyro_bbb.optim import IVON
from pyro_bbb.training._ivon import FlatPosterior

pytestmark = pytest.mark.filterwarnings("ignore::pyro_bbb.UndertrainedWarning")
MIXTURE_OF_ONE = bbb.ScaleMixtureNormal(0.5, 0.5, 0.5)  # N(0, .5²), which IVON cannot know


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def regression(prior, *, num_data=200, inputs=10, noise=0.3):
    """Orthogonal inputs, so that the exact posterior is a mean field; and that posterior."""
    x = torch.linalg.qr(torch.randn(num_data, inputs))[0] * math.sqrt(num_data)
    y = x @ torch.randn(inputs, 1) + noise * torch.randn(num_data, 1)
    network = nn.Sequential(bbb.BayesianLinear(inputs, 1, bias=False, prior=prior))
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(noise), num_data=num_data)
    normal = prior if isinstance(prior, dist.Normal) else dist.Normal(0.0, 0.5)
    precision = num_data / noise**2 + normal.scale**-2
    mean = (x.T @ y / noise**2 + normal.loc / normal.scale**2).flatten() / precision
    return model, bbb.AutoSoftplusNormal(model), (x, y), (mean, precision**-0.5)


def posterior(guide):
    (name,) = guide.site_names
    return guide.loc(name).flatten(), guide.scale(name).flatten()


def fit(model, guide, data, **options):
    return bbb.fit(
        model, guide, data, **{"optimizer": "ivon", "progress": False, "seed": 1} | options
    )


@pytest.mark.parametrize("engine", ["eager", "compiled"])
@pytest.mark.parametrize(("num_particles", "temperature"), [(1, 1.0), (3, 0.4)])
def test_every_step_is_that_of_the_paper(monkeypatch, engine, num_particles, temperature):
    n, batch, noise, h, beta2 = 60, 20, 0.3, 2.0, 0.97
    model, guide, (x, _), _ = regression(dist.Normal(0.0, 0.5), num_data=n, inputs=4)
    y = x.sum(1, keepdim=True).sin()
    batches, draws, draw = [], [], FlatPosterior.draw

    def recorded(self, num_data):
        theta, log_q = draw(self, num_data)
        scale = (self.state["hessian"] * num_data + self.prior_precision).rsqrt()
        draws.append((theta - self.loc).detach() / scale)
        return theta, log_q

    if engine == "eager":  # a captured step calls neither again: it is compared with the eager one
        monkeypatch.setattr(FlatPosterior, "draw", recorded)
        model.network.register_forward_pre_hook(lambda _, args: batches.append(args[0]))
    options = {
        "optimizer": IVON(hess_init=h, beta1=0.8, beta2=beta2),
        "num_particles": num_particles,
        "kl_schedule": bbb.KLSchedule(temperature=temperature),
        "epochs": 20,
        "batch_size": batch,
        "lr": 0.05,
    }
    start = posterior(guide)[0].clone()
    if engine == "compiled":
        twin = bbb.AutoSoftplusNormal(model, init_loc={"network.0.weight": start.view(1, -1)})
        eager = fit(model, twin, (x, y), engine="eager", **options)
        history = fit(model, guide, (x, y), engine=engine, **options)
        torch.testing.assert_close(posterior(guide), posterior(twin), rtol=1e-10, atol=0)
        assert history.steps.loss == pytest.approx(eager.steps.loss, rel=1e-10)
        return
    history = fit(model, guide, (x, y), engine=engine, **options)
    inputs = batches[-60 * num_particles :]  # after checks of the model
    m, hessian, g = start, torch.full((4,), h), torch.zeros(4)
    num = n / temperature
    delta, bounded = 0.5**-2 / num, []
    for t, lr in enumerate(history.steps.lr, start=1):
        gradients, curvatures = [], []
        for i in range((t - 1) * num_particles, t * num_particles):
            sigma = 1 / (num * (hessian + delta)).sqrt()
            theta, rows = m + sigma * draws[i], inputs[i]
            error = rows @ theta - rows.sum(1).sin()
            gradients.append(rows.T @ error / noise**2 / batch)
            curvatures.append(gradients[-1] * (theta - m) / sigma**2)
        g_hat, h_hat = sum(gradients) / num_particles, sum(curvatures) / num_particles
        g = 0.8 * g + 0.2 * g_hat
        retraction = 0.5 * (1 - beta2) ** 2 * (hessian - h_hat) ** 2 / (hessian + delta)
        hessian = beta2 * hessian + (1 - beta2) * h_hat + retraction
        lr *= min(1, t / (0.05 * 60))  # over the first 5 % of the steps
        step = lr * (g / (1 - 0.8**t) + delta * m) / (hessian + delta)
        bounded.append(step.abs() > 0.1 * lr)
        m = m - step.clamp(-0.1 * lr, 0.1 * lr)
    assert 0.05 < torch.stack(bounded).double().mean() < 0.95
    sigma = 1 / (num * (hessian + delta)).sqrt()
    torch.testing.assert_close(posterior(guide), (m, sigma), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("schedule", "factor"),
    [
        ("constant", lambda step: min(1, (step + 1) / 5)),
        ("warmup_cosine", lambda step: min(1, step / 5)),
        (lambda done: min(1, 0.2 + 8 * done), lambda step: min(1, 0.2 + 0.08 * step)),
    ],
)
def test_there_is_one_warm_up_the_schedules_if_it_has_one(schedule, factor):
    """Far from the data each weight moves by the most, a tenth of the rate, in each step."""
    model, guide, (x, _), _ = regression(dist.Normal(0.0, 0.5), num_data=20, inputs=2)
    data, means = (x, x @ torch.full((2, 1), 9.0)), [posterior(guide)[0].clone()]
    record = [lambda end: means.append(posterior(end.guide)[0].clone())]
    fit(model, guide, data, epochs=100, batch_size=20, lr_schedule=schedule, callbacks=record)
    moved = torch.stack(means).diff(dim=0)[:9]  # a step is an epoch
    expected = torch.tensor([0.01 * factor(step) for step in range(9)])
    if schedule == "warmup_cosine":
        expected[5:] *= torch.tensor([(1 + math.cos(math.pi * i / 95)) / 2 for i in range(4)])
    torch.testing.assert_close(moved, expected[:, None].expand(9, 2))


PRIORS = {"elsewhere": dist.Normal(0.7, 0.5), "not a Normal": MIXTURE_OF_ONE}


def distance(guide, exact):
    """How many standard deviations the means are off (root mean square), and ratio of scales."""
    (mean, scale), (exact_mean, exact_scale) = posterior(guide), exact
    off = ((mean - exact_mean) / exact_scale).square().mean().sqrt()
    return off.item(), (scale / exact_scale).mean().item()


@pytest.mark.parametrize("name", PRIORS)
def test_mean_and_scale_reach_the_exact_posterior(name):
    model, guide, data, exact = regression(PRIORS[name], num_data=20, noise=2.0)
    fit(model, guide, data, epochs=600, batch_size=20, num_particles=4)
    off, ratio = distance(guide, exact)
    # the Hessian is a mean over about 600 / 10 steps of four draws, each of relative error about
    # 2: the error of the mean of ten scales is 0.02
    assert off < 0.1
    assert ratio == pytest.approx(1, abs=0.06)


def test_intervals_of_90_percent_cover_90_percent():
    """The exact posterior's probability of the intervals; an initial scale would give 1 or 0."""
    model, guide, data, (mean, scale) = regression(dist.Normal(0.0, 0.5), inputs=20)
    fit(model, guide, data, epochs=100, batch_size=20)
    m, s = posterior(guide)
    low, high = ((m + sign * 1.6449 * s - mean) / scale for sign in (-1, 1))
    coverage = (torch.special.ndtr(high) - torch.special.ndtr(low)).mean().item()
    assert coverage == pytest.approx(0.9, abs=0.03)


@pytest.mark.parametrize("prior", [dist.Normal(0.0, 0.8), bbb.ScaleMixtureNormal(0.5, 0.8, 0.8)])
def test_the_recorded_kl_of_the_prior_is_0_for_every_draw(prior):
    # of a mixture the Hessian of the loss has the prior's precision in it, at 10 examples
    h = 1e-12 if isinstance(prior, dist.Normal) else 0.8**-2 / 10
    network = bbb.BayesianMLP([3, 4, 1], prior=prior)
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(), num_data=10)
    guide = bbb.AutoSoftplusNormal(model, init_loc=0.0)
    data = torch.randn(10, 3), torch.randn(10)
    history = fit(model, guide, data, epochs=1, batch_size=10, optimizer=IVON(hess_init=h))
    assert history.steps.kl == pytest.approx([0.0], abs=1e-9)
    assert history.steps.log_guide[0] < 0


def classifier(prior=None, likelihood=None):
    torch.manual_seed(3)
    network = bbb.BayesianMLP([3, 8, 4], prior=prior or dist.Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, likelihood or bbb.likelihoods.Categorical(), num_data=40)
    return model, bbb.AutoSoftplusNormal(model), (torch.randn(40, 3), torch.arange(40) % 4)


def test_pruned_weights_stay_pruned_whatever_the_prior():
    model, guide, data = classifier(dist.Normal(0.5, 1.0))
    fit(model, guide, data, epochs=5)
    pruned = bbb.prune(guide, fraction=0.5)
    before = {name: pruned.loc(name).clone() for name in pruned.site_names}
    history = fit(model, pruned, data, epochs=5)
    for name, mask in pruned.unpruned.items():
        assert (pruned.loc(name)[~mask] == 0).all()
        assert (pruned.scale(name)[~mask] == 0).all()
        assert (pruned.scale(name)[mask] > 0).all()
    assert sum((~mask).sum() for mask in pruned.unpruned.values()) > 30
    assert any(not pruned.loc(name).equal(before[name]) for name in before)
    assert all(map(math.isfinite, history.steps.loss))


def test_an_interrupted_run_goes_on_to_the_bit(tmp_path):
    options = {"epochs": 4, "batch_size": 16, "engine": "compiled"}
    schedule = bbb.KLSchedule(warmup_epochs=2)
    model, guide, data = classifier()
    uninterrupted = fit(model, guide, data, kl_schedule=schedule, **options)
    expected = [guide.quantiles([0.3])[name] for name in guide.site_names]

    def fail(end):
        if end.epoch == 1:
            raise RuntimeError("killed")

    model, guide, data = classifier()
    options |= {"kl_schedule": schedule, "checkpoint": tmp_path / "run"}
    with pytest.raises(RuntimeError, match="killed"):
        fit(model, guide, data, callbacks=[fail], **options)
    model, guide, data = classifier()
    again = fit(model, guide, data, **options)
    assert all(map(torch.equal, expected, (guide.quantiles([0.3])[n] for n in guide.site_names)))
    assert again.steps.loss == uninterrupted.steps.loss


def test_ordinary_parameters_and_those_of_priors_are_trained_too():
    network = bbb.BayesianMLP([3, 8, 1], prior=bbb.priors.LearnedScaleMixture(0.5, 1.0, 0.1))
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian.learned(2.0), num_data=100)
    guide = bbb.AutoSoftplusNormal(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    x = torch.randn(100, 3)
    fit(model, guide, (x, x.sum(1)), epochs=60, batch_size=50)
    moved = [name for name, p in model.named_parameters() if not p.equal(before[name])]
    assert moved == list(before)
    assert len(moved) >= 4


def test_minibatches_can_be_accumulated():
    """The sum over four of five rows is that over twenty, whose draws are four."""
    model, guide, data, exact = regression(dist.Normal(0.0, 0.5), num_data=20, noise=2.0)
    fit(model, guide, data, epochs=400, batch_size=20, accumulate=4)
    off, ratio = distance(guide, exact)
    assert off < 0.3
    assert ratio == pytest.approx(1, abs=0.15)


BAD = {
    "estimator": ({"estimator": "flipout"}, "needs estimator='reparam'"),
    "loss": ({"loss": "mean_field"}, "objective of its own"),
    "schedule": ({"kl_schedule": "blundell"}, "weighs all minibatches of an epoch alike"),
    "name": ({"optimizer": "ivan"}, "'ivon' or an IVON, got 'ivan'"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_it_cannot_do_is_named(name):
    model, guide, data = classifier()
    options, words = BAD[name]
    with pytest.raises((ValueError, TypeError), match=words):
        fit(model, guide, data, **{"epochs": 1, "batch_size": 10} | options)


def test_a_guide_that_it_cannot_train_is_named_with_one_that_it_can():
    model, _, data = classifier()
    for guide_name in ("normal", "ensemble", "delta"):
        guide = bbb.guides.make(guide_name, model)
        with pytest.raises(ValueError, match=r"AutoSoftplusNormal\(model\), got"):
            fit(model, guide, data, epochs=1)
    guide = bbb.AutoSoftplusNormal(model)
    next(guide.parameters()).requires_grad_(False)
    with pytest.raises(ValueError, match="frozen"):
        fit(model, guide, data, epochs=1)


class Watched(nn.Linear):
    """Keeps the weights that it is called with, by the rows of the call."""

    def forward(self, x):
        self.seen.setdefault(len(x), []).append(self.weight.detach().clone())
        return super().forward(x)


def test_unequal_parts_of_a_step_are_drawn_from_one_posterior():
    """Deviations of 16 weights in 150 steps, 6 standard errors of each; N is 138."""
    layer, num_data = Watched(16, 1, bias=False), 138
    layer.seen = {}
    network = bbb.bayesianize(layer, dist.Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(1.0), num_data=num_data)
    guide = bbb.AutoSoftplusNormal(model, init_loc=0.0)
    data = torch.randn(num_data, 16), torch.randn(num_data, 1)
    still = IVON(hess_init=3.0, beta2=1.0 - 1e-9)
    network.seen.clear()
    options = {"optimizer": still, "lr": 1e-9, "batch_size": 128, "accumulate": 2, "epochs": 150}
    fit(model, guide, data, **options)
    expected = (num_data * 3.0 + 1.0) ** -0.5
    for rows in (128, 10):
        draws = torch.stack(network.seen[rows][-150:])
        error = expected / math.sqrt(2 * draws.numel())
        assert abs(draws.square().mean().sqrt() - expected) < 6 * error


@pytest.mark.parametrize("noise", [0.1, 0.03])
def test_a_start_far_from_the_curvature_trains(noise):
    """The curvature is near 1 / noise², up to 1,000; from at most 10 the error exceeded 1 std."""
    x = torch.randn(200, 4)
    y = x[:, :2].sum(1, keepdim=True).sin() + noise * torch.randn(200, 1)
    network = bbb.BayesianMLP([4, 30, 30, 1], prior=dist.Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(noise), num_data=200)
    guide = bbb.AutoSoftplusNormal(model)
    fit(model, guide, (x, y), epochs=60, batch_size=50)
    prediction = bbb.predict(model, guide, x, num_samples=50, seed=0)
    assert (prediction.mean - y).square().mean().sqrt() < 0.5 * y.std()
