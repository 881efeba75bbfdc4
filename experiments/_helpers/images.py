# SPDX-License-Identifier: Apache-2.0
"""Images of the experiments: real sets, the digits that every machine has, and splits of them."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

import pyro_bbb as bbb
from _helpers.run import Data


def images(name: str, root: Path | None, *, train: bool, smoke: bool) -> Data:
    """Images ``[n, 1, 28, 28]`` in [0, 1] and labels ``[n]`` of "mnist" or "fashion_mnist".

    In a smoke test a few of scikit-learn's digits instead, enlarged; turned upside down they stand
    for Fashion-MNIST. They show that a program runs, and nothing else.
    """
    if not smoke:
        return bbb.data.load_images(name, root=root, train=train)
    x, y = digits()[0 if train else 1]
    large = F.interpolate(x[: 300 if train else 100].reshape(-1, 1, 8, 8), size=28, mode="bilinear")
    return (large if name == "mnist" else large.flip(-2)), y[: len(large)]


def train_and_validation(data: Data, fraction: float = 1 / 6, seed: int = 0) -> tuple[Data, Data]:
    """Return the training part split for choosing settings; by default 50,000 and 10,000 images."""
    return bbb.data.split(*data, fraction=fraction, seed=seed)


def digits() -> tuple[Data, Data]:
    """Scikit-learn's 1,797 digits: pixels ``[n, 64]`` in [0, 1] and labels ``[n]``, split for good.

    Returns:
        1,347 for training and choosing, 450 for the test alone; every class in proportion. All
        experiments use this split: no setting was chosen by any test digit.
    """
    x, y = load_digits(return_X_y=True)
    x = x.astype(np.float32) / 16
    return stratified(torch.from_numpy(x), torch.from_numpy(y), 0.25)


def stratified(x: Tensor, y: Tensor, fraction: float, seed: int = 0) -> tuple[Data, Data]:
    """Random split that puts ``fraction`` of every class into the second part."""
    rows = np.arange(len(y))
    index_sets = train_test_split(rows, test_size=fraction, stratify=y, random_state=seed)
    first, second = ((x[rows_of_set], y[rows_of_set]) for rows_of_set in index_sets)
    return first, second
