# SPDX-License-Identifier: Apache-2.0
"""The files of a saved model: replaced as one, and never trusted."""

import json
import os
import pickle
import random
import signal
import threading
import time

import pytest
import torch
from torch import nn

import pyro_bbb as bbb
from pyro_bbb.persistence import LoadError, archive
from pyro_bbb.persistence.archive import read, write
from tests._support.crash_injection import Crash, crash_at
from tests._support.forged import sealed


def pair(number=0.0):
    network = bbb.BayesianMLP([2, 3, 2], prior="learned_scale_mixture", activation=nn.Tanh)
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=20)
    return model, bbb.AutoSoftplusNormal(model, init_loc=number)


def number_of(path):
    """Which pair a folder holds; fails if its parts are of two."""
    loaded = bbb.load(path)
    number = loaded.guide.loc("network.fc1.weight")[0, 0].item()
    assert loaded.metadata["number"] == number
    return number


def save(path, number, **options):
    bbb.save(path, *pair(number), metadata={"number": number}, **options)


@pytest.fixture
def saved(tmp_path):
    save(tmp_path / "saved", 1.0)
    return tmp_path / "saved"


def spec_of(path):
    return json.loads((path / "spec.json").read_text())


def tensors_of(path):
    (file,) = path.glob("tensors-*")
    return file


# --- damage ---


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", ["spec.json", "tensors"])
def test_any_altered_byte_truncation_or_growth_is_noticed(saved, name, compressed):
    save(saved, 0.0, compressed=compressed)
    file, rng = saved / name if name == "spec.json" else tensors_of(saved), random.Random(0)
    content = file.read_bytes()
    lengths = [0, 1, len(content) - 1, *(rng.randrange(len(content)) for _ in range(20))]
    damages = [*(content[:length] for length in lengths), content + b"\n", content + content]
    for _ in range(60):
        at, value = rng.randrange(len(content)), rng.randrange(1, 256)
        damages.append(content[:at] + bytes([content[at] ^ value]) + content[at + 1 :])
    for damaged in damages:
        file.write_bytes(damaged)
        with pytest.raises(LoadError, match=r"spec\.json|safetensors"):
            bbb.load(saved)
    file.write_bytes(content)
    assert number_of(saved) == 0.0


def test_every_error_says_what_is_wrong(saved):
    text = (saved / "spec.json").read_text()
    for damaged, message in [
        ("", "no longer JSON"),
        ("[" * 100_000, "no longer JSON"),
        ("[]", "is of something else"),
        ("{}", "is of something else: its 'format' must be 'pyro_bbb'"),
        (text.replace('"pyro_bbb"', '"other"', 1), "is of something else"),
        (
            text.replace('"version": 1', '"version": 3', 1),
            r"version 3, this pyro_bbb reads up to 2",
        ),
        (text.replace('"version": 1', '"version": true', 1), "'version' must be a positive"),
        (text.replace('"version": 1', '"version": 0', 1), "'version' must be a positive"),
        (text.replace('"num_data": 20', '"num_data": 21'), "does not have the sha256"),
        (text.replace('"num_data": 20', '"num_data": NaN'), "NaN is not a JSON number"),
        (text.replace('"num_data": 20', '"num_data": 20, "num_data": 20'), "duplicate key"),
    ]:
        (saved / "spec.json").write_text(damaged)
        with pytest.raises(LoadError, match=message):
            bbb.load(saved)
    (saved / "spec.json").write_text(text)
    tensors_of(saved).unlink()
    with pytest.raises(LoadError, match=r"tensors-.*\.safetensors is missing"):
        bbb.load(saved)


def test_nothing_there(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(FileNotFoundError, match=r"spec\.json"):
            bbb.load(path)
    (tmp_path / "file").write_text("text")
    with pytest.raises(OSError, match="file"):
        bbb.load(tmp_path / "file")
    with pytest.raises(FileExistsError):
        save(tmp_path / "file", 1.0)


# --- files that have no end, or would fill the memory ---


POSIX = pytest.mark.skipif(os.name != "posix", reason="no pipes, devices and alarms")


def fifo(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def huge(path):
    with path.open("wb") as file:
        file.truncate(2**40)  # without a block on the disk


def a_folder(path):
    path.mkdir()


@pytest.fixture
def impatient():
    """An error after a minute, instead of waiting for ever."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def checkpointed(folder):
    model, guide = pair()
    bbb.fit(model, guide, DATA, epochs=1, checkpoint=folder, progress=False)


def predictor(x):
    raise AssertionError("is not called")


DATA = torch.zeros(20, 2), torch.zeros(20, dtype=torch.long)
READERS = {
    "load": bbb.load,
    "fit": checkpointed,
    "temperature": lambda folder: bbb.TemperatureScaled.load(folder / "spec.json", predictor),
}


@POSIX
@pytest.mark.parametrize("make", [fifo, device, huge, a_folder])
@pytest.mark.parametrize("name", READERS)
def test_only_regular_files_of_a_bounded_size_are_read(tmp_path, impatient, name, make):
    make(tmp_path / "spec.json")
    with pytest.raises(LoadError, match=r"spec\.json (must be a regular file|has 1099511627776)"):
        READERS[name](tmp_path)


@POSIX
@pytest.mark.parametrize("make", [fifo, device, huge, a_folder])
def test_so_are_tensors_and_what_a_save_replaces(saved, impatient, make):
    file = tensors_of(saved)
    file.unlink()
    make(file)
    with pytest.raises(LoadError, match=r"safetensors (must be a regular|is truncated or altered)"):
        bbb.load(saved)
    if make is not a_folder:
        (saved / "spec.json").unlink()
        make(saved / "spec.json")
        save(saved, 2.0)
        assert number_of(saved) == 2.0


def test_a_description_that_could_not_be_read_is_not_written(saved):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with pytest.raises(ValueError, match="a description must have at most 67108864 bytes, got"):
        bbb.save(saved, *pair(), metadata={"text": "x" * 2**26})
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


# --- what someone else has written, with right hashes ---


def forge(path, spec):
    (path / "spec.json").write_text(sealed(spec))


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def test_nothing_in_the_files_is_executed(saved, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    original = json.dumps(spec_of(saved))
    for name in ("os.system", "torch.nn.Tanh", "_Context", "__import__('os').system", "Module"):
        for place in (
            '"kind": "Tanh"',
            '"kind": "LearnedScaleMixture"',
            '"name": "softplus_normal"',
        ):
            key = place.split(":")[0]
            forge(saved, json.loads(original.replace(place, f'{key}: "{name}"', 1)))
            with pytest.raises(LoadError, match="does not build: KeyError"):
                bbb.load(saved)
    forge(saved, json.loads(original))
    tensors = pickle.dumps(Bomb())
    spec = spec_of(saved)
    spec["tensors"] = {"sha256": archive.sha256(tensors).hexdigest(), "bytes": len(tensors)}
    forge(saved, spec)
    (saved / f"tensors-{spec['tensors']['sha256'][:16]}.safetensors").write_bytes(tensors)
    with pytest.raises(LoadError, match="holds no tensors"):
        bbb.load(saved)
    (saved / "spec.json").write_bytes(tensors)
    with pytest.raises(LoadError, match="no longer JSON"):
        bbb.load(saved)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("size", [-1, 0, 1, 2**70])
def test_a_deflated_file_of_another_size_is_refused(saved, size):
    save(saved, 2.0, compressed=True)
    assert (spec := spec_of(saved))["version"] == 2
    spec["tensors"]["inflated"] = size
    forge(saved, spec)
    with pytest.raises(LoadError, match="safetensors.* holds no tensors"):
        bbb.load(saved)


def test_a_layer_gets_its_own_arguments_only(tmp_path):
    model = bbb.BayesianModel(bbb.bayesianize(nn.Linear(2, 3)), bbb.likelihoods.Gaussian(), 20)
    bbb.save(tmp_path, model, bbb.AutoSoftplusNormal(model))
    spec = spec_of(tmp_path)
    spec["network"]["parts"]["network"]["arguments"]["device"] = "cpu"
    forge(tmp_path, spec)
    with pytest.raises(LoadError, match=r"Linear must have the arguments \['in_features', .*got"):
        bbb.load(tmp_path)


@pytest.mark.parametrize("name", ["../../outside", "/etc/passwd", "x" * 64, ""])
def test_no_file_outside_the_folder_is_named(saved, name):
    spec = spec_of(saved)
    spec["tensors"]["sha256"] = name
    forge(saved, spec)
    with pytest.raises(LoadError, match="must give the file of tensors a sha256"):
        bbb.load(saved)


# --- written as one ---


def test_a_crash_at_any_moment_leaves_the_old_pair_or_the_new(tmp_path):
    numbers = []
    for number in range(100):
        path = tmp_path / str(number)
        save(path, 1.0)
        with pytest.MonkeyPatch.context() as patch:
            left = crash_at(patch, number)
            try:
                save(path, 2.0)
            except Crash:
                pass
        numbers.append(number_of(path))
        save(path, 3.0)  # what the crash left behind is in nobody's way
        assert number_of(path) == 3.0
        if left[0] >= 0:
            break
    assert numbers == sorted(numbers) and numbers[0] == 1.0 and numbers[-1] == 2.0
    assert 8 < len(numbers) < 100 and numbers.count(1.0) > 5 and numbers.count(2.0) > 1


def test_an_error_while_writing_leaves_nothing_behind(saved, monkeypatch):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(saved, 2.0)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


def test_replacing_removes_the_old_tensors_and_nothing_else(saved):
    (saved / "notes.txt").write_text("mine")
    first = tensors_of(saved).name
    save(saved, 2.0)
    assert number_of(saved) == 2.0
    assert tensors_of(saved).name != first
    assert (saved / "notes.txt").read_text() == "mine"
    assert len(list(saved.iterdir())) == 3


def test_a_reader_meets_one_pair_whole_while_another_replaces_it(tmp_path):
    stop, pairs = threading.Event(), [torch.full((1000,), float(i)) for i in range(4)]
    write(tmp_path, "fit", {"number": 0}, {"x": pairs[0]})

    def keep_writing():
        while not stop.is_set():
            for number, x in enumerate(pairs):
                write(tmp_path, "fit", {"number": number}, {"x": x})

    writer = threading.Thread(target=keep_writing)
    writer.start()
    numbers, end = [], time.monotonic() + 30
    try:
        while len(numbers) < 200 or len(set(numbers)) < len(pairs):
            assert time.monotonic() < end, "the writer does nothing"
            spec, tensors = read(tmp_path, "fit")
            assert torch.equal(tensors["x"], pairs[spec["number"]])
            numbers.append(spec["number"])
    finally:
        stop.set()
        writer.join()


def test_a_run_that_starts_leaves_the_files_that_another_one_is_writing(saved, monkeypatch):
    """It looks at the folder between the other one's tensors and their description."""
    replace = archive.write_file

    def with_a_start_after_it(path, data):
        replace(path, data)
        archive.tidy(saved)

    monkeypatch.setattr(archive, "write_file", with_a_start_after_it)
    save(saved, 2.0)
    assert number_of(saved) == 2.0
    (saved / ("tensors-" + "0" * 16 + ".safetensors")).write_bytes(b"left behind")
    archive.tidy(saved)
    assert len(list(saved.iterdir())) == 2


def test_writers_of_one_folder_take_turns_and_leave_one_pair(saved):
    """Each removes the tensors before its own; the other writes the same ones, or others."""

    def write_many(first):
        for i in range(first, first + 12):
            spec = {"number": i % 3, "write": [first, i]}
            write(saved, "model", spec, {"weight": torch.full((3,), float(i % 3))})

    threads = [threading.Thread(target=write_many, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        archive.tidy(saved)
        spec, tensors = read(saved, "model")
        assert "number" not in spec or (tensors["weight"] == spec["number"]).all()
    assert len(list(saved.iterdir())) == 2
