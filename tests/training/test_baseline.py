# SPDX-License-Identifier: Apache-2.0
"""The baseline that ignores the data, the warning below it, and the default learning rate."""

import math
import warnings

import pytest
import torch
from pyro.distributions import Normal, StudentT
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from sklearn.datasets import load_digits

import pyro_bbb as bbb
from pyro_bbb.sklearn import BayesianClassifier
from pyro_bbb.training import _baseline
from pyro_bbb.training._batches import Batches
from pyro_bbb.training._lr_schedule import default_lr
from pyro_bbb.training.optim import make_optim


@pytest.fixture(scope="module")
def digits():
    x, y = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    return x[:1347].float() / 16, y[:1347]


def classifier(num_data, prior=None, sizes=(64, 100, 100, 10)):
    torch.manual_seed(0)
    network = bbb.BayesianMLP([*sizes], prior=prior or Normal(0.0, 1.0))
    return bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=num_data)


def baselines(model, data, kl_weight=1.0, num_steps=1_000, batch_size=128):
    """Return the baselines of the objective and of the data cost."""
    batches = Batches(data, batch_size, model, torch.device("cpu"))
    return _baseline.baseline_per_example(batches, num_steps, kl_weight)


def baseline(*args, **options):
    return baselines(*args, **options)[0]


def guide_ignoring_data(model, scales):
    guide = bbb.AutoSoftplusNormal(model, init_loc=0.0)
    for name, rho in guide.rhos.named_parameters():
        rho.data.fill_(math.log(math.expm1(scales(name))))
    return guide


@pytest.mark.parametrize(
    ("prior", "scales"),
    [
        (Normal(0.0, 1.0), lambda name: 4.0**-4 if "fc3" in name else 1.0),
        (bbb.ScaleMixtureNormal(0.5, 1.0, math.exp(-6)), lambda _: math.sqrt(0.5) / 256),
    ],
)
def test_it_is_the_elbo_of_a_guide_that_ignores_the_data(digits, prior, scales):
    """Pyro's estimate for that guide with all data; four draws vary by 2 %."""
    model = classifier(1347, prior)
    guide = guide_ignoring_data(model, scales)
    with torch.no_grad():
        expected = Trace_ELBO(num_particles=20).loss(model, guide, *digits) / 1347
    assert baseline(model, digits) == pytest.approx(expected, rel=0.05)


def test_one_draw_is_unbiased_for_a_closed_form():
    r"""One weight of prior N(0, 1): $KL = (c^2 - 1)/2 - \log c$, 5 standard errors."""
    x, y = torch.ones(8, 1), torch.full((8, 1), 0.5)
    network = bbb.BayesianLinear(1, 1, bias=False, prior=Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(1.0), num_data=16)
    torch.manual_seed(0)
    c, weight = 0.25, 0.7
    costs = torch.tensor(
        [_baseline._costs(model, [(x, y)], {"network.weight": c}) for _ in range(400)]
    )
    draws = costs @ torch.tensor([weight, 1.0])
    kl = (c**2 - 1) / 2 - math.log(c)
    nll = 16 * (0.5 * math.log(2 * math.pi) + 0.5 * (0.5**2 + c**2))
    assert abs(draws.mean() - (weight * kl + nll)) < 5 * draws.std() / 20


@pytest.mark.parametrize(
    ("num_steps", "passes", "rows"), [(24, 0, 0), (25, 25, 8), (300, 25, 24), (10**6, 25, 225)]
)
def test_it_costs_less_than_the_training(digits, num_steps, passes, rows):
    """Rows of each pass: a hundredth of those the training sees, in minibatches of 8."""
    model = classifier(1347)
    seen = []
    model.network.register_forward_hook(lambda *args: seen.append(len(args[1][0])))
    values = baselines(model, digits, num_steps=num_steps, batch_size=8)
    assert (values is None) == (passes == 0)
    assert max(seen, default=0) <= 8
    assert passes * rows * 0.95 <= sum(seen) <= passes * rows + 1


def test_a_prior_without_moments_is_drawn_from_as_it_is():
    x, y = torch.ones(8, 2), torch.zeros(8, 1)
    network = bbb.BayesianLinear(2, 1, prior=StudentT(1.0))
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(1.0), num_data=8)
    assert baseline(model, (x, y)) > 0


def fit(model, guide, data, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = bbb.fit(model, guide, data, progress=False, seed=0, **options)
    return history, [w for w in caught if issubclass(w.category, bbb.UndertrainedWarning)]


def units_off(guide):
    """Make the hidden units 0 for all images."""
    biases = (p for n, p in guide.named_parameters() if n.startswith("locs") and len(p) == 100)
    next(biases).data.fill_(-100.0)


WARNINGS = {  # guide's init_rho, change before training, options of fit; reached, baseline, reason
    "KL": (-5.0, None, {"epochs": 3, "lr": 1e-3}, "a KL term of", "standard deviations are"),
    "loss": (0.5, None, {"epochs": 3, "lr": 1e-3}, "a negative ELBO of", "The guide is far"),
    "dead units": (-5.0, units_off, {"epochs": 20}, "a data cost of", "has learned nothing"),
    "collapse": (0.5, None, {"epochs": 60}, "a data cost of", "The guide has learned little"),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_fit_warns_where_training_ends_above_it(digits, name):
    """At a loss or a KL above the least loss, or a data cost above that of guessing, log 10."""
    init_rho, change, options, reached, why = WARNINGS[name]
    model = classifier(1347, sizes=(64, 100, 10))
    guide = bbb.AutoSoftplusNormal(model, init_rho=init_rho)
    if change:
        change(guide)
    history, caught = fit(model, guide, digits, **options)
    num_steps = 11 * options["epochs"]
    least = [history.baseline_per_example, history.baseline_nll_per_example]
    assert least == baselines(classifier(1347, sizes=(64, 100, 10)), digits, num_steps=num_steps)
    assert math.log(10) - 0.05 < least[1] < math.log(10) + 0.01
    loss, nll = history.loss[-1] / 1347, history.nll[-1] / 1347
    assert history.neg_elbo_per_example[-1] == loss
    ended = {"KL": loss - nll, "loss": loss}.get(name, nll)
    baseline = least[0] if name in ("KL", "loss") else least[1]
    assert len(caught) == 1 and caught[0].filename == __file__
    text = str(caught[0].message)
    assert text.startswith(f"training ended at {reached} {ended:.3g} nats per example; a posterior")
    assert f"{baseline:.3g}. " in text and why in text
    assert ended > baseline


def test_the_default_recipe_is_better_on_a_sine():
    x = torch.linspace(-0.5, 0.5, 32)[:, None]
    y = 10 * torch.sin(2 * math.pi * x) + torch.randn(x.shape, generator=torch.manual_seed(0))
    network = bbb.BayesianMLP([1, 20, 20, 1], prior=Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(1.0), num_data=32)
    history, caught = fit(model, bbb.AutoSoftplusNormal(model), (x, y), epochs=400)
    assert not caught
    assert history.neg_elbo_per_example[-1] < history.baseline_per_example


@pytest.mark.parametrize(
    ("num_steps", "expected"), [(1, 0.03), (1_100, 32 / 1_100), (3_200, 0.01), (10**6, 0.001)]
)
def test_the_default_learning_rate_falls_with_the_number_of_steps(num_steps, expected):
    assert default_lr(num_steps) == expected


def optimizer_groups(guide, lr):
    """Rates of the parameters by name, at a rate of the training."""
    optim = make_optim([guide], None, 0.03, max_lr_of_locs=0.01)
    optim.set_lr(lr)
    rate = {p: group["lr"] for group in optim.optimizer.param_groups for p in group["params"]}
    return {name: rate[p] for name, p in guide.named_parameters()}


@pytest.mark.parametrize("make", [bbb.AutoSoftplusNormal, AutoNormal])
def test_means_move_at_a_third_of_the_rate_of_scales_at_most(digits, make):
    model = classifier(1347)
    guide = make(model)
    fit(model, guide, digits, epochs=1)
    for lr, bounded in ((0.03, 0.01), (0.004, 0.004)):
        rates = optimizer_groups(guide, lr)
        assert {r for name, r in rates.items() if name.startswith("locs.")} == {bounded}
        assert {r for name, r in rates.items() if not name.startswith("locs.")} == {lr}


def test_a_rare_class_that_few_examples_lack_gives_no_false_alarm():
    """The data cost of a posterior that ignores the data is at least the labels' entropy."""
    y = (torch.arange(2000) % 100 == 1).long()  # rows 0, 8, 16, ... estimate the data cost
    x = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0)) + 3.0 * y[:, None]
    estimator = BayesianClassifier(hidden_sizes=8, epochs=20, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bbb.training.UndertrainedWarning)
        history = estimator.fit(x.numpy(), y.numpy()).history_
    entropy = -0.01 * math.log(0.01) - 0.99 * math.log(0.99)
    assert entropy * (1 - 1e-6) <= history.baseline_nll_per_example < 2 * entropy


def test_it_is_that_of_the_whole_kl_for_a_schedule_that_is_a_function():
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(120, 4, generator=generator), torch.arange(120) % 3

    def trained(schedule):
        model = classifier(120, sizes=(4, 3))
        options = {"kl_schedule": schedule, "epochs": 10, "batch_size": 24, "progress": False}
        guide = bbb.AutoSoftplusNormal(model)
        return bbb.fit(model, guide, data, seed=0, **options).baseline_per_example

    expected = trained("uniform")
    assert trained(lambda i, m: 1 / m) == pytest.approx(expected)
    assert trained(lambda i, m: 2 * (m - i) / (m * (m - 1))) == pytest.approx(expected)
