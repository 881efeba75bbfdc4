# SPDX-License-Identifier: Apache-2.0
"""Images for the experiments: the real sets, or for a smoke test a few that every machine has."""

from pathlib import Path

import torch.nn.functional as F

import pyro_bbb as bbb
from _helpers.run import Data, digits


def images(name: str, root: Path | None, *, train: bool, smoke: bool) -> Data:
    """Images ``[n, 1, 28, 28]`` in [0, 1] and labels ``[n]``.

    Args:
        name: ``"mnist"`` or ``"fashion_mnist"``.
        root: folder of the data; None is ``$PYRO_BBB_DATA`` or else a download.
        train: the training part, or the test part.
        smoke: a few of scikit-learn's digits instead, enlarged; turned upside down they stand for
            Fashion-MNIST. They show that a program runs, and nothing else.
    """
    if not smoke:
        return bbb.data.load_images(name, root=root, train=train)
    x, y = digits()[0 if train else 1]
    large = F.interpolate(x[: 300 if train else 100].reshape(-1, 1, 8, 8), size=28, mode="bilinear")
    return (large if name == "mnist" else large.flip(-2)), y[: len(large)]


def train_and_validation(data: Data, fraction: float = 1 / 6, seed: int = 0) -> tuple[Data, Data]:
    """The training part split for choosing settings; by default 50,000 and 10,000 images."""
    return bbb.data.split(*data, fraction=fraction, seed=seed)
