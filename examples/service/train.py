# SPDX-License-Identifier: Apache-2.0
"""Trains a small classifier of scikit-learn's digits and saves it for the service.

Run ``python examples/service/train.py FOLDER``.
"""

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits

import pyro_bbb as bbb


def train(folder: Path, epochs: int = 50) -> None:
    """Save a model of inputs of 64 numbers from 0 to 1."""
    torch.manual_seed(0)
    x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
    x = x.float() / 16
    model = bbb.BayesianModel(
        bbb.BayesianMLP([64, 50, 10]), bbb.likelihoods.Categorical(), num_data=len(x)
    )
    guide = bbb.AutoSoftplusNormal(model)
    bbb.fit(model, guide, (x, y), epochs=epochs, progress=False)
    metadata = {"input_shape": [64], "labels": [str(digit) for digit in range(10)]}
    bbb.save(folder, model, guide, metadata=metadata)


if __name__ == "__main__":
    train(Path(sys.argv[1]))
