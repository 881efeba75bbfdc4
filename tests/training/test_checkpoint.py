# SPDX-License-Identifier: Apache-2.0
"""Interrupted training goes on to the bit, however it ended, and no file on disk is ever half."""

import errno
import math
import os
import shutil
import signal
import threading
from functools import partial
from itertools import cycle
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import autoguide
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import pyro_bbb as bbb
from pyro_bbb import CheckpointError, LoadError, likelihoods
from pyro_bbb.persistence import archive as _archive
from tests._support.crash_injection import Crash, crash_at
from tests._support.guide_names import ANY_MODEL

X = torch.sin(torch.arange(120.0).view(40, 3) ** 2)
Y = X.sum(1)


class Stop(Exception):
    """As if the process ended in a callback."""


def stop_after(epoch):
    def callback(event):
        if event.epoch == epoch:
            raise Stop

    return callback


def plain():
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))


def make(guide="softplus_normal", *, layers=plain, prior=None, likelihood=None, network=None):
    """A model and a guide, the same at each call."""
    pyro.set_rng_seed(0)
    weights = prior() if prior else dist.Normal(0.0, 1.0)
    network = network() if network else bbb.bayesianize(layers(), weights)
    likelihood = likelihood or likelihoods.Gaussian.learned
    model = bbb.BayesianModel(network, likelihood(), num_data=40)
    return model, bbb.guides.make(guide, model) if isinstance(guide, str) else guide(model)


def fit(pair, folder=None, *, data=(X, Y), **options):
    """Four epochs of three steps, the last of them of fewer examples."""
    options = {"epochs": 4, "batch_size": 16, "lr": 0.01, "progress": False, **options}
    return bbb.fit(*pair, data, checkpoint=folder, **options)


def state(modules):
    """Parameters and buffers."""
    return [value.detach().clone() for module in modules for value in module.state_dict().values()]


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


def record(history):
    return history.as_dict() | {"seconds": None, "interrupted": None}


def content(folder):
    """All that a checkpoint holds, but for how long things took."""
    spec, tensors = _archive.read(Path(folder), "fit")
    tensors.pop("history.seconds")
    spec["progress"].pop("seconds")
    return spec, {name: value.tolist() for name, value in tensors.items()}


# --- resumed in this process ---


def shuffled(**options):
    return lambda: DataLoader(TensorDataset(X, Y), 16, shuffle=True, **options)


def own_generator():
    return shuffled(generator=torch.Generator().manual_seed(3))()


def augmented():
    """New noise in every batch, between the draws of the steps."""

    def collate(pairs):
        x, y = (torch.stack(values) for values in zip(*pairs, strict=True))
        return x + 0.1 * torch.randn_like(x), y

    return shuffled(collate_fn=collate)()


def batch_norm():
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 1))


def pruned(model):
    return bbb.prune(bbb.AutoSoftplusNormal(model), 0.5)


def cold(batch, num_batches):
    return 0.25


MAKES = {
    **{guide: {"guide": guide} for guide in ANY_MODEL},
    "stock": {"guide": autoguide.AutoNormal},
    "pruned": {"guide": pruned},
    "buffers": {"layers": batch_norm},
    "learned prior": {"prior": bbb.priors.LearnedScaleMixture},
    "latent noise": {"likelihood": partial(likelihoods.Gaussian, dist.LogNormal(0.0, 1.0))},
}
OPTIONS = {
    "flipout": {"estimator": "flipout", "num_particles": 2},
    "functions": {"kl_schedule": cold, "lr_schedule": math.cos},
    "momentum": {"optimizer": partial(torch.optim.SGD, momentum=0.9), "lr": 1e-4},
    "bfloat16": {"autocast": torch.bfloat16},
    "seed": {"seed": 7},
    "accumulate": {"accumulate": 2},
    "captured": {"engine": "compiled"},
}
LOADERS = {"loader": shuffled(), "generator": own_generator, "noise": augmented}
LOADERS["workers"] = shuffled(num_workers=1, multiprocessing_context="fork")
RESUMED = {  # model and guide, options, data
    **{name: (make_options, {}, lambda: (X, Y)) for name, make_options in MAKES.items()},
    **{name: ({}, options, lambda: (X, Y)) for name, options in OPTIONS.items()},
    **{name: ({}, {}, loader) for name, loader in LOADERS.items()},
    "double": ({}, {}, lambda: (X.double(), Y.double())),
}


@pytest.mark.parametrize(("name", "every"), list(zip(RESUMED, cycle([None, 2, 4]), strict=False)))
def test_every_run_resumes_to_the_bit(tmp_path, name, every):
    """Two steps after a checkpoint that is in the middle of an epoch, or three after an end."""
    make_options, options, data = RESUMED[name]
    torch.set_default_dtype(torch.float64 if name == "double" else torch.float32)
    build = partial(make, **make_options)
    calm = build()
    expected = fit(calm, data=data(), **options)
    following = torch.rand(())
    options = options | {"checkpoint_every": every}
    with pytest.raises(Stop):
        fit(build(), tmp_path, data=data(), callbacks=[stop_after(2)], **options)
    for _ in range(2):  # the second time, it is finished
        again = build()
        torch.manual_seed(99)
        history = fit(again, tmp_path, data=data(), **options)
        assert same(state(again), state(calm))
        assert record(history) == record(expected)
        assert "seed" in options or torch.equal(torch.rand(()), following)


def test_a_finished_run_comes_back_without_a_step_or_a_callback(tmp_path):
    first = fit(make(), tmp_path)
    before = content(tmp_path)
    again = fit(make(), tmp_path, callbacks=[stop_after(0)])
    assert record(again) == record(first) and again.seconds == first.seconds
    assert content(tmp_path) == before


def test_a_run_that_a_callback_ended_is_finished(tmp_path):
    callbacks = [lambda event: event.epoch == 1]
    pair = make()
    history = fit(pair, tmp_path, callbacks=callbacks)
    again = make()
    assert record(fit(again, tmp_path)) == record(history) and len(history) == 2
    assert same(state(pair), state(again))


# --- written as one ---


@pytest.mark.slow
def test_a_crash_at_any_call_that_writes_is_resumed_from(tmp_path):
    pair = make()
    expected = fit(pair, epochs=1)
    for number in range(100):
        folder = tmp_path / str(number)
        with pytest.MonkeyPatch.context() as patch:
            left = crash_at(patch, number, of_paths=("unlink", "open", "mkdir"))
            try:
                fit(make(), folder, epochs=1, checkpoint_every=2)
            except Crash:
                pass
        again = make()
        assert record(fit(again, folder, epochs=1, checkpoint_every=2)) == record(expected)
        assert same(state(again), state(pair))
        if left[0] >= 0:
            break
        assert len(list(folder.iterdir())) == 2
    assert 25 < number < 100


def full_from(number):
    left, real = [number], os.fsync

    def fsync(descriptor):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    return fsync


@pytest.mark.parametrize("number", [6])  # a write makes four such calls
def test_a_full_disk_keeps_the_state_in_memory_and_the_checkpoint_before(tmp_path, number):
    folder, states = tmp_path / "run", {}

    def note(event):
        states[event.epoch] = state((event.model, event.guide))

    pair = make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full_from(number))
        with pytest.raises(
            CheckpointError, match=f"{folder} cannot be written.*No space"
        ) as caught:
            fit(pair, folder, callbacks=[note])
    epochs = number // 4
    assert len(caught.value.history) == epochs and len(caught.value.history.steps) == 3 * epochs
    assert same(state(pair), states[epochs - 1])
    spec, tensors = _archive.read(folder, "fit")
    assert spec["progress"]["epoch"] == epochs - 1
    assert len(tensors["history.loss"]) == epochs - 1
    assert not any(path.name.startswith(".") for path in folder.iterdir())

    caught.value.retry()  # there is room again
    assert _archive.read(folder, "fit")[0]["progress"]["epoch"] == epochs
    again = make()
    history = fit(again, folder)
    calm = make()
    assert record(history) == record(fit(calm))
    assert same(state(again), state(calm))


def test_a_folder_that_cannot_be_written_is_found_out_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("mine")
    pair = make()
    before = state(pair)
    for path, what in ((tmp_path / "file", "read"), (tmp_path / "file" / "run", "read")):
        with pytest.raises(CheckpointError, match=f"{path} cannot be {what}"):
            fit(pair, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        with pytest.raises(CheckpointError, match="cannot be written.*Permission denied") as caught:
            fit(pair, tmp_path / "run")
    assert len(caught.value.history.steps) == 0
    assert same(state(pair), before)


def refuse(*_, **__):
    raise PermissionError(errno.EACCES, "Permission denied")


# --- of another run ---


def frozen(model):
    guide = bbb.AutoSoftplusNormal(model)
    next(guide.parameters()).requires_grad_(False)
    return guide


def wide():
    return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1))


OTHER_OPTIONS = [
    ({"epochs": 5}, "epochs: 4 there, 5 here"),
    ({"batch_size": 8}, "batch_size: 16 there, 8 here"),
    ({"lr_schedule": math.sqrt}, "lr_schedule: cosine there, math.sqrt here"),
    ({"kl_schedule": cold}, r"kl_schedule: .*'base': 'uniform'.*'base': '.*\.cold'"),
    ({"loss": "mean_field"}, "loss: trace there, mean_field here"),
    ({"autocast": torch.bfloat16}, "autocast: None there, torch.bfloat16 here"),
    ({"optimizer": torch.optim.SGD}, r"optimizer: Adam\(.*there, SGD\("),
    ({"data": (X + 1e-3, Y)}, "content of data: "),
    ({"data": shuffled()()}, "data: None there, DataLoader of 3 batches .*RandomSampler here"),
]
OTHER_PARTS = [
    ({"layers": wide}, r"guide.locs.network.0.weight: float32 \[6, 3\] there, float32 \[7, 3\]"),
    ({"guide": "normal"}, r"guide: AutoSoftplusNormal\(.* there, Normal\("),
    ({"guide": pruned}, "pruned weights: "),
    ({"guide": frozen}, r"float32 \[6, 3\] there, float32 \[6, 3\], frozen here"),
    ({"layers": batch_norm}, r"network.1: Tanh\(\) there, BatchNorm1d\("),
    ({"layers": lambda: plain().eval()}, r"evaluation mode: \[\] there"),
    ({"prior": partial(dist.Normal, 0.0, 0.5)}, r"scale=1.0\)\) .*scale=0.5\)\)"),
    ({"likelihood": partial(likelihoods.Gaussian.learned, 0.5)}, "initial=1.0.*initial=0.5"),
    (
        {"guide": partial(bbb.guides.make, "softplus_normal", init_rho=-3.0)},
        "init_rho=-5.0.*-3.0",
    ),
]


@pytest.mark.parametrize("name", ["swag", "ensemble", "buffers"])
def test_the_same_objects_resume_as_new_ones_do(tmp_path, name):
    """A notebook's cell is run again on the model and the guide that it has changed."""
    build = partial(make, **MAKES[name])
    calm = build()
    expected = fit(calm)
    pair = build()
    with pytest.raises(Stop):
        fit(pair, tmp_path, callbacks=[stop_after(1)])
    assert record(fit(pair, tmp_path)) == record(expected)
    assert same(state(pair), state(calm))


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    folder = tmp_path_factory.mktemp("begun")
    with pytest.raises(Stop):
        fit(make(), folder, callbacks=[stop_after(2)])
    return folder


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [({}, *case) for case in OTHER_OPTIONS] + [(build, {}, why) for build, why in OTHER_PARTS],
)
def test_another_run_is_refused_and_the_difference_named(begun, build, options, message):
    folder, pair = begun, make(**build)
    before, held = state(pair), {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match=f"was written by a different configuration.*{message}"):
        fit(pair, folder, **options)
    assert same(state(pair), before)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == held


def test_what_does_not_define_the_run_may_differ(begun, tmp_path):
    shutil.copytree(begun, tmp_path / "run")
    history = fit(make(), str(tmp_path / "run"), checkpoint_every=1, callbacks=[lambda event: None])
    assert len(history) == 4


@pytest.mark.parametrize("name", ["spec.json", "tensors-*.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "changed", "removed"])
def test_a_damaged_checkpoint_is_refused(begun, tmp_path, name, damage):
    shutil.copytree(begun, tmp_path / "run")
    (path,) = (tmp_path / "run").glob(name)
    data = path.read_bytes()
    middle = len(data) // 2
    changed = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    path.unlink()
    if damage != "removed":
        path.write_bytes(data[:middle] if damage == "cut" else changed)
    pair = make()
    before = state(pair)
    if (name, damage) == ("spec.json", "removed"):
        assert len(fit(pair, tmp_path / "run", epochs=1)) == 1  # nothing is there: a new run
        return
    with pytest.raises(LoadError, match="truncated|altered|missing|JSON"):
        fit(pair, tmp_path / "run")
    assert same(state(pair), before)


def test_a_saved_model_is_no_checkpoint_and_a_checkpoint_no_saved_model(begun, tmp_path):
    bbb.save(tmp_path, *make())
    with pytest.raises(LoadError, match="holds a model, which bbb.load reads, not a fit"):
        fit(make(), tmp_path)
    bbb.load(tmp_path)
    with pytest.raises(LoadError, match="holds a fit, which fit.checkpoint=...."):
        bbb.load(begun)


class Stream(IterableDataset):
    def __iter__(self):
        return zip(X, Y, strict=True)


BAD_ARGUMENTS = [
    ({"checkpoint": None, "checkpoint_every": 1}, "checkpoint_every needs checkpoint"),
    ({"data": DataLoader(Stream(), 16)}, "checkpoint needs data.*got a stream"),
    ({"optimizer": pyro.optim.Adam({})}, "checkpoint needs a torch.*got a PyroOptim"),
    ({"guide": lambda *_: None}, "checkpoint needs a guide that is a module"),
]


@pytest.mark.parametrize(("options", "message"), BAD_ARGUMENTS)
def test_arguments_with_which_no_run_can_be_resumed_are_refused(tmp_path, options, message):
    options = {"checkpoint": tmp_path / "run", "data": (X, Y), **options}
    model, guide = make()
    guide, data = options.pop("guide", guide), options.pop("data")
    with pytest.raises(ValueError, match=message):
        bbb.fit(model, guide, data, epochs=1, progress=False, **options)
    assert not (tmp_path / "run").exists()


def test_an_optimiser_whose_state_cannot_be_kept_is_named(tmp_path):
    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            self.state[self.param_groups[0]["params"][0]]["memory"] = object()
            return super().step(closure)

    with pytest.raises(TypeError, match=r"optimizer.state.0.memory must consist of numbers and"):
        fit(make(), tmp_path, optimizer=Odd, lr=1e-4)


# --- Ctrl-C ---


@pytest.fixture(autouse=True)
def ctrl_c():
    """Python's own handler: a shell starts jobs in the background with none."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupting(torch.optim.SGD):
    """Ctrl-C comes between two parameters, in the fifth step and perhaps again."""

    def __init__(self, parameters, lr, times):
        super().__init__(parameters, lr=lr)
        self.times, self.taken = times, 0

    def step(self, closure=None):
        self.taken += 1
        for parameter in self.param_groups[0]["params"]:
            with torch.no_grad():
                parameter.sub_(self.param_groups[0]["lr"] * parameter.grad)
            if self.taken == 5 and self.times:
                self.times -= 1
                signal.raise_signal(signal.SIGINT)


def interrupting(times):
    return partial(Interrupting, times=times)


SLOWLY = {"lr": 1e-4, "lr_schedule": "constant"}


@pytest.mark.parametrize("every", [None, 3])
def test_ctrl_c_ends_the_training_after_the_step_under_way_and_it_resumes(tmp_path, every):
    calm = make()
    expected = fit(calm, optimizer=interrupting(0), **SLOWLY)
    calls = []
    cut = make()
    history = fit(
        cut,
        tmp_path,
        optimizer=interrupting(1),
        checkpoint_every=every,
        callbacks=[lambda event: calls.append(event.epoch)],
        **SLOWLY,
    )
    assert history.interrupted and not expected.interrupted
    assert len(history) == 1 and calls == [0]
    assert history.steps.loss == expected.steps.loss[:5]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    again = make()
    resumed = fit(again, tmp_path, optimizer=interrupting(0), **SLOWLY)
    assert record(resumed) == record(expected) and not resumed.interrupted
    assert same(state(again), state(calm))


def test_a_second_ctrl_c_stops_at_once_and_the_checkpoint_stays(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(make(), tmp_path, optimizer=interrupting(2), checkpoint_every=1, **SLOWLY)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert content(tmp_path)[0]["progress"]["batch"] == 1  # of the second epoch: four steps
    again = make()
    resumed = fit(again, tmp_path, optimizer=interrupting(0), **SLOWLY)
    calm = make()
    assert record(resumed) == record(fit(calm, optimizer=interrupting(0), **SLOWLY))
    assert same(state(again), state(calm))


def test_ctrl_c_in_a_callback_lets_it_finish():
    calls = []

    def callback(event):
        signal.raise_signal(signal.SIGINT)
        calls.append(event.epoch)

    assert fit(make(), callbacks=[callback]).interrupted
    assert calls == [0]


def test_a_handler_of_ones_own_is_left_alone():
    noted = []
    before = signal.signal(signal.SIGINT, lambda *_: noted.append(1))
    try:
        history = fit(make(), optimizer=interrupting(1), **SLOWLY)
    finally:
        signal.signal(signal.SIGINT, before)
    assert noted == [1] and len(history) == 4 and not history.interrupted


def test_training_in_a_thread_needs_no_handler():
    histories = []
    thread = threading.Thread(target=lambda: histories.append(fit(make())))
    thread.start()
    thread.join()
    assert len(histories[0]) == 4


def test_a_laplace_guide_is_not_approximated_when_interrupted(tmp_path):
    pair = make("laplace")
    optimizer = interrupting(1)
    assert fit(pair, tmp_path, optimizer=optimizer, **SLOWLY).interrupted
    with pytest.raises(RuntimeError):
        pair[1].sample_posterior(1)
    again = make("laplace")
    fit(again, tmp_path, optimizer=interrupting(0), **SLOWLY)
    assert again[1].sample_posterior(1)


class Ended(TensorDataset):
    """Its loader's workers are ended by Ctrl-C, as those in a terminal are."""

    def __getitem__(self, row):
        if row == 20:
            signal.raise_signal(signal.SIGINT)
            raise RuntimeError("DataLoader worker is killed")
        return super().__getitem__(row)


def test_ctrl_c_that_ends_a_loaders_workers_is_no_error():
    history = fit(make(), data=DataLoader(Ended(X, Y), 16))
    assert history.interrupted and len(history.steps) == 1
