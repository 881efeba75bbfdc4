# SPDX-License-Identifier: Apache-2.0
"""Several processes train and predict as one, and outlive one another."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from filelock import FileLock
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_bbb as bbb
from pyro_bbb import likelihoods
from pyro_bbb.elbo import MinibatchELBO
from tests._support import ddp_checks as together
from tests._support import ddp_worker as killed
from tests._support import memmap_training as mapped

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def run(*command, seconds=300):
    """Runs a program of the tests or experiments; what it printed."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.run(
        [str(word) for word in command],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


# --- two processes ---


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """What two processes found, by check, and their folder; once for all workers of the suite."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "together"
    files = [folder / f"{rank}.json" for rank in range(together.SIZE)]
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            done = run(sys.executable, together.__file__, folder)
            (folder / "stderr").write_text(done.stderr)
    assert all(file.exists() for file in files), (folder / "stderr").read_text()
    return [json.loads(file.read_text()) for file in files], folder


@pytest.mark.slow
@pytest.mark.parametrize("name", together.CHECKS)
def test_two_processes_agree_that(checked, name):
    for failures in checked[0]:
        if name not in failures:
            pytest.fail("was not reached: a check before it failed")
        assert not failures[name], failures[name]


@pytest.mark.slow
def test_a_group_of_which_one_is_killed_goes_on_from_the_checkpoint(checked, tmp_path):
    done = run(*TORCHRUN, "--max-restarts", "1", killed.__file__, tmp_path, "kill")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists()
    ends = [(tmp_path / f"{rank}.json").read_text() for rank in range(2)]
    assert ends[0] == ends[1]

    calm = checked[1] / together.parameters_are_the_same_after_three_epochs_of_digits.__name__
    assert ends[0] == (calm / "0.json").read_text()
    # one bar at a time: of the first process only, before and after
    assert done.stderr.count("epoch 3/3") >= 1 and "| 18/18 [" in done.stderr


# --- one process that was launched ---


def launch(monkeypatch, size):
    where = {"RANK": "0", "WORLD_SIZE": size, "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
    for name, value in where.items():
        monkeypatch.setenv(name, value)


def test_a_process_launched_by_itself_needs_no_group(monkeypatch):
    launch(monkeypatch, "1")
    fit(make())
    assert not torch.distributed.is_initialized()


def test_alone_a_launched_process_waits_for_no_other(monkeypatch):
    launch(monkeypatch, "2")
    with bbb.alone():
        pair = make()
        fit(pair)
        bbb.predict(*pair, X[:1], num_samples=2)
    assert not torch.distributed.is_initialized()


# --- several minibatches to a step ---

X = torch.sin(torch.arange(57.0, dtype=torch.float64).view(19, 3) ** 2)
Y = X.sum(1)


pytestmark = pytest.mark.usefixtures("double")


def make(prior=None):
    pyro.set_rng_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    network = bbb.bayesianize(layers, prior or dist.Normal(0.0, 1.0), where=["0"])
    model = bbb.BayesianModel(network, likelihoods.Gaussian.learned(), num_data=len(X))
    return model, bbb.AutoSoftplusNormal(model)


def fit(pair, data=(X, Y), **options):
    options = {"epochs": 3, "batch_size": 4, "lr": 0.01, "progress": False, "seed": 1, **options}
    return bbb.fit(*pair, data, **options)


@contextmanager
def one_noise(monkeypatch):
    """Every part meets the same noise."""
    real = MinibatchELBO.loss_and_grads

    def loss_and_grads(self, *args, **kwargs):
        torch.manual_seed(7)
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(MinibatchELBO, "loss_and_grads", loss_and_grads)
        yield


WARM_UP = bbb.KLSchedule("blundell", temperature=0.5, warmup_epochs=2)


@pytest.mark.parametrize(
    ("options", "k"), [({}, 2), ({"kl_schedule": WARM_UP}, 3), ({"num_particles": 3}, 2)]
)
def test_accumulation_is_a_larger_batch_for_one_noise(monkeypatch, options, k):
    """19 examples: 4, 4, 4, 4, 3 as (8, 8, 3) or (12, 7)."""
    runs = []
    for batching in ({"accumulate": k}, {"batch_size": 4 * k}):
        pair = make(bbb.priors.LearnedScaleMixture())
        with one_noise(monkeypatch):
            history = fit(pair, optimizer=torch.optim.SGD, lr=1e-3, **options, **batching)
        runs.append((pair, history))
    (ours, history), (theirs, expected) = runs
    assert len(history.steps) == len(expected.steps) == 3 * -(-19 // (4 * k))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=1e-12, atol=1e-12)
    for a, b in ((history, expected), (history.steps, expected.steps)):
        for name in ("loss", "kl", "nll", "log_prior", "log_guide", "kl_weight", "lr"):
            assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-12), name


def test_its_parts_meet_draws_of_their_own_and_loaders_do_the_same():
    losses = []
    for data in ((X, Y), DataLoader(TensorDataset(X, Y), 4)):
        history = fit(make(), data, accumulate=2, epochs=1)
        assert history.steps.kl_weight == pytest.approx([8 / 19, 8 / 19, 3 / 19], rel=1e-15)
        losses.append(history.loss)
    with pytest.MonkeyPatch.context() as patch, one_noise(patch):
        assert fit(make(), accumulate=2, epochs=1).loss not in losses


def test_a_part_that_is_not_finite_takes_its_step_with_it(monkeypatch):
    real, calls = MinibatchELBO.loss_and_grads, []

    def loss_and_grads(self, model, guide, x, y, kl_weight):
        calls.append(len(x))
        return real(self, model, guide, x, y * (torch.nan if len(calls) == 4 else 1), kl_weight)

    monkeypatch.setattr(MinibatchELBO, "loss_and_grads", loss_and_grads)
    history = fit(make(), accumulate=2, nonfinite="skip", epochs=1)
    assert history.skipped == [2] and len(history.steps) == 2 and calls == [4, 4, 4, 4, 3]


# --- data larger than memory ---


@pytest.mark.slow
def test_data_larger_than_what_may_stay_in_memory(tmp_path, record_property):
    done = run(sys.executable, mapped.__file__, tmp_path / "data")
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    size = 4 * mapped.ROWS * mapped.WIDTH
    record_property("peak beyond the imports, MB", measured["more"] / 1e6)
    print(f"file {size / 1e6:.0f} MB, peak beyond the imports {measured['more'] / 1e6:.0f} MB")
    assert measured["steps"] == mapped.ROWS // mapped.BLOCK
    assert measured["more"] < size / 4
