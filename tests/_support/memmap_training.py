# SPDX-License-Identifier: Apache-2.0
"""Training on a file several times as large as what the process may keep in memory.

    python mapped.py FILE

Prints, in bytes: what one process has kept at most before the training, and how much more in it.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pyro.distributions as dist
import torch
from torch.utils.data import DataLoader, Dataset

import pyro_bbb as bbb

ROWS, WIDTH, BLOCK = 100_000, 1000, 2000  # 400 MB of float32, 8 of a block


class Blocks(Dataset):
    """Blocks of a file's rows, read on access."""

    def __init__(self, path):
        self.path = path

    def __len__(self):
        return ROWS // BLOCK

    def __getitem__(self, number):
        rows = slice(number * BLOCK, (number + 1) * BLOCK)
        # mapped again, so that what was read is given back
        x = np.memmap(self.path, np.float32, "r", shape=(ROWS, WIDTH))[rows].copy()
        return torch.from_numpy(x), torch.arange(BLOCK) % 2


def kept():
    """The most memory that this process has had, in bytes."""
    import resource  # Windows has none, and collects this file

    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def train(num_data, data):
    network = bbb.BayesianMLP([WIDTH, 4, 2], prior=dist.Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=num_data)
    return bbb.fit(model, bbb.AutoSoftplusNormal(model), data, epochs=1, progress=False)


def main(path):
    torch.set_num_threads(1)
    with path.open("wb") as file:
        file.truncate(4 * ROWS * WIDTH)  # of zeros, which take no room on the disk
    train(2, (torch.zeros(2, WIDTH), torch.arange(2)))  # brings in all that training needs
    before = kept()
    history = train(ROWS, DataLoader(Blocks(path), batch_size=None, shuffle=True))
    print(json.dumps({"before": before, "more": kept() - before, "steps": len(history.steps)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
