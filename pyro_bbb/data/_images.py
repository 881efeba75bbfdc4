# SPDX-License-Identifier: Apache-2.0
"""MNIST and Fashion-MNIST as tensors, from a folder or a cache filled by downloads.

Addresses and MD5 checksums are torchvision's; every file is checked each time it is read.
"""

import gzip
import os
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_bbb._utils.validation import one_of
from pyro_bbb.data.cache import data_folder, fetch, read, verified

_CLASSES = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}  # torchvision's class and folder


def load_images(
    name: str,
    *,
    root: str | os.PathLike[str] | None = None,
    train: bool = True,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Load images and labels of MNIST or Fashion-MNIST as two tensors.

    Args:
        name: ``"mnist"`` or ``"fashion_mnist"``.
        root: folder with ``MNIST/raw/*.gz`` or ``FashionMNIST/raw/*.gz``; by default
            ``$PYRO_BBB_DATA``, else the cache, where missing or damaged files are downloaded.
        train: the 60,000 training examples, or the 10,000 test examples.
        device: where to put the tensors; the CPU by default.

    Returns:
        Images, float32 ``[n, 1, 28, 28]`` in [0, 1], and labels, int64 ``[n]``.

    Raises:
        ValueError: ``name`` is unknown.
        FileNotFoundError: the given root lacks the set.
        RuntimeError: the download failed, or a file of the given root is damaged.
    """
    one_of("name", name, sorted(_CLASSES))
    import torchvision  # here, because it would double the time that importing pyro_bbb takes

    image_set = getattr(torchvision.datasets, _CLASSES[name])
    prefix, folder = "train" if train else "t10k", f"{_CLASSES[name]}/raw"
    images, labels = (
        _read(image_set, root, f"{folder}/{prefix}-{suffix}-ubyte.gz").to(device)
        for suffix in ("images-idx3", "labels-idx1")
    )
    return images.unsqueeze(1).float() / 255, labels.long()


def _read(image_set: Any, root: Any, name: str) -> Tensor:
    """Return the array of a gzipped IDX file of bytes, which is downloaded to the cache."""
    base, is_cache = data_folder(root)
    path = base / name
    md5 = dict(image_set.resources)[path.name]
    download = partial(fetch, *(mirror + path.name for mirror in image_set.mirrors))
    check = partial(verified, path, "md5", md5)
    raw = gzip.decompress(read(path, base, check, download if is_cache else None))
    # IDX: two zero bytes, the type, the number of dimensions, their sizes as big-endian int32, data
    dims = raw[3]
    shape = np.frombuffer(raw, ">i4", count=dims, offset=4)
    return torch.tensor(np.frombuffer(raw, np.uint8, offset=4 + 4 * dims).reshape(shape))
