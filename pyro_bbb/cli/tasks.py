# SPDX-License-Identifier: Apache-2.0
"""Recognition of the task from the target column, and the targets of each task."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pyro_bbb.cli.encoding import is_number, require_all, require_finite
from pyro_bbb.cli.errors import BadInput
from pyro_bbb.cli.options import Task
from pyro_bbb.cli.table_io import first_row

_FEW = 20  # different integers up to which they are taken for classes
_EACH = 5  # rows that each of them has on average, at least
_LARGEST = 1e150  # number to predict, as variances have to be finite
_MOST_CLASSES = 1000


def recognise(target: pl.Series) -> tuple[Task, str]:
    """The task that a target suggests, and why in words."""
    different = target.drop_nulls().n_unique()
    if not is_number(target) or target.dtype == pl.Boolean:
        kind = "truth values" if target.dtype == pl.Boolean else "texts"
        return "classification", f"it holds {different} different {kind}"
    integers = target.dtype.is_integer() or (target.drop_nulls() % 1 == 0).all()
    if integers and different <= _FEW and len(target) >= _EACH * different:
        return "classification", f"it holds {different} different integers"
    return "regression", f"it holds {different} different numbers"


def targets(target: pl.Series, task: Task) -> NDArray[Any]:
    """The targets for training or scores: numbers or labels, ``[n]``."""
    if target.null_count() or (target.dtype.is_float() and target.is_nan().any()):
        require_all(target, "leave out the rows without a target")
    if task == "regression":
        if not is_number(target):
            raise BadInput(f"column {target.name!r} holds {target.dtype}, not numbers to predict")
        require_finite(target)
        if (large := target.abs() > _LARGEST).any():
            row = first_row(large)
            raise BadInput(
                f"column {target.name!r} has {target[row - 1]} in row {row}, too large: its square "
                "is infinite; divide the column by a constant"
            )
        return np.array(target.cast(pl.Float64))
    if is_number(target) and target.dtype.is_float() and (target % 1 == 0).all():
        target = target.cast(pl.Int64)
    labels = target if is_number(target) else target.cast(pl.String)
    return np.array(labels.to_list())


def require_classes(labels: NDArray[Any], name: str) -> None:
    """Raise BadInput unless there are two classes or more, up to a thousand."""
    number = len(np.unique(labels))
    if number < 2:
        raise BadInput(f"column {name!r} has one value only, {str(labels[0])!r}: nothing to learn")
    if number > _MOST_CLASSES:
        raise BadInput(f"column {name!r} has {number} classes, more than {_MOST_CLASSES}")
