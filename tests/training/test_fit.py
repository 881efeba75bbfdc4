# SPDX-License-Identifier: Apache-2.0
"""`fit`: it learns, is a function of its seed, leaves no trace, and refuses bad input at once."""

import math
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO, autoguide
from pyro.poutine.runtime import _PYRO_STACK
from sklearn.datasets import load_diabetes
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import pyro_bbb as bbb
from pyro_bbb import likelihoods
from pyro_bbb.guides.kl_weight import with_kl_weight
from pyro_bbb.training._schedules import lr_factor
from pyro_bbb.training.objectives import NonFiniteError


def make(likelihood=None, *, n=40, sizes=(3, 8, 1), prior=None, **options):
    network = bbb.BayesianMLP(list(sizes), prior=prior or dist.Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, likelihood or likelihoods.Gaussian(0.5), num_data=n)
    return model, bbb.AutoSoftplusNormal(model, **options)


def data(n=40):
    x = torch.randn(n, 3)
    return x, x.sum(1)


def quiet_fit(model, guide, pairs, **options):
    options = {"epochs": 2, "batch_size": 16, "seed": 0, "progress": False, **options}
    return bbb.fit(model, guide, pairs, **options)


def snapshot(module):
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- it learns ---

LEARNERS = {
    "categorical": (likelihoods.Categorical, 3, lambda x: x.argmax(1)),
    "bernoulli": (likelihoods.Bernoulli, 1, lambda x: (x.sum(1) > 0).long()),
    "gaussian": (lambda: likelihoods.Gaussian(0.3), 1, lambda x: x.sum(1)),
    "learned scale": (lambda: likelihoods.Gaussian.learned(2.0), 1, lambda x: x.sum(1)),
    "latent scale": (lambda: likelihoods.Gaussian(dist.LogNormal(0.0, 1.0)), 1, lambda x: x.sum(1)),
    "heteroscedastic": (likelihoods.HeteroscedasticGaussian, 2, lambda x: x.sum(1)),
    "poisson": (likelihoods.Poisson, 1, lambda x: (x.sum(1) + 1).exp().round()),
    "negative binomial": (
        lambda: likelihoods.NegativeBinomial.learned(100.0),
        1,
        lambda x: (x.sum(1) + 1).exp().round(),
    ),
    "student t": (lambda: likelihoods.StudentT(4.0, 0.3), 1, lambda x: x.sum(1)),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_the_loss_falls_for_every_likelihood(name):
    likelihood, outputs, target = LEARNERS[name]
    model, guide = make(likelihood(), n=100, sizes=(3, 16, outputs))
    x = torch.randn(100, 3)
    before = snapshot(model)
    history = quiet_fit(model, guide, (x, target(x)), epochs=40, batch_size=50, lr=0.05)
    assert sum(history.nll[-5:]) < 0.6 * sum(history.nll[:5])
    assert sum(history.loss[-5:]) < 0.8 * sum(history.loss[:5])
    assert all(not torch.equal(before[key], value) for key, value in snapshot(model).items())


def test_the_learned_noise_finds_its_value():
    model, guide = make(likelihoods.Gaussian.learned(2.0), n=200, sizes=(3, 1))
    x = torch.randn(200, 3)
    y = x.sum(1) + 0.5 * torch.randn(200)
    quiet_fit(model, guide, (x, y), epochs=150, batch_size=100, lr=0.05)
    with torch.no_grad():
        found = model.likelihood.scale.item()
    # 200 residuals know the scale to 5 %: 5 standard errors
    assert found == pytest.approx(0.5, rel=0.25)


# --- a run is a function of its seed and leaves the world as it was ---


def world():
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "torch validates": torch.distributions.Distribution._validate_args,
        "pyro validates": pyro.settings.get("validate_poutine"),
        "settings": {k: v for k, v in pyro.settings.get().items() if "validate" not in k},
        "params": sorted(pyro.get_param_store().keys()),
        "handlers": len(_PYRO_STACK),
    }


@pytest.mark.parametrize("loader", [False, True])
@pytest.mark.parametrize("seed", [0, 3])
def test_the_same_seed_gives_the_same_run_to_the_bit(loader, seed):
    runs = []
    pairs = data()
    for noise in (1, 2):
        pyro.set_rng_seed(0)
        model, guide = make(likelihoods.Gaussian.learned())
        pyro.set_rng_seed(noise)  # the state outside does not matter
        torch.randn(noise)
        source = DataLoader(TensorDataset(*pairs), 16, shuffle=True) if loader else pairs
        history = quiet_fit(model, guide, source, seed=seed)
        runs.append((snapshot(guide), snapshot(model), history.as_dict() | {"seconds": None}))
    assert same(runs[0][0], runs[1][0]) and same(runs[0][1], runs[1][1])
    assert runs[0][2] == runs[1][2]


def test_another_seed_gives_another_run():
    runs = []
    pairs = data()
    for seed in (0, 1):
        pyro.set_rng_seed(0)
        model, guide = make()
        quiet_fit(model, guide, pairs, seed=seed)
        runs.append(snapshot(guide))
    assert not same(*runs)


def test_without_a_seed_torchs_state_decides():
    pairs, losses = data(), []
    for outside in (5, 5, 6):
        pyro.set_rng_seed(0)
        model, guide = make()
        pyro.set_rng_seed(outside)
        losses.append(quiet_fit(model, guide, pairs, seed=None).loss)
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("validation", [True, False])
@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_a_run_leaves_the_world_as_it_was(validation, kind):
    model, guide = make(likelihoods.Gaussian.learned())
    guide = guide if kind == "ours" else autoguide.AutoNormal(model)
    pyro.param("kept", torch.ones(2))
    pairs = data()
    with pyro.validation_enabled(validation):
        before = world()
        quiet_fit(model, guide, pairs)
        assert world() == before


@pytest.mark.parametrize("validation", [True, False])
@pytest.mark.parametrize("when", ["callback", "data", "step"])
def test_a_failing_run_leaves_the_world_as_it_was(validation, when):
    model, guide = make(Poisoned(use=3) if when == "step" else None)
    pyro.param("kept", torch.ones(2))
    x, y = data()
    if when == "data":
        x[3] = math.nan

    def fail(event):
        raise RuntimeError("stop")

    callbacks = [fail] if when == "callback" else []
    with pyro.validation_enabled(validation):
        before = world()
        with pytest.raises((RuntimeError, ValueError, NonFiniteError)):
            quiet_fit(model, guide, (x, y), callbacks=callbacks)
        assert world() == before


@pytest.mark.parametrize("mode", [True, False])
def test_the_modules_keep_their_mode(mode):
    network = bbb.BayesianMLP([3, 8, 1], activation=lambda: torch.nn.Dropout(0.5))
    model = bbb.BayesianModel(network, likelihoods.Gaussian(), num_data=40)
    model.train(mode)
    quiet_fit(model, bbb.AutoSoftplusNormal(model), data())
    assert {module.training for module in model.modules()} == {mode}


def test_gradients_left_over_from_elsewhere_do_not_count():
    pairs, runs = data(), []
    for left_over in (None, 1e3, math.nan):
        pyro.set_rng_seed(0)
        model, guide = make()
        for parameter in guide.parameters():
            parameter.grad = None if left_over is None else torch.full_like(parameter, left_over)
        runs.append(quiet_fit(model, guide, pairs).loss)
    assert runs[0] == runs[1] == runs[2]


# --- data ---


class Pairs(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Stream(IterableDataset):
    """Pairs of unknown number."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __iter__(self):
        return iter(zip(self.x, self.y, strict=True))


KINDS = {
    "tensors": lambda x, y: (x, y),
    "numpy": lambda x, y: (x.numpy(), y.numpy()),
    "list": lambda x, y: [x, y],
    "TensorDataset": TensorDataset,
    "Dataset": Pairs,
    "loader": lambda x, y: DataLoader(Pairs(x, y), 40),
    "stream": lambda x, y: DataLoader(Stream(x, y), 40),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_of_the_same_data_gives_the_same_loss(kind):
    """Of the mean network, as the guide has no spread: that of its prediction."""
    (x, y), (model, guide) = data(), make(init_rho=-20.0)
    history = quiet_fit(model, guide, KINDS[kind](x, y), batch_size=40, epochs=1, lr=1e-12)
    expected = -bbb.predict_mean(model, guide, x).log_prob(y).sum().item()
    assert history.nll == pytest.approx([expected], rel=1e-5)


@pytest.mark.parametrize("loader", ["sized", "stream"])
def test_a_loader_keeps_its_batches(loader):
    """In a fixed order, with learning rate nearly 0: the steps are those of the batches."""
    x, y = data()
    if loader == "sized":
        source = DataLoader(Pairs(x, y), batch_size=15)
    else:
        source = DataLoader(Stream(x, y), batch_size=15)
    model, guide = make(init_rho=-20.0)
    history = quiet_fit(model, guide, source, batch_size=7, lr=1e-12, lr_schedule="constant")
    assert history.steps.kl_weight == pytest.approx([15 / 40, 15 / 40, 10 / 40] * 2)
    prediction = bbb.predict_mean(model, guide, x)
    nlls = [-part.sum().item() for part in prediction.log_prob(y).split(15)]
    assert history.steps.nll == pytest.approx(nlls * 2, rel=1e-4)


def test_batches_are_shuffled_anew_in_each_epoch():
    seen = []

    class Spy(likelihoods.Gaussian):
        def prepare(self, y, outputs):
            seen.append(y.tolist())
            return super().prepare(y, outputs)

    x, y = data()
    quiet_fit(*make(Spy(0.5)), (x, y), epochs=2)
    batches = [batch for batch in seen if len(batch) in (16, 8)]
    assert [len(batch) for batch in batches] == [16, 16, 8] * 2
    first, second = sum(batches[:3], []), sum(batches[3:], [])
    assert sorted(first) == sorted(second) == sorted(y.tolist())
    assert first != second != y.tolist() != first


# --- bad input is refused before any parameter changes ---


def nan_at(tensor, row):
    changed = tensor.clone()
    changed[row] = math.nan
    return changed


X, Y = torch.randn(40, 3), torch.randn(40)
BAD_DATA = {
    "x NaN": (nan_at(X, 7), Y, ValueError, "x must be finite, got NaN or infinity first in row 7"),
    "y NaN": (X, nan_at(Y, 9), ValueError, "y must be finite.*row 9"),
    "empty": (X[:0], Y[:0], ValueError, "x must have at least one example"),
    "lengths": (X, Y[:39], ValueError, "equally many rows, got 40 and 39"),
    "num_data": (X[:30], Y[:30], ValueError, "num_data of the model is 40, but data has 30"),
    "x shape": (X[:, :2], Y, ValueError, r"expected x of shape \[batch, 3\], got \[2, 2\]"),
    "images": (X.view(40, 3, 1), Y, ValueError, r"expected x of shape \[batch, 3\]"),
    "y shape": (X, torch.randn(40, 2), ValueError, r"expected y of shape \[n, 1\], got \[40, 2\]"),
    "x kind": ("images", Y, TypeError, "x must be a tensor or a numeric numpy array, got str"),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_are_refused(case):
    x, y, error, message = BAD_DATA[case]
    model, guide = make()
    before = snapshot(guide)
    with pytest.raises(error, match=message):
        quiet_fit(model, guide, (x, y))
    assert same(before, snapshot(guide))


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.full((40,), 3), r"y must hold labels in \[0, 2\], got 3"),
        (torch.cat([torch.zeros(39), torch.tensor([-1.0])]).long(), "got -1"),
        (torch.zeros(40), "y must hold integer class labels, got dtype torch.float32"),
        (torch.zeros(40, 1).long(), r"expected y of shape \[n\], got \[40, 1\]"),
    ],
)
def test_bad_labels_are_refused(y, message):
    model, guide = make(likelihoods.Categorical(), sizes=(3, 8, 3))
    before = snapshot(guide)
    with pytest.raises(ValueError, match=message):
        quiet_fit(model, guide, (X, y))
    assert same(before, snapshot(guide))


@pytest.mark.parametrize(
    ("likelihood", "y", "message"),
    [
        (likelihoods.Bernoulli, torch.full((40,), 0.5), "y must hold 0 and 1 only, got 0.5"),
        (likelihoods.Poisson, torch.full((40,), -2), "y must hold counts.*got -2"),
        (likelihoods.Poisson, torch.full((40,), 1.5), "y must hold counts.*got 1.5"),
    ],
)
def test_targets_outside_the_likelihoods_range_are_refused(likelihood, y, message):
    model, guide = make(likelihood())
    before = snapshot(guide)
    with pytest.raises(ValueError, match=message):
        quiet_fit(model, guide, (X, y))
    assert same(before, snapshot(guide))


BAD_OPTIONS = [
    ({"kl_schedule": "linear"}, ValueError, r"kl_schedule.*\['blundell', 'uniform'\].*'linear'"),
    ({"kl_schedule": 0.5}, TypeError, "kl_schedule must be a name or a function, got 0.5"),
    ({"loss": "elbo"}, ValueError, r"loss.*\['mean_field', 'trace'\].*'elbo'"),
    ({"loss": pyro.infer.RenyiELBO()}, TypeError, "loss must be Trace_ELBO or TraceMeanField_ELBO"),
    (
        {"lr_schedule": "step"},
        ValueError,
        r"lr_schedule.*\['constant', 'cosine', 'warmup_cosine'\].*'step'",
    ),
    ({"estimator": "score"}, ValueError, "estimator must be one of.*'reparam'.*got 'score'"),
    ({"epochs": 0}, ValueError, "epochs must be an integer of at least 1, got 0"),
    ({"epochs": 1.5}, ValueError, "epochs must be an integer of at least 1, got 1.5"),
    ({"epochs": True}, ValueError, "epochs must be an integer of at least 1, got True"),
    ({"batch_size": 0}, ValueError, "batch_size must be an integer of at least 1, got 0"),
    ({"batch_size": 2.0}, ValueError, "batch_size must be an integer of at least 1, got 2.0"),
    ({"lr": 0.0}, ValueError, "lr must be a positive number, got 0.0"),
    ({"lr": math.nan}, ValueError, "lr must be a positive number, got nan"),
    ({"lr": "fast"}, ValueError, "lr must be a positive number, got 'fast'"),
    ({"lr_schedule": lambda p: math.nan}, ValueError, "lr must be a finite number.*got nan"),
    ({"num_particles": 0}, ValueError, "num_particles must be an integer of at least 1, got 0"),
    ({"seed": 1.5}, TypeError, "seed must be an integer, got 1.5"),
    ({"autocast": torch.float16}, ValueError, "float16 needs loss scaling"),
    ({"autocast": torch.float32}, ValueError, "must be None or torch.bfloat16, got torch.float32"),
    ({"autocast": "bfloat16"}, ValueError, "must be None or torch.bfloat16, got 'bfloat16'"),
    ({"cuda_graph": True}, ValueError, "cuda_graph=True needs a CUDA device, got cpu"),
    ({"optimizer": "adam"}, TypeError, "optimizer must be a torch optimiser class.*got 'adam'"),
    (
        {"optimizer": torch.optim.Adam([torch.zeros(1)])},
        TypeError,
        "optimizer must be a torch optimiser class.*got Adam",
    ),
]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    BAD_OPTIONS,
    ids=[
        f"{key}={value!r}".partition(" at 0x")[0]  # the same in every process
        for options, *_ in BAD_OPTIONS
        for key, value in options.items()
    ],
)
def test_bad_options_are_refused(options, error, message):
    model, guide = make()
    before = snapshot(guide)
    with pytest.raises(error, match=message):
        quiet_fit(model, guide, (X, Y), **options)
    assert same(before, snapshot(guide))


def test_a_model_of_another_kind_is_refused():
    model, guide = make()
    with pytest.raises(TypeError, match="model must be a BayesianModel, got BayesianMLP"):
        quiet_fit(model.network, guide, (X, Y))


# --- losses and gradients that are not finite ---


class Poisoned(likelihoods.Gaussian):
    """The loss is NaN the n-th time that the likelihood is used in training mode."""

    def __init__(self, use):
        super().__init__(0.5)
        self.left = use

    def arguments(self, outputs):
        self.left -= self.training
        arguments = super().arguments(outputs)
        return (
            arguments | {"loc": self.poison(arguments["loc"])}
            if self.training and self.left == 0
            else arguments
        )

    def poison(self, loc):
        return loc * math.nan


class PoisonedGradient(Poisoned):
    def poison(self, loc):
        loc.register_hook(lambda grad: grad * math.nan)
        return loc


@pytest.mark.parametrize(
    ("kind", "what", "names"),
    [(Poisoned, "loss", "in obs;"), (PoisonedGradient, "gradient", "in locs.network.fc1.weight, ")],
)
def test_training_stops_at_the_step_that_is_not_finite_with_the_last_good_state(kind, what, names):
    pairs, states = data(), []
    pyro.set_rng_seed(0)
    healthy = kind(use=0)
    reference = quiet_fit(*make(healthy), pairs, callbacks=[keep_first(states)])
    checks = -healthy.left - len(reference.steps)  # uses before the first step
    pyro.set_rng_seed(0)
    model, guide = make(kind(use=checks + 4))  # the first step of the second epoch
    with pytest.raises(NonFiniteError, match=f"{what} is not finite at step 4 {names}") as caught:
        quiet_fit(model, guide, pairs, epochs=2)
    assert (caught.value.what, caught.value.step) == (what, 4)
    assert caught.value.history.steps.loss == reference.steps.loss[:3]
    assert caught.value.history.loss == reference.loss[:1]
    assert same(snapshot(guide), states[0])
    assert all(parameter.grad is None for parameter in guide.parameters())
    assert all(map(math.isfinite, quiet_fit(model, guide, pairs).loss))  # it can go on


def keep_first(states):
    """A callback that keeps the guide's parameters as they are after the first epoch."""

    def callback(event):
        if event.epoch == 0:
            states.append(snapshot(event.guide))

    return callback


def test_a_learning_rate_that_explodes_is_reported():
    model, guide = make()
    with pytest.raises(NonFiniteError, match="Try a lower learning rate") as caught:
        quiet_fit(model, guide, data(), epochs=20, lr=1e30)
    assert caught.value.step == len(caught.value.history.steps) + 1
    assert all(value.isfinite().all() for value in snapshot(guide).values())


# --- callbacks, optimisers, schedules, progress ---


def test_callbacks_run_in_order_after_each_epoch():
    model, guide = make()
    calls = []

    def callback(name):
        def call(event):
            assert event.model is model and event.guide is guide
            calls.append((name, event.epoch, len(event.history), len(event.history.steps)))

        return call

    history = quiet_fit(model, guide, data(), callbacks=[callback("a"), callback("b")])
    assert calls == [("a", 0, 1, 3), ("b", 0, 1, 3), ("a", 1, 2, 6), ("b", 1, 2, 6)]
    assert len(history) == 2


def test_a_callback_that_returns_true_ends_the_training_after_all_callbacks_ran():
    calls = []
    callbacks = (lambda event: event.epoch == 1, lambda event: calls.append(event.epoch))
    history = quiet_fit(*make(), data(), epochs=5, callbacks=(c for c in callbacks))
    assert len(history) == 2 and calls == [0, 1]


def test_a_function_may_make_the_optimiser_and_gets_each_parameter_once():
    model, guide = make(likelihoods.Gaussian.learned())
    made = []

    def constructor(parameters, lr):
        made.append(torch.optim.SGD(parameters, lr=lr, momentum=0.9))
        return made[-1]

    quiet_fit(model, guide, data(), optimizer=constructor, lr=1e-4)
    (optimizer,) = made
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len(set(held)) == 9
    assert set(held) == {*guide.parameters(), *model.parameters()}


def test_the_default_is_adam_from_lr_along_the_cosine_as_a_hand_written_loop():
    """SVI with torch's Adam on all parameters, on the same batches and noise, to rounding."""
    torch.set_default_dtype(torch.float64)
    x, y = data(32)
    pyro.set_rng_seed(0)
    model, guide = make(n=32)
    quiet_fit(model, guide, (x, y), epochs=3, batch_size=32, lr=0.1, seed=11, kl_schedule=cold)
    pyro.set_rng_seed(0)
    twin_model, twin = make(n=32)
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.1, fused=True)
    pyro.set_rng_seed(11)
    order = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    looks = twin(x[:2], y[:2], 0.5)  # the check before training draws once
    for step in range(3):
        rows = torch.randperm(32, generator=order)
        optimizer.param_groups[0]["lr"] = 0.1 * 0.5 * (1 + math.cos(math.pi * step / 3))
        loss = Trace_ELBO().differentiable_loss(twin_model, twin, x[rows], y[rows], 0.25)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    expected = snapshot(twin)
    assert looks
    for name, value in snapshot(guide).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12)


def cold(i, m):
    return 0.25


def half_cosine(progress):
    return 0.5 * (1 + math.cos(math.pi * progress))


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [1.0] * 6),
        (lambda progress: 1 - progress, [1 - step / 6 for step in range(6)]),
        ("warmup_cosine", [0.0, *(half_cosine((step / 6 - 0.05) / 0.95) for step in range(1, 6))]),
    ],
)
def test_learning_rate_schedules_reach_the_optimiser(schedule, factors):
    rates = []

    class Spy(torch.optim.SGD):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    quiet_fit(*make(), data(), optimizer=Spy, lr=1e-4, lr_schedule=schedule)
    assert rates == pytest.approx([1e-4 * factor for factor in factors])


def test_the_warm_up_is_a_line_over_a_twentieth_of_the_training():
    schedule = lr_factor("warmup_cosine")
    at = [0.0, 0.01, 0.025, 0.0499, 0.05, 0.525, 1.0]
    assert [schedule(t) for t in at] == pytest.approx([0, 0.2, 0.5, 0.998, 1, 0.5, 0], abs=1e-12)


def test_a_pyro_optimiser_keeps_its_own_rates():
    model, guide = make()
    before = snapshot(guide)
    optim = pyro.optim.SGD({"lr": 0.0})
    quiet_fit(model, guide, data(), optimizer=optim, lr=1.0)
    assert same(before, snapshot(guide))
    quiet_fit(model, guide, data(), optimizer=pyro.optim.ClippedAdam({"lr": 0.1}))
    assert not any(torch.equal(before[name], value) for name, value in snapshot(guide).items())


def test_warm_up_and_temperature_reach_the_steps():
    schedule = bbb.KLSchedule("uniform", temperature=0.5, warmup_epochs=1)
    history = quiet_fit(*make(), data(), kl_schedule=schedule)
    shares = [0.4, 0.4, 0.2]
    expected = [0.5 * w * (i + 1) / 3 for i, w in enumerate(shares)] + [0.5 * w for w in shares]
    assert history.steps.kl_weight == pytest.approx(expected)


def test_particles_are_averaged():
    """At fixed parameters the loss keeps its mean, and its variance falls with the particles."""
    losses = {}
    for particles in (1, 8):
        pyro.set_rng_seed(0)
        options = {"epochs": 200, "batch_size": 40, "lr": 1e-12, "num_particles": particles}
        model, guide = make(sizes=(3, 1), init_rho=0.0)
        history = quiet_fit(model, guide, data(), loss="trace", **options)
        losses[particles] = torch.tensor(history.loss)
    ones, eights = losses[1], losses[8]
    error = math.sqrt((ones.var() + eights.var()).item() / 200)
    assert abs((ones.mean() - eights.mean()).item()) < 4.5 * error  # false alarm: 1 in 150,000
    # the ratio of variances is 8; 200 heavy-tailed draws know each to about 20 %, so that 4 times
    # more or less is 5 standard errors of its logarithm
    assert 2 < (ones.var() / eights.var()).item() < 32


def test_progress_false_prints_nothing_and_true_shows_the_loss(capfd):
    quiet_fit(*make(), data())
    assert capfd.readouterr() == ("", "")
    quiet_fit(*make(), data(), progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "epoch 2/2" in err and "neg_elbo=" in err and "6/6" in err


# --- guides of others ---

STOCK = {
    "AutoNormal": autoguide.AutoNormal,
    "AutoMultivariateNormal": autoguide.AutoMultivariateNormal,
    "AutoLowRankMultivariateNormal": autoguide.AutoLowRankMultivariateNormal,
    "AutoDelta": autoguide.AutoDelta,
}


@pytest.mark.parametrize("name", STOCK)
def test_stock_guides_train_with_the_kl_weighted_on_both_sides(name):
    torch.set_default_dtype(torch.float64)
    model, _ = make(likelihoods.Gaussian(dist.LogNormal(-1.0, 0.5)), n=100, sizes=(3, 8, 1))
    guide = STOCK[name](model)
    history = quiet_fit(model, guide, data(100), epochs=25, batch_size=30, lr=0.05)
    assert sum(history.loss[-5:]) < 0.8 * sum(history.loss[:5])
    assert history.kl_weight == pytest.approx([1.0] * 25)
    for record in (history, history.steps):
        rows = zip(record.loss, record.kl_weight, record.kl, record.nll, strict=True)
        for loss, kl_weight, kl, nll in rows:
            assert loss == pytest.approx(kl_weight * kl + nll, rel=1e-12)
    assert len(pyro.get_param_store()) == 0


@pytest.mark.parametrize("name", STOCK)
def test_a_stock_guides_minibatch_losses_add_up_to_the_loss_of_all_data(name):
    """At fixed parameters and noise, by Trace_ELBO on the guide that `fit` weighs."""
    torch.set_default_dtype(torch.float64)
    model, _ = make(likelihoods.Gaussian(dist.LogNormal(-1.0, 0.5)))
    guide, (x, y) = STOCK[name](model), data()
    quiet_fit(model, guide, (x, y))
    whole = weighted_loss(model, guide, x, y, 1.0)
    batches = zip(x.split(15), y.split(15), (0.375, 0.375, 0.25), strict=True)
    parts = [weighted_loss(model, guide, *batch) for batch in batches]
    assert sum(parts) == pytest.approx(whole, rel=1e-12)


def weighted_loss(model, guide, x, y, kl_weight):
    pyro.set_rng_seed(3)
    return Trace_ELBO().loss(model, with_kl_weight(guide), x, y, kl_weight)


def mean_field_by_hand(x, y=None, weight=1.0):
    for i, (n_out, n_in) in enumerate([(8, 3), (1, 8)], start=1):
        for name, shape in (("weight", (n_out, n_in)), ("bias", (n_out,))):
            site = f"network.fc{i}.{name}"
            loc = pyro.param(f"{site}_loc", lambda s=shape: 0.1 * torch.randn(s))
            scale = pyro.param(f"{site}_scale", 0.05 * torch.ones(shape), dist.constraints.positive)
            pyro.sample(site, dist.Normal(loc, scale).to_event(len(shape)))


def weighing_by_hand(x, y=None, kl_weight=1.0):
    with poutine.scale(scale=kl_weight):
        mean_field_by_hand(x, y)


@pytest.mark.parametrize("guide", [mean_field_by_hand, weighing_by_hand])
@pytest.mark.parametrize("loss", [Trace_ELBO(), TraceMeanField_ELBO])
def test_a_guide_function_trains_and_keeps_its_parameters_in_the_store(guide, loss):
    torch.set_default_dtype(torch.float64)
    model, _ = make(n=100)
    history = quiet_fit(model, guide, data(100), epochs=30, batch_size=30, lr=0.03, loss=loss)
    assert sum(history.loss[-5:]) < 0.8 * sum(history.loss[:5])
    assert len(pyro.get_param_store()) == 8
    assert history.steps.kl_weight == pytest.approx([0.3, 0.3, 0.3, 0.1] * 30)
    rows = zip(history.loss, history.kl, history.nll, strict=True)
    assert all(value == pytest.approx(kl + nll, rel=1e-12) for value, kl, nll in rows)


def test_a_guide_that_takes_the_weight_and_drops_it_is_refused():
    def guide(x, y=None, kl_weight=1.0):
        mean_field_by_hand(x, y)

    with pytest.raises(ValueError, match="'network.fc1.weight' is scaled differently.*kl_weight"):
        quiet_fit(make()[0], guide, data())


def test_a_guide_that_lacks_a_latent_is_refused():
    def guide(x, y=None, weight=1.0):
        with poutine.block(hide=["network.fc2.bias"]):
            mean_field_by_hand(x, y)

    with pytest.raises(ValueError, match=r"guide must.*every latent.*\['network.fc2.bias'\]"):
        quiet_fit(make()[0], guide, data())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 1), "guide must draw latents that fit the model: .*shapes cannot be multiplied"),
        ((3, 1, 8, 1), "guide must draw latents that fit the model: expected y of shape"),
        ((3, 5, 1), r"guide must draw 'network.fc1.weight' of.* \[8, 3\], it draws \[5, 3\]"),
    ],
)
def test_a_guide_of_another_network_is_refused(sizes, message):
    guide = make(sizes=sizes)[1]
    with pytest.raises(ValueError, match=message):
        quiet_fit(make()[0], guide, data())


def test_a_network_that_keeps_a_parameter_in_the_global_store_is_refused():
    class Scaled(bbb.BayesianMLP):
        def forward(self, x):
            return pyro.param("gain", torch.ones(())) * super().forward(x)

    model = bbb.BayesianModel(Scaled([3, 1]), likelihoods.Gaussian(), num_data=40)
    with pytest.raises(ValueError, match=r"pyro.param\('gain'\) inside the network"):
        quiet_fit(model, bbb.AutoSoftplusNormal(model), data())


# --- loaders ---


def _yes_or_no(y):
    model = bbb.BayesianModel(bbb.BayesianMLP([3, 1]), bbb.likelihoods.Bernoulli(), len(y))
    return model, bbb.AutoSoftplusNormal(model)


def test_every_batch_of_a_loader_is_checked():
    y = torch.zeros(20, 1)
    y[15:] = 7.0
    model, guide = _yes_or_no(y)
    loader = DataLoader(TensorDataset(torch.randn(20, 3), y), batch_size=10)
    with pytest.raises(ValueError, match="y must hold 0 and 1 only, got 7"):
        bbb.fit(model, guide, loader, epochs=1, progress=False)


def test_a_stream_that_can_be_read_once_loses_no_batch():
    class Once(IterableDataset):
        rows = iter([(torch.randn(3), torch.ones(1)) for _ in range(8)])

        def __iter__(self):
            return self.rows

    model, guide = _yes_or_no(torch.ones(8))
    history = bbb.fit(model, guide, DataLoader(Once(), batch_size=2), epochs=1, progress=False)
    assert len(history.steps) == 4


def test_a_left_over_gradient_does_not_move_the_parameters_of_a_pyro_optimiser():
    model, guide = _yes_or_no(torch.ones(8))
    before = guide.loc("network.fc1.weight").clone()
    for parameter in guide.parameters():
        parameter.grad = torch.full_like(parameter, 1e6)
    optimiser = pyro.optim.SGD({"lr": 1e-3})
    data = torch.randn(8, 3), torch.ones(8)
    bbb.fit(model, guide, data, epochs=1, optimizer=optimiser, progress=False)
    assert (guide.loc("network.fc1.weight") - before).abs().max() < 1


# --- lower precision ---


def blobs(n=300, classes=10):
    """Points around one centre per class, not quite apart."""
    y = torch.arange(n) % classes
    return torch.randn(classes, 64)[y] + 1.5 * torch.randn(n, 64), y


def both_precisions(make_guide, pairs, **options):
    """Histories of a run in float32 and of the same one with the network in bfloat16."""
    histories = []
    for autocast in (None, torch.bfloat16):
        pyro.set_rng_seed(0)
        network = bbb.BayesianMLP([64, 32, 10], prior=dist.Normal(0.0, 0.3))
        model = bbb.BayesianModel(network, likelihoods.Categorical(), num_data=len(pairs[1]))
        guide = make_guide(model)
        histories.append(quiet_fit(model, guide, pairs, autocast=autocast, **options))
        assert {p.dtype for p in guide.parameters()} == {torch.float32}
    return histories


def test_a_network_in_bfloat16_learns_as_well():
    options = {"epochs": 30, "batch_size": 50, "lr": 0.02}
    full, half = both_precisions(bbb.AutoSoftplusNormal, blobs(), **options)
    first, last = full.nll[0], sum(full.nll[-5:]) / 5
    assert last < 0.2 * first
    assert full.nll != half.nll
    # the runs part ways step by step; of what was learned, 2 % are at stake
    assert sum(half.nll[-5:]) / 5 == pytest.approx(last, abs=0.02 * (first - last))
    assert half.kl[-1] == pytest.approx(full.kl[-1], rel=0.02)


@pytest.mark.parametrize("kind", ["softplus_normal", "normal", "low_rank", "full_rank"])
@pytest.mark.parametrize("num_particles", [1, 3])
def test_draws_and_their_densities_keep_single_precision(kind, num_particles):
    """The first step has the same draws: its densities are equal, its likelihood is rounded."""
    make_guide = partial(bbb.guides.make, kind)
    options = {"epochs": 1, "num_particles": num_particles}
    full, half = both_precisions(make_guide, blobs(20), **options)
    # several draws as one vector, and site by site, share the noise in another order
    permuted = kind == "softplus_normal" and num_particles > 1
    for name in ("log_guide",) if permuted else ("kl", "log_prior", "log_guide"):
        found, expected = (getattr(history.steps, name)[0] for history in (half, full))
        assert found == pytest.approx(expected, rel=1e-6)
    # bfloat16 rounds to 2^-9 at most; a layer of 64 products of order 1 errs by less than 0.05
    assert half.steps.nll[0] == pytest.approx(full.steps.nll[0], rel=0.05)
    assert half.steps.nll[0] != full.steps.nll[0]


@pytest.mark.parametrize("estimator", ["reparam", "local_reparam", "flipout", "stl"])
def test_the_likelihood_sees_single_precision(estimator):
    seen, networks = set(), set()

    class Spy(likelihoods.Gaussian):
        def arguments(self, outputs):
            assert outputs.dtype == torch.float32
            seen.add(torch.is_autocast_enabled("cpu"))
            return super().arguments(outputs)

    model, guide = make(Spy(0.5))
    watch = torch.nn.modules.module.register_module_forward_hook(
        lambda module, _, out: networks.add(out.dtype) if module is model.network else None
    )
    with watch:
        quiet_fit(
            model,
            guide,
            data(),
            estimator=estimator,
            autocast=torch.bfloat16,
            callbacks=[lambda event: seen.add(torch.is_autocast_enabled("cpu"))],
        )
    assert seen == {True, False}  # in the steps; in the checks before them and in the callback
    assert networks == {torch.bfloat16, torch.float32}
    assert not torch.is_autocast_enabled("cpu")


def test_a_model_in_double_precision_is_left_in_it():
    torch.set_default_dtype(torch.float64)
    pairs, losses = data(), []
    for autocast in (None, torch.bfloat16):
        pyro.set_rng_seed(0)
        losses.append(quiet_fit(*make(), pairs, autocast=autocast).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


# --- targets in their own unit ---


def intervals(y, y_test, rescaled=None):
    """Coverage of 90 % intervals on the last diabetes patients."""
    x, _ = bbb.data.standardize(torch.tensor(load_diabetes().data).float())
    torch.manual_seed(0)
    likelihood = bbb.likelihoods.Gaussian.learned()
    model = bbb.BayesianModel(bbb.BayesianMLP([10, 20, 1]), likelihood, num_data=300)
    guide = bbb.AutoSoftplusNormal(model)
    bbb.fit(model, guide, (x[:300], y), epochs=60, seed=0, progress=False)
    prediction = bbb.predict(model, guide, x[300:], num_samples=50, seed=0)
    prediction = prediction if rescaled is None else prediction.rescaled(*rescaled)
    lower, upper = prediction.interval(0.9)
    return float(((lower <= y_test) & (y_test <= upper)).double().mean())


def test_targets_far_from_unit_scale_are_warned_of_and_standardisation_helps():
    """Of 142 patients 90 % +- 4 standard errors (10 %) are inside the intervals; else few are."""
    y = torch.tensor(load_diabetes().target).float()[:, None]
    with pytest.warns(UserWarning, match="targets have mean 155 and standard deviation 82.6"):
        assert intervals(y[:300], y[300:]) < 0.5
    scaled, scaling = bbb.data.standardize(y[:300])
    coverage = intervals(scaled, y[300:], (scaling.mean, scaling.scale))
    assert abs(coverage - 0.9) < 0.1
