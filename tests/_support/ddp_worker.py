# SPDX-License-Identifier: Apache-2.0
"""A training run on digits under torchrun, in which one process may be killed; see the tests.

torchrun --nproc-per-node 2 --max-restarts 1 killed.py FOLDER [kill]
"""

import json
import os
import signal
import sys
from pathlib import Path

import pyro.distributions as dist
import torch
from sklearn.datasets import load_digits

import pyro_bbb as bbb

EPOCHS = 3


def run(folder, kill=False):
    """Three epochs; the second process does not survive the second, the first time."""
    x, y = load_digits(return_X_y=True)
    data = torch.tensor(x / 16, dtype=torch.float32)[:600], torch.tensor(y)[:600]
    torch.manual_seed(0)
    network = bbb.BayesianMLP([64, 16, 10], prior=dist.Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=600)
    guide = bbb.AutoSoftplusNormal(model)
    killed = folder / "killed"

    def callback(event):
        if kill and event.epoch == 1 and os.environ.get("RANK") == "1" and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    history = bbb.fit(
        model,
        guide,
        data,
        epochs=EPOCHS,
        batch_size=100,
        callbacks=[callback],
        checkpoint=folder / "run",
        checkpoint_every=4,
        seed=0,
    )
    return model, guide, history


def ended(results):
    """All that a run ends with, as text."""
    model, guide, history = results
    values = [x.tolist() for m in (model, guide) for x in m.state_dict().values()]
    return json.dumps([values, history.as_dict() | {"seconds": None}])


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    text = ended(run(folder, kill="kill" in sys.argv))
    (folder / f"{os.environ['RANK']}.json").write_text(text)
