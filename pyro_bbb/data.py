"""Datasets as tensors on a device, and minibatches of them without per-item Python.

Data sit in memory as one pair of tensors, rows being examples. ``load_images`` reads MNIST and
Fashion-MNIST, ``as_tensors`` takes what users have, ``split`` holds rows out for validation, and
``Minibatches`` is one epoch's worth of shuffled batches.

The image sets are read from ``ROOT/MNIST/raw/*.gz`` and ``ROOT/FashionMNIST/raw/*.gz``. ROOT is
the argument ``root``, else the environment variable ``PYRO_BBB_DATA``; it may be read-only. Where
neither is given, it is a cache folder of the user, ``$XDG_CACHE_HOME/pyro_bbb`` or
``~/.cache/pyro_bbb``, which torchvision's downloads fill.
"""

import gzip
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

_IMAGE_SETS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}  # torchvision's class and folder
_READ_BATCH = 1024  # items collated at once when a Dataset is read


def load_images(
    name: str,
    *,
    root: str | os.PathLike[str] | None = None,
    train: bool = True,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Images and labels of MNIST or Fashion-MNIST, whole, as two tensors.

    Args:
        name: ``"mnist"`` or ``"fashion_mnist"``.
        root: folder with ``MNIST/raw/*.gz`` or ``FashionMNIST/raw/*.gz``; read only. By default
            ``$PYRO_BBB_DATA``, else the user's cache folder, filled by a download when needed.
        train: the 60,000 training examples, or the 10,000 test examples.
        device: where to put the tensors; the CPU by default.

    Returns:
        Images, float32 ``[n, 1, 28, 28]`` in [0, 1], and labels, int64 ``[n]``.

    Raises:
        ValueError: ``name`` is unknown.
        FileNotFoundError: the given root lacks the set.
        RuntimeError: the download failed, or a file is damaged (its MD5 is wrong).
    """
    if name not in _IMAGE_SETS:
        raise ValueError(f"name must be one of {sorted(_IMAGE_SETS)}, got {name!r}")
    import torchvision  # here, because it would double the time that importing pyro_bbb takes

    image_set = getattr(torchvision.datasets, _IMAGE_SETS[name])
    part = "train" if train else "t10k"
    checksums = {file: md5 for file, md5 in image_set.resources if file.startswith(part)}
    folder = _image_folder(image_set, root, checksums)
    arrays = {file: _read_idx(folder / file, md5) for file, md5 in checksums.items()}
    images = torch.tensor(arrays[f"{part}-images-idx3-ubyte.gz"], device=device)
    labels = torch.tensor(arrays[f"{part}-labels-idx1-ubyte.gz"], device=device)
    return images.unsqueeze(1).float() / 255, labels.long()


def as_tensors(
    data: tuple[Any, Any] | Dataset[Any], *, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Inputs and targets as a checked pair of tensors on one device; dtypes are kept.

    Args:
        data: a pair ``(x, y)`` of tensors or numpy arrays whose rows are examples, or a map-style
            ``Dataset`` of such pairs (a ``TensorDataset`` is taken as it is, any other one is read
            once from end to end).
        device: where to put both; by default where ``x`` is.

    Returns:
        ``x`` and ``y``, each ``[n, ...]``.

    Raises:
        TypeError: ``data`` is nothing of the above.
        ValueError: ``x`` or ``y`` is empty, has NaN or infinity, or their lengths differ.
    """
    pair = _read_dataset(data) if isinstance(data, Dataset) else data
    if not isinstance(pair, tuple | list):
        kinds = "a pair (x, y) of tensors or arrays, or a map-style Dataset of pairs"
        raise TypeError(f"data must be {kinds}, got {type(data).__name__}")
    if len(pair) != 2:
        raise ValueError(f"data must be a pair (x, y), got {len(pair)} parts")
    x, y = _to_tensor("x", pair[0]), _to_tensor("y", pair[1])
    _check_lengths(x, y)
    _check_finite("x", x)
    _check_finite("y", y)
    device = x.device if device is None else device
    return x.to(device), y.to(device)


class Minibatches:
    """Batches of ``(x, y)``, shuffled anew at each iteration; the last, short one is kept.

    An epoch costs one ``randperm`` on the CPU, so that the order is the same on every device, and
    one ``index_select`` per batch on the data's device.

    Args:
        x: inputs, ``[n, ...]``.
        y: targets, ``[n, ...]``, on the same device.
        batch_size: examples per batch, at least 1; more than n makes one batch of n.
        shuffle: draw a new order for each epoch, or keep the given one.
        generator: CPU generator of the orders; torch's global one by default.

    Raises:
        TypeError: ``batch_size`` is no int.
        ValueError: ``batch_size < 1``, empty data, lengths or devices that differ, or a generator
            that is not on the CPU.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        batch_size: int,
        *,
        shuffle: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        _check_lengths(x, y)
        if x.device != y.device:
            raise ValueError(f"x and y must be on one device, got {x.device} and {y.device}")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int):
            raise TypeError(f"batch_size must be an int, got {type(batch_size).__name__}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if generator is not None and generator.device.type != "cpu":
            raise ValueError(f"generator must be on the CPU, got one on {generator.device}")
        self.x, self.y = x, y
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.generator = generator

    def __len__(self) -> int:
        return -(-len(self.x) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if not self.shuffle:
            batches = zip(self.x.split(self.batch_size), self.y.split(self.batch_size), strict=True)
            yield from batches
            return
        order = torch.randperm(len(self.x), generator=self.generator).to(self.x.device)
        for rows in order.split(self.batch_size):
            yield self.x.index_select(0, rows), self.y.index_select(0, rows)


def split(
    x: Tensor, y: Tensor, *, fraction: float, seed: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Random split into two disjoint parts, as for training and validation.

    Args:
        x: inputs, ``[n, ...]``.
        y: targets, ``[n, ...]``.
        fraction: share of the second part, in (0, 1); its size is ``round(fraction * n)``.
        seed: of the random order; torch's global generator is not touched.

    Returns:
        ``(x, y)`` of the first and of the second part.

    Raises:
        ValueError: ``fraction`` is outside (0, 1), a part would be empty, or lengths differ.
    """
    _check_lengths(x, y)
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must be in (0, 1), got {fraction}")
    held_out = round(fraction * len(x))
    if not 0 < held_out < len(x):
        raise ValueError(f"fraction={fraction} of {len(x)} examples leaves one part empty")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    second, first = order[:held_out], order[held_out:]
    return (
        (x[first.to(x.device)], y[first.to(y.device)]),
        (x[second.to(x.device)], y[second.to(y.device)]),
    )


def _image_folder(
    image_set: Any, root: str | os.PathLike[str] | None, files: dict[str, str]
) -> Path:
    """The folder that holds the given ``.gz`` files; downloads them where no root was given."""
    given = root if root is not None else os.environ.get("PYRO_BBB_DATA") or None
    base = _cache_folder() if given is None else Path(given).expanduser()
    folder = base / image_set.__name__ / "raw"
    missing = [file for file in files if not (folder / file).is_file()]
    if missing and given is not None:
        layout = f"the layout ROOT/{image_set.__name__}/raw/*.gz with ROOT = {base}"
        raise FileNotFoundError(f"no {' and no '.join(missing)} in {folder}; expected {layout}")
    if missing:
        _download(image_set, folder)
    return folder


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyro_bbb"


def _download(image_set: Any, folder: Path) -> None:
    """Has torchvision download and verify the set; other processes see each file whole or not."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        try:
            fetched = image_set(scratch, download=True)
        except (RuntimeError, OSError) as error:
            layout = f"a folder ROOT that holds ROOT/{image_set.__name__}/raw/*.gz"
            raise RuntimeError(
                f"could not download {image_set.__name__}: "
                f"give --data-root ROOT or set PYRO_BBB_DATA=ROOT to {layout}"
            ) from error
        for file, _ in image_set.resources:
            os.replace(Path(fetched.raw_folder) / file, folder / file)


def _read_idx(path: Path, md5: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Array of a gzipped IDX file of bytes, after its checksum was found right."""
    packed = path.read_bytes()
    found = hashlib.md5(packed, usedforsecurity=False).hexdigest()
    if found != md5:
        wanted = f"its MD5 is {found}, expected {md5}"
        raise RuntimeError(f"{path} is damaged: {wanted}; replace it by the original file")
    raw = gzip.decompress(packed)
    # IDX: two zero bytes, the type, the number of dimensions, their sizes as big-endian int32, data
    dims = raw[3]
    shape = np.frombuffer(raw, ">i4", count=dims, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dims).reshape(shape)


def _read_dataset(data: Dataset[Any]) -> list[Tensor]:
    """Every item of a map-style dataset of pairs, collated."""
    if isinstance(data, IterableDataset):
        raise TypeError(f"data must be a map-style Dataset, got {type(data).__name__}")
    if isinstance(data, TensorDataset):
        return list(data.tensors)
    if len(data) == 0:  # type: ignore[arg-type]
        raise ValueError("data must not be empty, got a Dataset of length 0")
    batches = list(DataLoader(data, batch_size=_READ_BATCH, generator=torch.Generator()))
    if not isinstance(batches[0], list):  # to which pairs are collated
        raise TypeError(
            f"data must have pairs (x, y) as items, got {type(data).__name__} of others"
        )
    return [torch.cat(parts) for parts in zip(*batches, strict=True)]


def _to_tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        return torch.tensor(value)
    if not isinstance(value, Tensor):
        kind = f"dtype {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise TypeError(f"{name} must be a tensor or a numeric numpy array, got {kind}")
    return value


def _check_lengths(x: Tensor, y: Tensor) -> None:
    for name, value in (("x", x), ("y", y)):
        if value.ndim == 0 or len(value) == 0:
            shape = list(value.shape)
            raise ValueError(f"{name} must have at least one example (row), got shape {shape}")
    if len(x) != len(y):
        raise ValueError(f"x and y must have equally many rows, got {len(x)} and {len(y)}")


def _check_finite(name: str, value: Tensor) -> None:
    bad = ~torch.isfinite(value)
    if bad.any():
        row = int(bad.nonzero()[0, 0])
        raise ValueError(f"{name} must be finite, got NaN or infinity first in row {row}")
