# SPDX-License-Identifier: Apache-2.0
"""MNIST and Fashion-MNIST as tensors, from a folder or a cache filled by downloads.

Every file is checked against torchvision's MD5 each time it is read. A download goes to a scratch
folder and is moved to the cache once verified: processes that download at once, or that are
killed, leave no broken file there.
"""

import contextlib
import gzip
import os
import shutil
import tempfile
import time
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_bbb._utils.validation import one_of
from pyro_bbb.data.cache import cache_folder, given_root, is_intact, read_verified

_CLASSES = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}  # torchvision's class and folder
_SCRATCH = "download-"  # prefix of the folders of unfinished downloads
_ABANDONED = 24 * 3600  # age in seconds of an abandoned scratch folder


def load_images(
    name: str,
    *,
    root: str | os.PathLike[str] | None = None,
    train: bool = True,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Images and labels of MNIST or Fashion-MNIST as two tensors.

    Args:
        name: ``"mnist"`` or ``"fashion_mnist"``.
        root: folder with ``MNIST/raw/*.gz`` or ``FashionMNIST/raw/*.gz``; read only. By default
            ``$PYRO_BBB_DATA``, else the user's cache folder, where files that are missing or
            damaged are downloaded.
        train: the 60,000 training examples, or the 10,000 test examples.
        device: where to put the tensors; the CPU by default.

    Returns:
        Images, float32 ``[n, 1, 28, 28]`` in [0, 1], and labels, int64 ``[n]``.

    Raises:
        ValueError: ``name`` is unknown.
        FileNotFoundError: the given root lacks the set.
        RuntimeError: the download failed, or a file of the given root is damaged (its MD5 is
            wrong).
    """
    one_of("name", name, sorted(_CLASSES))
    import torchvision  # here, because it would double the time that importing pyro_bbb takes

    image_set = getattr(torchvision.datasets, _CLASSES[name])
    part = "train" if train else "t10k"
    checksums = {file: md5 for file, md5 in image_set.resources if file.startswith(part)}
    folder = _folder_of(image_set, root, checksums)
    packed = {file: read_verified(folder / file, "md5", md5) for file, md5 in checksums.items()}
    images = torch.tensor(_idx_array(packed[f"{part}-images-idx3-ubyte.gz"]), device=device)
    labels = torch.tensor(_idx_array(packed[f"{part}-labels-idx1-ubyte.gz"]), device=device)
    return images.unsqueeze(1).float() / 255, labels.long()


def _folder_of(
    image_set: Any, root: str | os.PathLike[str] | None, checksums: dict[str, str]
) -> Path:
    """The folder with the given ``.gz`` files: under the user's root, else in a filled cache."""
    given = given_root(root)
    base = cache_folder() if given is None else given
    folder = base / image_set.__name__ / "raw"
    if given is None:
        _fill_cache(image_set, folder, checksums)
        return folder
    missing = [file for file in checksums if not (folder / file).is_file()]
    if missing:
        layout = f"the layout ROOT/{image_set.__name__}/raw/*.gz with ROOT = {base}"
        raise FileNotFoundError(f"no {' and no '.join(missing)} in {folder}; expected {layout}")
    return folder


def _fill_cache(image_set: Any, folder: Path, checksums: dict[str, str]) -> None:
    """Download the set if one of the files is missing or damaged."""
    _remove_abandoned(folder)
    faulty = [file for file, md5 in checksums.items() if not is_intact(folder / file, "md5", md5)]
    if not faulty:
        return
    name = image_set.__name__
    try:
        _download(image_set, folder)
    except (RuntimeError, OSError, HTTPException) as error:
        lack = f"no intact {' and no intact '.join(faulty)} in {folder}"
        raise RuntimeError(
            f"could not download {name}, and there is {lack}: without a network, pass root=ROOT "
            f"(to an experiment, --data-root ROOT) or set PYRO_BBB_DATA=ROOT, where ROOT is a "
            f"folder that holds ROOT/{name}/raw/*.gz"
        ) from error


def _download(image_set: Any, folder: Path) -> None:
    """Download and verify the set by torchvision; files appear atomically in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH) as scratch:
        fetched = image_set(scratch, download=True)
        for file, _ in image_set.resources:
            os.replace(Path(fetched.raw_folder) / file, folder / file)


def _remove_abandoned(folder: Path) -> None:
    """Remove the scratch folders of downloads that were killed."""
    for scratch in folder.glob(_SCRATCH + "*"):
        with contextlib.suppress(FileNotFoundError):  # its process has just finished
            if time.time() - scratch.stat().st_mtime > _ABANDONED:
                shutil.rmtree(scratch, ignore_errors=True)


def _idx_array(packed: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Array of a gzipped IDX file of bytes."""
    raw = gzip.decompress(packed)
    # IDX: two zero bytes, the type, the number of dimensions, their sizes as big-endian int32, data
    dims = raw[3]
    shape = np.frombuffer(raw, ">i4", count=dims, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dims).reshape(shape)
