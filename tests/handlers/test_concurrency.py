# SPDX-License-Identifier: Apache-2.0
"""Trainings in threads and in turns give what each gives alone, and leave the world as it was."""

import contextlib
import inspect
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from functools import partial
from itertools import cycle, product, zip_longest

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import torch._dynamo  # an optimiser imports it at its first step, which adds filters of warnings
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.optim import Adam
from pyro.poutine import runtime
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pyro_bbb as bbb
from pyro_bbb import likelihoods
from pyro_bbb._utils.context import seeded
from pyro_bbb._utils.locking import GLOBAL_LOCK, locked
from pyro_bbb.estimators import ESTIMATORS
from pyro_bbb.sklearn import BayesianClassifier, BayesianRegressor
from pyro_bbb.training.objectives import NonFiniteError
from tests._support.bad_input import Row, snapshot
from tests._support.bad_input import same as alike
from tests.api import bad_input_functions, bad_input_models, bad_input_results

QUIET = {"epochs": 3, "batch_size": 8, "progress": False}
WITH_BASELINE = QUIET | {"epochs": 9}  # of at least 25 steps
PAIR = torch.linspace(-1, 1, 20)[:, None], torch.linspace(-1, 1, 20)[:, None].cos()


def make(seed=0, likelihood=None, width=6, guide=bbb.AutoSoftplusNormal, dropout=False):
    """A small regression, the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        activation = (lambda: nn.Dropout(0.5)) if dropout else nn.ReLU
        network = bbb.BayesianMLP([1, width, 1], activation=activation)
        model = bbb.BayesianModel(network, likelihood or likelihoods.Gaussian(0.3), num_data=20)
        return model, guide(model)


def state(*modules):
    return [x.clone() for module in modules for x in module.state_dict().values()]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def in_threads(*functions):
    """Return results of functions that all start at once, each in a thread."""
    results, barrier = [None] * len(functions), threading.Barrier(len(functions))

    def run(i):
        barrier.wait()
        results[i] = functions[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


# --- threads ---


def training(seed, **options):
    """A training to be run, of a model made here: what is made in threads draws as they come."""
    model, guide = make(seed, width=4 + seed)

    def run():
        history = bbb.fit(model, guide, PAIR, seed=seed, **QUIET | options)
        return history.loss, state(guide, model)

    return run


def fitted(seed, **options):
    return training(seed, **options)()


def trained(seed):
    model, guide = make(seed)
    bbb.fit(model, guide, PAIR, seed=seed, **QUIET)
    return model, guide


def test_trainings_in_threads_give_what_each_gives_alone():
    options = [{"estimator": "flipout"}, {"loss": "mean_field"}, {"num_particles": 2}, {}]
    alone = [fitted(seed, **how) for seed, how in enumerate(options)]
    for _ in range(3):
        jobs = [training(seed, **how) for seed, how in enumerate(options)]
        together = in_threads(*jobs)
        for (loss, parameters), (expected, reference) in zip(together, alone, strict=True):
            assert loss == expected and same(parameters, reference)


def test_a_failure_in_one_thread_leaves_the_other_alone():
    expected, run, doomed = fitted(1), training(1), make(2)

    def fail(event):
        raise KeyboardInterrupt

    def failing():
        for _ in range(5):
            with contextlib.suppress(KeyboardInterrupt):
                bbb.fit(*doomed, PAIR, seed=2, callbacks=[fail], **QUIET)

    before = world()
    (loss, parameters), _ = in_threads(run, failing)
    assert loss == expected[0] and same(parameters, expected[1])
    assert world() == before


def test_a_turn_is_for_one_thread_which_may_go_on():
    inside, most = [], []

    @locked
    def outer(depth):
        """Return the depth of the recursion."""
        inside.append(depth)
        most.append(len({threading.get_ident(), *waiting()}))
        reached = outer(depth - 1) if depth else 0
        inside.pop()
        return reached + 1

    def waiting():
        return [] if len(inside) <= 4 else ["another thread is inside"]

    assert outer.__doc__ == "Return the depth of the recursion."
    assert in_threads(*[lambda: outer(3)] * 8) == [4] * 8
    assert set(most) == {1}

    @locked
    def fail():
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        fail()
    assert in_threads(lambda: GLOBAL_LOCK.acquire(timeout=5) and GLOBAL_LOCK.release() is None) == [
        True
    ]


# --- every public function: tests/api/test_bad_input checks that the tables lack none ---

# they neither run Pyro nor draw, are networks without a model, or draw pictures
WITHOUT_LOCK = "data ScaleMixtureNormal likelihoods metrics plots priors Verdict Evaluation".split()
WITHOUT_LOCK += "BayesianMLP BayesianLeNet5 BayesianLinear BayesianConv2d".split()
DRAWS = ["networks", "check"]  # whose results all depend on the random state
ROWS: dict[str, list[Row]] = {"without a table": []}
for row in (*bad_input_models.ROWS, *bad_input_functions.ROWS, *bad_input_results.ROWS):
    owner = row.of.split()[0].split(".")[0]
    if not row.fails and owner not in WITHOUT_LOCK:
        ROWS.setdefault(owner, []).append(row)


@pytest.fixture
def outside_the_lock(monkeypatch):
    """Uses of Pyro's stack, and of torch's common state, by a thread that has not the lock."""
    uses = []

    def watch(owner, names):
        for name in names.split():
            monkeypatch.setattr(owner, name, watched(getattr(owner, name), name))

    def watched(function, name):
        def call(*args, **options):
            nothing = any(isinstance(x, Tensor) and x.is_meta for x in args[:1])
            if not (nothing or options.get("generator") or GLOBAL_LOCK._is_owned()):
                uses.append(name)
            return function(*args, **options)

        return call

    watch(Messenger, "__enter__")
    watch(runtime, "default_process_message")
    watch(torch, "set_num_threads rand rand_like randn randn_like randint randint_like randperm")
    watch(torch, "bernoulli normal multinomial poisson")
    watch(torch.random, "get_rng_state set_rng_state manual_seed")
    watch(Tensor, "normal_ uniform_ bernoulli_ exponential_ random_")
    return uses


def of_row(row):
    """A call of a row's good arguments, made now: its result, and what it is there to change."""
    with seeded(0):
        arguments = row.good()
    if "seed" in inspect.signature(row.function).parameters:
        arguments["seed"] = 1
    return lambda: [row.function(**arguments), *(arguments[name] for name in row.changes)]


def without_table():
    """Calls of what the tables exempt; scikit-learn's checks try the estimators."""
    (model, guide), (x, y) = trained(1), PAIR
    linear = bbb.bayesianize(nn.Linear(1, 1))
    shared = bbb.BayesianModel(linear, likelihoods.Gaussian(), num_data=20)
    loss, ensemble = bbb.negative_elbo(model, guide), bbb.to_ensemble(model, guide, num_samples=3)

    def of_guide(guide):
        with contextlib.suppress(TypeError, RuntimeError):  # no Normal, no centre, not trained
            guide(x, y), guide.sampler()(3)
            return [guide.median(), guide.output_moments(shared, x)]

    def of_estimator(cls, targets):
        new = cls(hidden_sizes=(4,), epochs=2, num_samples=5, random_state=0)
        new.fit(x.numpy(), targets).partial_fit(x.numpy(), targets)
        new.sample_y(x.numpy(), 2)
        probs = [new.predict_proba(x.numpy())] if cls is BayesianClassifier else []
        return [*new.predict_uncertainty(x.numpy()), *probs]

    def estimated(estimator):
        with estimator():
            return loss(x, y)

    return [
        *(partial(of_guide, bbb.guides.make(name, shared)) for name in bbb.guides.GUIDES),
        partial(of_estimator, BayesianRegressor, y[:, 0].numpy()),
        partial(of_estimator, BayesianClassifier, (y[:, 0] > 0.7).numpy()),
        *(partial(estimated, x) for x in (bbb.flipout, bbb.local_reparameterization)),
        lambda: [ensemble(x), ensemble.sample_means(x)],
        lambda: next(iter(bbb.prediction.posterior_draws(model, guide, x, 3))),
    ]


@pytest.mark.parametrize("owner", ROWS)
def test_every_public_function_in_threads_gives_what_it_gives_alone(owner, outside_the_lock):
    """Three threads call all of a group, while a fourth one predicts with a seed.

    They share the arguments that a call does not change. Compared are results that do not depend
    on torch's random state.
    """
    rows = ROWS[owner]
    shared = [None if row.changes else of_row(row) for row in rows] or without_table()
    model, guide = trained(1)

    def predicted():
        return [bbb.predict(model, guide, PAIR[0], num_samples=9, seed=4).components.loc]

    def calls():
        return [call or of_row(row) for call, row in zip_longest(shared, rows)]

    def settled(value):
        with GLOBAL_LOCK:  # a shared model is in evaluation mode while another thread predicts
            return snapshot(value)

    def results(calls):
        return [settled(call()) for call in calls]

    with Messenger():  # Pyro's statements reach its stack only where a handler is
        jobs = calls()
        outside_the_lock.clear()
        results(jobs)
    assert outside_the_lock == []
    with seeded(1):
        expected = results(calls())
    with seeded(2):
        reseeded, prediction = results(calls()), predicted()
    fixed = [alike(*pair) for pair in zip(expected, reseeded, strict=True)]
    assert any(fixed) or owner in DRAWS
    threes = [partial(results, calls()) for _ in range(3)]
    ignored = {"torch": None, "warnings": None}  # scikit-learn's own checks change the filters
    before, interval = world(model) | ignored, sys.getswitchinterval()
    outside_the_lock.clear()
    sys.setswitchinterval(1e-5)
    try:
        with warnings.catch_warnings():
            *runs, predictions = in_threads(
                *threes, lambda: [predicted() for _ in range(3 * len(shared))]
            )
    finally:
        sys.setswitchinterval(interval)
    assert outside_the_lock == []
    for values in runs:
        triples = zip(values, expected, fixed, strict=True)
        assert all(alike(value, target) for value, target, is_fixed in triples if is_fixed)
    assert all(same(result, prediction) for result in predictions)
    assert world(model) | ignored == before


def test_backward_passes_that_compute_again_take_turns():
    """They run the model outside of the loss that holds the lock."""

    def job(seed):
        model, guide = make(seed, width=20)
        layer, forward = model.network.fc1, model.network.fc1.forward
        options = {"use_reentrant": False, "context_fn": model.checkpoint_contexts}
        layer.forward = partial(checkpoint, forward, preserve_rng_state=False, **options)
        loss = bbb.negative_elbo(model, guide)

        def gradients():
            for _ in range(20):
                with seeded(seed):
                    value = loss(*PAIR)
                value.backward()
            return [parameter.grad for parameter in guide.parameters()]

        return gradients

    alone = [job(seed)() for seed in range(4)]
    together = in_threads(*[job(seed) for seed in range(4)])
    assert all(same(a, b) for a, b in zip(together, alone, strict=True))
    assert _PYRO_STACK == []


# --- forks ---


class Paused(likelihoods.Gaussian):
    """Waits in its fifth use, in the middle of a training."""

    def __init__(self):
        super().__init__(0.3)
        self.uses, self.reached, self.go_on = 0, threading.Event(), threading.Event()

    def arguments(self, outputs):
        self.uses += 1
        if self.uses == 5:
            self.reached.set()
            self.go_on.wait(60)
        return super().arguments(outputs)


def exit_code_of_fork(function):
    """Run a function in a forked process: 0 if it returns true, -1 if it has not returned."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if function() else 1)
        except BaseException:
            traceback.print_exc()
            os._exit(2)
    for _ in range(600):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


@pytest.mark.slow
@pytest.mark.parametrize("validation", [True, False])
def test_a_process_forked_while_another_thread_trains_is_as_without_it(validation):
    (model, guide), expected = trained(1), fitted(2)
    paused, its_guide = make(3, likelihood := Paused())
    prediction = bbb.predict(model, guide, PAIR[0], num_samples=9, seed=4).components.loc
    pyro.param("theirs", torch.ones(2))

    def forked():
        store, handlers = pyro.get_param_store(), list(_PYRO_STACK)
        switch = pyro.settings.get("validate_poutine")
        clean = handlers == [] and [*store] == ["theirs"] and switch is validation
        locs = bbb.predict(model, guide, PAIR[0], num_samples=9, seed=4).components.loc
        loss, parameters = fitted(2)
        own = bbb.predict(paused, its_guide, PAIR[0], num_samples=2, seed=4).mean.isfinite().all()
        idle = paused._pyro_context.active == 0 and not paused._pyro_context.cache
        same_run = loss == expected[0] and same(parameters, expected[1])
        return clean and torch.equal(locs, prediction) and same_run and own and idle

    with pyro.validation_enabled(validation):
        options = QUIET | {"engine": "eager"}
        thread = threading.Thread(target=lambda: bbb.fit(paused, its_guide, PAIR, **options))
        thread.start()
        assert likelihood.reached.wait(60)
        code = exit_code_of_fork(forked)
        likelihood.go_on.set()
        thread.join(60)
        assert code == 0


@pytest.mark.slow
def test_a_process_forked_inside_a_handler_of_its_own_thread_keeps_it():
    def forked():
        with GLOBAL_LOCK:
            return len(_PYRO_STACK) == 1 and bool(torch.isfinite(fitted(1)[1][0]).all())

    with poutine.block(), GLOBAL_LOCK:
        assert exit_code_of_fork(forked) == 0


# --- one after the other, step by step ---


def agree(actual, expected):
    return actual[0] == expected[0] and same(actual[1], expected[1])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_callback_may_train_and_predict(estimator):
    expected, inner = fitted(3, estimator=estimator), fitted(1)
    model, guide = trained(2)
    prediction = bbb.predict(model, guide, PAIR[0], num_samples=5, seed=1).components.loc
    seen = []

    def callback(event):
        seen.append(agree(fitted(1), inner))
        locs = bbb.predict(model, guide, PAIR[0], num_samples=5, seed=1).components.loc
        seen.append(torch.equal(locs, prediction))

    assert agree(fitted(3, estimator=estimator, callbacks=[callback]), expected)
    assert seen == [True] * 6


def test_a_callback_may_take_steps_of_a_guide_with_parameters_in_pyros_store():
    def svi():
        def model():
            pyro.sample("z", dist.Normal(0.0, 1.0))

        def guide():
            loc = pyro.param("loc", torch.tensor(3.0))
            pyro.sample("z", dist.Normal(loc, 0.5))

        return SVI(model, guide, Adam({"lr": 0.1}), Trace_ELBO())

    def value():
        return pyro.param("loc").item()

    def step(*_):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            inference.step()

    inference = svi()
    for _ in range(4):
        step()
    expected = value()
    pyro.clear_param_store()
    inference = svi()
    step()
    bbb.fit(*make(1), PAIR, callbacks=[step], **QUIET)
    assert value() == expected


# --- what belongs to everybody ---


def world(*modules):
    """All that calls could change for others."""
    store = pyro.get_param_store()
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),
        "random": random.getstate(),
        "dtype": torch.get_default_dtype(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "torch validates": torch.distributions.Distribution._validate_args,
        "settings": pyro.settings.get(),
        "parameters": {name: (id(x), x.tolist()) for name, x in store._params.items()},
        "constraints": dict(store._constraints),
        "handlers": list(_PYRO_STACK),
        "modes": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        "warnings": [str(f) for f in warnings.filters],
        "training": [layer.training for module in modules for layer in module.modules()],
        "turn": in_threads(
            lambda: GLOBAL_LOCK.acquire(timeout=5) and GLOBAL_LOCK.release() is None
        ),
    }


class Failing(likelihoods.Gaussian):
    """Raises an error, or gives NaN, in its use of this number."""

    def __init__(self, use, error=None):
        super().__init__(0.3)
        self.use, self.error, self.uses = use, error, 0

    def arguments(self, outputs):
        self.uses += 1
        arguments = super().arguments(outputs)
        if self.uses == self.use:
            if self.error is not None:
                raise self.error("broken")
            return arguments | {"loc": arguments["loc"] * float("nan")}
        return arguments


def raising(error):
    def function(*args, **kwargs):
        raise error("broken")

    return function


def failing_data():
    x, y = (tensor.clone() for tensor in PAIR)
    x[3] = float("nan")
    return x, y


INTERRUPT, BROKEN = KeyboardInterrupt, RuntimeError
STAGES = {
    "data": ({"data": failing_data()}, ValueError),
    "schedule": ({"kl_schedule": raising(BROKEN)}, RuntimeError),
    "callback": ({"callbacks": [raising(BROKEN)]}, RuntimeError),
    "interrupted callback": ({"callbacks": [raising(INTERRUPT)]}, KeyboardInterrupt),
    "not a number later": ({"likelihood": Failing(34)}, NonFiniteError),
    "a baseline": ({"likelihood": Failing(9, BROKEN)}, RuntimeError),
    "a step": ({"likelihood": Failing(34, BROKEN)}, RuntimeError),
    "interrupted step": ({"likelihood": Failing(34, INTERRUPT)}, KeyboardInterrupt),
    "no failure": ({}, None),
}


ENDS = {*zip(STAGES, cycle(ESTIMATORS), strict=False), *product(["a step"], ESTIMATORS)}


@pytest.mark.parametrize(("stage", "estimator"), sorted(ENDS))
def test_training_that_ends_anywhere_leaves_the_world_as_it_was(stage, estimator):
    options, error = STAGES[stage]
    options = dict(options)
    likelihood, pair = options.pop("likelihood", None), options.pop("data", PAIR)
    if likelihood is not None:
        likelihood.uses = 0
    model, guide = make(1, likelihood, dropout=True)
    model.network.eval()
    pyro.param("theirs", torch.ones(2), constraint=dist.constraints.positive)
    before = world(model, guide)
    with pytest.raises(error) if error else contextlib.suppress(NonFiniteError):
        bbb.fit(model, guide, pair, seed=0, **WITH_BASELINE | {"estimator": estimator} | options)
    assert world(model, guide) == before


@pytest.mark.parametrize("validation", [True, False])
def test_a_failure_restores_whatever_was_set(validation):
    model, guide = make(1, Failing(34, INTERRUPT), guide=AutoNormal)
    pyro.param("theirs", torch.ones(2))
    with pyro.validation_enabled(validation), torch.no_grad():
        before = world(model)
        with torch.enable_grad(), pytest.raises(KeyboardInterrupt):
            bbb.fit(model, guide, PAIR, seed=0, autocast=torch.bfloat16, **WITH_BASELINE)
        assert world(model) == before


PREDICTIONS = {
    "draws": (lambda model, guide: bbb.predict(model, guide, PAIR[0], seed=0), 1),
    "batches": (lambda model, guide: bbb.predict(model, guide, PAIR[0], batch_size=9, seed=0), 3),
    "one input": (lambda model, guide: bbb.predict(model, guide, PAIR[0][:1], seed=0), 1),
    "outputs": (
        lambda model, guide: bbb.predict(model, guide, PAIR[0], seed=0, estimator="local_reparam"),
        1,
    ),
    "mean": (lambda model, guide: bbb.predict_mean(model, guide, PAIR[0]), 1),
    "check": (lambda model, guide: model.check(*PAIR), 1),
    "nuts": (
        lambda model, guide: bbb.run_nuts(
            model, PAIR, num_samples=3, warmup_steps=3, max_tree_depth=2, seed=0, progress=False
        ),
        2,
    ),
}


@pytest.mark.parametrize("error", [None, BROKEN, INTERRUPT], ids=["whole", "broken", "interrupted"])
@pytest.mark.parametrize("verb", PREDICTIONS)
def test_predictions_and_chains_that_end_anywhere_leave_the_world_as_it_was(verb, error):
    call, use = PREDICTIONS[verb]
    model, guide = make(1)
    model.network.fc1.eval()
    model.likelihood = Failing(0, error)
    pyro.param("theirs", torch.ones(2))
    call(model, guide)
    count, model.likelihood.uses = model.likelihood.uses, 0
    model.likelihood.use = min(use, count)
    torch.set_num_threads(2)
    before = world(model, guide)
    if error is None:
        model.likelihood.use = 0
        call(model, guide)
    else:
        with contextlib.suppress(RuntimeError):  # what broke as a batch may be run one by one
            with pytest.raises(error) if error is INTERRUPT else contextlib.nullcontext():
                call(model, guide)
    assert model.likelihood.uses >= 1
    assert world(model, guide) == before
    torch.set_num_threads(1)


def test_saving_and_loading_leave_the_world_as_it_was(tmp_path):
    model, guide = make(1)
    model.network.fc1.eval()
    pyro.param("theirs", torch.ones(2))
    before = world(model, guide)
    place = tmp_path / "saved"
    bbb.save(place, model, guide)
    assert world(model, guide) == before
    bbb.load(place)
    assert world(model, guide) == before
    for path in place.iterdir():
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(bbb.LoadError):
            bbb.load(place)
        path.write_bytes(content)
        assert world(model, guide) == before
    with pytest.raises(FileNotFoundError):
        bbb.load(tmp_path / "nowhere")
    with pytest.raises((OSError, ValueError)):
        bbb.save(place / next(place.iterdir()).name / "below", model, guide)
    assert world(model, guide) == before
