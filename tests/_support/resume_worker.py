# SPDX-License-Identifier: Apache-2.0
"""Runs of `fit` that are killed: a process that starts each in a child, and ends it with kill -9.

Lines of JSON come in, each with a case, a folder and when to kill; each child's status goes out.
"""

import json
import os
import signal
import stat
import sys
import time
from functools import partial
from pathlib import Path

import pyro
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_bbb as bbb

N, EPOCHS = 40, 6


def plain():
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))


def with_buffers():
    return nn.Sequential(
        nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 1)
    )


def shuffled(x, y):
    return DataLoader(TensorDataset(x, y), 16, shuffle=True)


WARM_UP = bbb.KLSchedule("blundell", warmup_epochs=2)

# case -> (layers, guide, form of the data, options); three steps an epoch, the last a short one
CASES = {
    "reparam": (plain, "softplus_normal", None, {"optimizer": torch.optim.RAdam}),
    "ensemble": (with_buffers, "ensemble", shuffled, {"num_particles": 2, "kl_schedule": WARM_UP}),
}


def run(case, folder, **more):
    """One call of `fit` as it is made in every process; history, next random number, parts."""
    layers, guide, form, options = CASES[case]
    pyro.set_rng_seed(0)
    x = torch.randn(N, 3)
    network = bbb.bayesianize(layers(), bbb.priors.FanInNormal())
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian.learned(), num_data=N)
    guide = bbb.guides.make(guide, model)
    data = form(x, x.sum(1)) if form else (x, x.sum(1))
    options = {"epochs": EPOCHS, "batch_size": 16, "lr": 0.01, "progress": False, **options, **more}
    if folder:
        options |= {"checkpoint": folder, "checkpoint_every": 1}
    history = bbb.fit(model, guide, data, **options)
    return history, torch.rand(()).item(), model, guide


def die(*, half):
    """End as by `kill -9`, perhaps with only half of a file written."""

    def kill(descriptor):
        if half and stat.S_ISREG((found := os.fstat(descriptor)).st_mode):
            os.ftruncate(descriptor, found.st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    return kill


def die_in_a_write(number):
    """Let the process die in the given one of the calls that complete a file."""
    left, real = [number], {name: getattr(os, name) for name in ("fsync", "replace")}

    def counted(name, last, *args):
        left[0] -= 1
        if left[0] == 0:
            last(*args)
        return real[name](*args)

    os.fsync = partial(counted, "fsync", die(half=True))
    os.replace = partial(counted, "replace", lambda *_: die(half=False)(-1))


def in_a_child(case, folder, out, seconds=None, write=None):
    """Fork; return the child's wait status, negative if a signal ended it."""
    child = os.fork()
    if child == 0:
        if write:
            die_in_a_write(write)
        history, number, *_ = run(case, folder)
        record = history.as_dict() | {"seconds": None, "random": number}
        Path(out).write_text(json.dumps(record))
        os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    run("reparam", None)  # what libraries set up at first use is not done again in each child
    for line in sys.stdin:
        print(in_a_child(**json.loads(line)), flush=True)
