# SPDX-License-Identifier: Apache-2.0
"""`fit`: it learns, is a function of its seed, leaves no trace, and refuses bad input at once."""

import math
from contextlib import nullcontext
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO, autoguide
from pyro.poutine.runtime import _PYRO_STACK
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import pyro_bbb as bbb
from pyro_bbb import likelihoods
from pyro_bbb._utils.threads import use_threads
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
def test_a_run_is_a_function_of_its_seed_or_else_of_torchs_state(loader):
    runs, pairs = [], data()
    for outside, seed in [(1, 3), (2, 3), (1, 4), (5, None), (5, None), (6, None)]:
        pyro.set_rng_seed(0)
        model, guide = make(likelihoods.Gaussian.learned())
        pyro.set_rng_seed(outside)
        source = DataLoader(TensorDataset(*pairs), 16, shuffle=True) if loader else pairs
        history = quiet_fit(model, guide, source, seed=seed)
        runs.append((history.as_dict() | {"seconds": None}, snapshot(guide), snapshot(model)))
    for (history, *states), (again, *states_again), equal in (
        (runs[0], runs[1], True),
        (runs[0], runs[2], False),
        (runs[3], runs[4], True),
        (runs[4], runs[5], False),
    ):
        assert (history == again) == equal
        assert all(same(a, b) == equal for a, b in zip(states, states_again, strict=True))


@pytest.mark.parametrize("validation", [True, False])
@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_a_run_leaves_the_world_as_it_was(validation, kind):
    model, guide = make(likelihoods.Gaussian.learned())
    guide = guide if kind == "ours" else autoguide.AutoNormal(model)
    pyro.param("kept", torch.ones(2))
    model.network.train(validation)
    pairs, modes = data(), [module.training for module in model.modules()]
    with pyro.validation_enabled(validation):
        before = world()
        quiet_fit(model, guide, pairs)
        assert world() == before
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("when", ["callback", "data", "step"])
def test_a_failing_run_leaves_the_world_as_it_was(when):
    (model, guide), (x, y) = make(), data()
    pyro.param("kept", torch.ones(2))
    if when == "data":
        x[3] = math.nan

    def fail(event):
        raise RuntimeError("stop")

    options = {"callbacks": [fail] if when == "callback" else [], "epochs": 20}
    if when == "step":
        options["lr"] = 1e30
    before = world()
    with pytest.raises((RuntimeError, ValueError, NonFiniteError)):
        quiet_fit(model, guide, (x, y), **options)
    assert world() == before


@pytest.mark.parametrize("optimizer", [None, pyro.optim.SGD({"lr": 1e-3})])
def test_gradients_left_over_from_elsewhere_do_not_count(optimizer):
    pairs, runs = data(), []
    for left_over in (None, 1e3, math.nan):
        pyro.set_rng_seed(0)
        model, guide = make()
        for parameter in guide.parameters():
            parameter.grad = None if left_over is None else torch.full_like(parameter, left_over)
        runs.append(quiet_fit(model, guide, pairs, optimizer=optimizer).loss)
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize(
    ("sizes", "n_jobs", "threads"),
    [((3, 8, 1), None, 1), ((3, 600, 600, 1), None, 3), ((3, 8, 1), 2, 2)],
    ids=["small", "large", "chosen outside"],
)
def test_a_small_network_trains_on_one_thread(sizes, n_jobs, threads):
    """On a busy machine a second thread makes its steps ten times slower, as each waits for it."""
    before, used = torch.get_num_threads(), []
    torch.set_num_threads(3)
    try:
        with use_threads(n_jobs, None) if n_jobs else nullcontext():
            callback = lambda _: used.append(torch.get_num_threads())  # noqa: E731
            quiet_fit(*make(sizes=sizes), data(), epochs=1, batch_size=40, callbacks=[callback])
        assert used == [threads] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


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
    "loader": lambda x, y: DataLoader(Pairs(x, y), 15),
    "stream": lambda x, y: DataLoader(Stream(x, y), 15),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_of_the_same_data_gives_the_same_loss(kind):
    """The loss is that of the mean network's prediction, as the guide has no spread."""
    (x, y), (model, guide) = data(), make(init_rho=-20.0)
    history = quiet_fit(model, guide, KINDS[kind](x, y), batch_size=40, lr=1e-12)
    nlls = -bbb.predict_mean(model, guide, x).log_prob(y)
    assert history.nll == pytest.approx([nlls.sum().item()] * 2, rel=1e-4)
    if kind in ("loader", "stream"):  # its own batches, in a fixed order
        assert history.steps.kl_weight == pytest.approx([15 / 40, 15 / 40, 10 / 40] * 2)
        batch_nlls = [batch.sum().item() for batch in nlls.split(15)]
        assert history.steps.nll == pytest.approx(batch_nlls * 2, rel=1e-4)


# --- bad input is refused before any parameter changes ---


X, Y = torch.randn(40, 3), torch.randn(40)


def assert_refused(pair, pairs, error, message, **options):
    before = snapshot(pair[1])
    with pytest.raises(error, match=message):
        quiet_fit(*pair, pairs, **options)
    assert same(before, snapshot(pair[1]))


LABELS, BINARY, COUNTS = likelihoods.Categorical, likelihoods.Bernoulli, likelihoods.Poisson


@pytest.mark.parametrize(
    ("likelihood", "y", "message"),
    [
        (LABELS, torch.full((40,), 3), r"y must hold labels in \[0, 2\], got 3"),
        (LABELS, torch.arange(-1, 39).clamp(max=0), "got -1"),
        (LABELS, torch.zeros(40), "y must hold integer class labels, got dtype torch.float32"),
        (LABELS, torch.zeros(40, 1).long(), r"expected y of shape \[n\], got \[40, 1\]"),
        (BINARY, torch.full((40,), 0.5), "y must hold 0 and 1 only, got 0.5"),
        (COUNTS, torch.full((40,), -2), "y must hold counts.*got -2"),
        (COUNTS, torch.full((40,), 1.5), "y must hold counts.*got 1.5"),
    ],
)
def test_targets_outside_the_likelihoods_range_are_refused(likelihood, y, message):
    outputs = 3 if likelihood is LABELS else 1
    assert_refused(make(likelihood(), sizes=(3, 8, outputs)), (X, y), ValueError, message)


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


def test_a_pyro_optimiser_keeps_its_own_rates():
    model, guide = make()
    before = snapshot(guide)
    optim = pyro.optim.SGD({"lr": 0.0})
    quiet_fit(model, guide, data(), optimizer=optim, lr=1.0)
    assert same(before, snapshot(guide))
    quiet_fit(model, guide, data(), optimizer=pyro.optim.ClippedAdam({"lr": 0.1}))
    assert not any(torch.equal(before[name], value) for name, value in snapshot(guide).items())


def test_progress_false_prints_nothing_and_true_shows_the_loss(capfd):
    quiet_fit(*make(), data())
    assert capfd.readouterr() == ("", "")
    quiet_fit(*make(), data(), progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "epoch 2/2" in err and "neg_elbo=" in err and "6/6" in err


# --- guides of others ---

STOCK = {
    "AutoNormal": autoguide.AutoNormal,
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


@pytest.mark.parametrize(
    ("guide", "loss"),
    [(mean_field_by_hand, Trace_ELBO()), (weighing_by_hand, TraceMeanField_ELBO)],
)
def test_a_guide_function_trains_and_keeps_its_parameters_in_the_store(guide, loss):
    torch.set_default_dtype(torch.float64)
    model, _ = make(n=100)
    history = quiet_fit(model, guide, data(100), epochs=30, batch_size=30, lr=0.03, loss=loss)
    assert sum(history.loss[-5:]) < 0.8 * sum(history.loss[:5])
    assert len(pyro.get_param_store()) == 8
    assert history.steps.kl_weight == pytest.approx([0.3, 0.3, 0.3, 0.1] * 30)
    rows = zip(history.loss, history.kl, history.nll, strict=True)
    assert all(value == pytest.approx(kl + nll, rel=1e-12) for value, kl, nll in rows)


def dropping_the_weight(x, y=None, kl_weight=1.0):
    mean_field_by_hand(x, y)


def without_a_latent(x, y=None, weight=1.0):
    with poutine.block(hide=["network.fc2.bias"]):
        mean_field_by_hand(x, y)


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (dropping_the_weight, "'network.fc1.weight' is scaled differently.*kl_weight"),
        (without_a_latent, r"guide must.*every latent.*\['network.fc2.bias'\]"),
        ((3, 1), "guide must draw latents that fit the model: .*shapes cannot be multiplied"),
        ((3, 1, 8, 1), "guide must draw latents that fit the model: expected y of shape"),
        ((3, 5, 1), r"guide must draw 'network.fc1.weight' of.* \[8, 3\], it draws \[5, 3\]"),
    ],
)
def test_a_guide_that_does_not_fit_the_model_is_refused(guide, message):
    guide = make(sizes=guide)[1] if isinstance(guide, tuple) else guide
    with pytest.raises(ValueError, match=message):
        quiet_fit(make()[0], guide, data())


# --- loaders ---


def test_every_batch_of_a_loader_is_checked():
    y = torch.zeros(20, 1)
    y[15:] = 7.0
    loader = DataLoader(TensorDataset(torch.randn(20, 3), y), batch_size=10)
    with pytest.raises(ValueError, match="y must hold 0 and 1 only, got 7"):
        quiet_fit(*make(likelihoods.Bernoulli(), n=20), loader)


def test_a_stream_that_can_be_read_once_loses_no_batch():
    class Once(IterableDataset):
        rows = iter([(torch.randn(3), torch.ones(1)) for _ in range(8)])

        def __iter__(self):
            return self.rows

    loader = DataLoader(Once(), batch_size=2)
    history = quiet_fit(*make(likelihoods.Bernoulli(), n=8), loader, epochs=1)
    assert len(history.steps) == 4


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


@pytest.mark.parametrize(("kind", "num_particles"), [("softplus_normal", 3), ("low_rank", 1)])
def test_draws_and_their_densities_keep_single_precision(kind, num_particles):
    """The first step has the same draws: its densities are equal, its likelihood is rounded."""
    make_guide = partial(bbb.guides.make, kind)
    options = {"epochs": 1, "num_particles": num_particles}
    full, half = both_precisions(make_guide, blobs(20), **options)
    for name in ("kl", "log_prior", "log_guide"):
        actual, expected = (getattr(history.steps, name)[0] for history in (half, full))
        assert actual == pytest.approx(expected, rel=1e-6)
    # bfloat16 rounds to 2^-9 at most; a layer of 64 products of order 1 errs by less than 0.05
    assert half.steps.nll[0] == pytest.approx(full.steps.nll[0], rel=0.05)
    assert half.steps.nll[0] != full.steps.nll[0]


@pytest.mark.parametrize("estimator", ["reparam", "local_reparam", "flipout", "stl"])
def test_the_likelihood_sees_single_precision(estimator):
    seen, networks, epochs = set(), set(), []

    class Spy(likelihoods.Gaussian):
        def arguments(self, outputs):
            seen.add(outputs.dtype)
            return super().arguments(outputs)

    model, guide = make(Spy(0.5))
    watch = torch.nn.modules.module.register_module_forward_hook(
        lambda module, _, out: networks.add(out.dtype) if module is model.network else None
    )

    def epoch_end(event):
        epochs.append(networks.copy())
        networks.clear()
        bbb.predict_mean(model, guide, X)
        assert networks == {torch.float32}  # only steps are in lower precision
        networks.clear()

    options = {"estimator": estimator, "autocast": torch.bfloat16, "callbacks": [epoch_end]}
    with watch:
        quiet_fit(model, guide, data(), **options)
    assert epochs[1] == {torch.bfloat16} and seen == {torch.float32}


# --- targets in their own unit ---


def test_targets_far_from_unit_scale_are_warned_of():
    (model, guide), (x, y) = make(), data()
    with pytest.warns(UserWarning, match="targets have mean 155 and standard deviation .*82.6"):
        quiet_fit(model, guide, (x, 155 + 82.6 * (y - y.mean()) / y.std()), lr=1e-3)
