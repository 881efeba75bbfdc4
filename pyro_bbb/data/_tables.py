# SPDX-License-Identifier: Apache-2.0
"""Tables as tensors: the UCI regression sets with their splits, and the UCI mushrooms.

They are read from the folder that the user gives, else from a cache that downloads fill. Sets that
the project knows are checked against their SHA-256 each time; other regression sets of the same
layout are read after a check of their content.
"""

import hashlib
import io
import os
from collections.abc import Callable
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_bbb._utils.files import replacing
from pyro_bbb.data._downloads import fetch_mushrooms, fetch_regression
from pyro_bbb.data.cache import cache_folder, given_root, read_verified, verified

_UCI_SHA256 = {  # of the arrays, as `_digest` has them
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
        """``(x, y)`` of the train part and of the test part of one split.

        Raises:
            ValueError: there is no split of this number, counted from 0.
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
        root: folder ROOT; by default ``$PYRO_BBB_DATA``, else the user's cache folder, where a set
            that the project knows is downloaded.
        device: where to put the tensors; the CPU by default.

    Raises:
        FileNotFoundError: ROOT has no such set.
        RuntimeError: the download failed, or the file is damaged or has another content than the
            known set of that name.
        ValueError: ``name`` is no name of a folder, an array is missing, has the wrong shape or
            type or values that are not finite, or a split uses a row twice or one that is not
            there.
    """
    path = _path_of_uci(name, root)
    data = _parsed(path, path.read_bytes(), torch.float32, _UCI_SHA256.get(name))
    return UCIData(*(part.to(device) for part in data))


def read_uci(path: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32) -> UCIData:
    """Read a regression set with its splits from any file of the layout that `load_uci` describes.

    Args:
        path: the ``.npz`` file, of any name and content.
        dtype: dtype of features and targets. Columns with a mean far above their spread are better
            read as ``torch.float64`` before they are standardised.

    Raises:
        FileNotFoundError: there is no such file.
        RuntimeError: the file is damaged.
        ValueError: its content is of another layout, as for `load_uci`, or ``dtype`` is no floating
            type.
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
    """The 8,124 UCI mushrooms, one-hot, from ``ROOT/mushroom/agaricus-lepiota.data``.

    Each of the 22 attributes gets one column for every value that occurs in the file: attributes in
    the order of the file, their values in the order of the alphabet, ``?`` (missing, only in
    stalk-root) before all others as a value of its own. That makes 117 columns.

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
    base = _base(root)
    path = base / "mushroom" / "agaricus-lepiota.data"
    if not path.is_file() and given_root(root) is None:
        check = partial(verified, path, algorithm="sha256", expected=_MUSHROOMS_SHA256)
        _fill_cache(path, base, fetch_mushrooms, check)
    if not path.is_file():
        raise FileNotFoundError(_absent(path, base))
    text = read_verified(path, "sha256", _MUSHROOMS_SHA256).decode("ascii")
    labels, *attributes = zip(*(line.split(",") for line in text.splitlines()), strict=True)
    x = np.hstack([np.array(column)[:, None] == np.unique(column) for column in attributes])
    y = np.array(labels) == "p"
    return (
        torch.tensor(x, dtype=torch.float32, device=device),
        torch.tensor(y, dtype=torch.int64, device=device),
    )


def _base(root: str | os.PathLike[str] | None) -> Path:
    given = given_root(root)
    return cache_folder() if given is None else given


def _absent(path: Path, base: Path) -> str:
    layout = f"that holds ROOT/{path.relative_to(base).as_posix()}"
    return f"no {path}; pass root=ROOT or set PYRO_BBB_DATA=ROOT to a folder {layout}"


def _fill_cache(
    path: Path, base: Path, fetch: Callable[[], bytes], check: Callable[..., object]
) -> None:
    """Download a file, which lies in the cache once it is verified."""
    try:
        content = fetch()
    except (OSError, HTTPException, ValueError) as error:
        hint = f"without a network, there is {_absent(path, base)}"
        raise RuntimeError(f"could not download {path.name}: {hint}") from error
    check(content=content)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_bytes(content)


def _path_of_uci(name: str, root: str | os.PathLike[str] | None) -> Path:
    if not isinstance(name, str) or not name or name == ".." or Path(name).name != name:
        raise ValueError(f"name must be the name of a folder, got {name!r}")
    base = _base(root)
    path = base / "uci" / name / "data.npz"
    if not path.is_file() and given_root(root) is None and name in _UCI_SHA256:
        check = partial(_parsed, path, dtype=torch.float32, sha256=_UCI_SHA256[name])
        _fill_cache(path, base, partial(fetch_regression, name), check)
    if not path.is_file():
        others = sorted(other.parent.name for other in base.glob("uci/*/data.npz"))
        there = f" (there are {', '.join(others)})" if others else ""
        raise FileNotFoundError(_absent(path, base) + there)
    return path


def _parsed(path: Path, content: bytes, dtype: torch.dtype, sha256: str | None = None) -> UCIData:
    """The content of a file, checked."""
    arrays = _read_npz(path, content)
    _check_values(path, arrays)
    _check_splits(path, arrays)
    if sha256 is not None and (found := _digest(arrays)) != sha256:
        wanted = f"the SHA-256 of its numbers is {found}, expected {sha256}"
        raise RuntimeError(f"{path} is damaged: {wanted}; replace it by the original file")
    pairs = zip(_DIMENSIONS, (dtype, dtype, torch.int64, torch.int64), strict=True)
    return UCIData(*(torch.tensor(arrays[key], dtype=t) for key, t in pairs))


def _read_npz(path: Path, content: bytes) -> Arrays:
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files if key in _DIMENSIONS}
    except Exception as error:  # zip, zlib, numpy each have several for a damaged file
        raise RuntimeError(f"{path} is damaged or no .npz file of numbers: {error}") from error
    missing = sorted(_DIMENSIONS.keys() - arrays.keys())
    if missing:
        raise ValueError(f"{path} must hold {list(_DIMENSIONS)}, got no {' and no '.join(missing)}")
    return arrays


def _digest(arrays: Arrays) -> str:
    """SHA-256 of the numbers, whatever the type and the compression in the file."""
    found = hashlib.sha256()
    for key in _DIMENSIONS:
        kind = "<i8" if "index" in key else "<f8"
        found.update(np.ascontiguousarray(arrays[key].astype(kind)).tobytes())
    return found.hexdigest()


def _check_values(path: Path, arrays: Arrays) -> None:
    """Dimensions, types, and finite numbers."""
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
    """Every split has rows of the table, none of them twice: no test row is trained on."""
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
