# SPDX-License-Identifier: Apache-2.0
"""Small data in place of the downloads, for notebooks that a test runs."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from pyro_bbb import data


def install() -> None:
    """Replace the readers of `pyro_bbb.data` in this process."""
    data.load_images, data.load_mushrooms, data.load_uci = images, mushrooms, uci


def images(name, *, train=True):
    """Every other bundled digit, as 28x28 pixels; of another set than MNIST, mirrored."""
    x, y = (torch.as_tensor(array)[train::2] for array in load_digits(return_X_y=True))
    x = F.interpolate(x[:120].float().reshape(-1, 1, 8, 8) / 16, size=28)
    return x if name == "mnist" else x.flip(-1), y[:120]


def mushrooms():
    """Features of 0 and 1, the first of which is the label."""
    x = torch.rand(200, 117, generator=torch.Generator().manual_seed(0)).round()
    return x, x[:, 0].long()


def uci(name):
    """Six features of 60 rows, one split."""
    x = torch.rand(60, 6, generator=torch.Generator().manual_seed(0))
    return data.UCIData(x, x[:, 5] ** 3, torch.arange(54)[None], torch.arange(54, 60)[None])
