# SPDX-License-Identifier: Apache-2.0
"""Validation of arguments; each error names the argument, the expectation and the value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LARGEST_LOG = math.log(torch.finfo(torch.float32).max)

_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
_MOST_DENSE = 1  # GiB that a sparse matrix may take when it is made dense


def as_float(number: Any) -> float:
    """Return a number as a float; an integer too large for one becomes infinite."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def as_number(value: Any) -> Any:
    """Return NumPy's scalars and 0-d arrays as Python's; any other value unchanged."""
    return value.item() if isinstance(value, np.generic | np.ndarray) and not value.ndim else value


def all_finite(value: Tensor) -> bool:
    """Return whether all numbers are finite; in most cases without a tensor of their size."""
    # NaN and infinity reach the sum; a sum of finite numbers may overflow
    return bool(value.sum().isfinite() or value.isfinite().all())


def holds_labels(y: Tensor, classes: int) -> bool:
    """Return whether targets are integers; of two classes also bools, or floats 0 and 1."""
    if y.dtype == torch.bool or y.is_floating_point():
        return classes == 2 and bool(((y == 0) | (y == 1)).all())
    return not y.is_complex()


# --- numbers ---


def _number(
    expected: str, valid: Callable[[float], bool], *, in_tensors: bool = False
) -> Callable[[str, Any], float]:
    """Return a check of a named argument that returns a valid real number as a float.

    ``in_tensors`` refuses numbers that overflow or underflow in a tensor.
    """

    def check(name: str, value: Any) -> float:
        value = as_number(value)
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number, got {value!r}")
        number = as_float(value)
        if not valid(number):
            raise ValueError(f"{name} must be {expected}, got {number}")
        if in_tensors:
            stored = torch.tensor(number).item()
            if math.isinf(stored) or (stored == 0 and number != 0):
                dtype = torch.get_default_dtype()
                raise ValueError(f"{name} must be a number of {dtype}, got {number}")
        return number

    return check


finite = _number("finite", math.isfinite, in_tensors=True)
positive = _number("positive and finite", lambda x: 0 < x < math.inf, in_tensors=True)
at_least_zero = _number("a non-negative number", lambda x: 0 <= x < math.inf)
fraction = _number("in [0, 1]", lambda x: 0 <= x <= 1)
below_one = _number("in [0, 1)", lambda x: 0 <= x < 1)
probability = _number("in (0, 1)", lambda x: 0 < x < 1)


def probabilities(name: str, values: Any) -> list[float]:
    """Return one or more numbers in (0, 1) as floats."""
    if isinstance(values, Tensor):
        values = values.tolist()
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        raise TypeError(f"{name} must be several numbers, got {values!r}")
    numbers = [probability(name, value) for value in values]
    if not numbers:
        raise ValueError(f"{name} must hold at least one number, got none")
    return numbers


def count(name: str, value: Any, least: int = 1) -> int:
    """Return an integer of at least ``least`` as an int."""
    if type(value) is int and value >= least:  # first, as it is called in every step
        return value
    value = as_number(value)
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return int(value)


def require_numbers(outputs: Mapping[str, Tensor]) -> None:
    """Raise ValueError where a prediction ``[s, n, ...]`` is NaN, infinite or of scale 0."""
    for name, value in outputs.items():
        least, most = value.aminmax()
        if not (_is_number(name, least) & _is_number(name, most)):
            wrong = ~_is_number(name, value)
            rows = wrong.transpose(0, 1).flatten(1).any(1).nonzero().flatten()
            remark = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
            raise ValueError(
                f"row {rows[0].item()} of x{remark}: the network's {name} is {value[wrong][0]:g}, "
                "expected finite numbers; the inputs are too large for it (standardize them, or "
                "leave such rows out), or its weights are not finite"
            )


def _is_number(name: str, value: Tensor) -> Tensor:
    least = {"loc": -math.inf, "scale": 0.0}.get(name)
    most = _LARGEST_LOG if name == "log_rate" else math.inf
    return (value < most) & (True if least is None else value > least)


def require(feature: str, lacking: Mapping[str, bool]) -> None:
    """Raise ValueError for the first need of a feature that is lacking."""
    if needs := [need for need, is_lacking in lacking.items() if is_lacking]:
        raise ValueError(f"{feature} needs {needs[0]}")


def one_of(name: str, value: Any, known: Iterable[str]) -> str:
    """Return the value, if it is one of the known names."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} must be one of {list(known)}, got {value!r}")
    return value


def tensor(name: str, value: Any) -> Tensor:
    """Return a tensor unchanged, or a numeric numpy array as a tensor."""
    converted = of_array(as_dense(name, value))
    if not isinstance(converted, Tensor):
        got = f"dtype {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise TypeError(f"{name} must be a tensor or a numeric numpy array, got {got}")
    return converted


def as_dense(name: str, value: Any) -> Any:
    """Return a sparse matrix, of scipy or torch, as a dense one; any other value unchanged.

    Raises:
        TypeError: the dense one would take more than 1 GiB.
    """
    of_torch = isinstance(value, Tensor)
    if value.layout not in _SPARSE if of_torch else not hasattr(value, "toarray"):
        return value
    memory = math.prod(value.shape) * value.dtype.itemsize / 2**30
    if memory > _MOST_DENSE:
        make = "to_dense" if of_torch else "toarray"
        raise TypeError(
            f"{name} must take at most {_MOST_DENSE} GiB when dense, got a sparse "
            f"{type(value).__name__} of shape {list(value.shape)}, which takes {memory:.2g} GiB: "
            f"pass {name}.{make}(), fewer columns (TruncatedSVD, feature selection), or to fit a "
            "DataLoader whose collate_fn makes each minibatch dense"
        )
    return value.to_dense() if of_torch else value.toarray()


def of_array(value: Any) -> Any:
    """Return a numeric numpy array as a tensor; any other value unchanged."""
    numeric = isinstance(value, np.ndarray) and value.dtype.kind in "fiub"
    return torch.tensor(value) if numeric else value


def as_seed(name: str, value: Any) -> int:
    """Return an integer that seeds torch."""
    value = as_number(value)
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    seed = int(value)
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"{name} must be an integer of 64 bits, got {seed}")
    return seed


def as_device(device: Any) -> torch.device:
    """Return the device of that name, if it is available."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"device {device!r} is not available: {error}") from error


def floating(dtype: Any) -> torch.dtype | None:
    """Return a floating dtype or ``None``."""
    if not (dtype is None or isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be a floating torch.dtype, got {dtype!r}")
    return dtype


def kind(name: str, value: Any, expected: type) -> Any:
    """Return the value, if it is an instance of a class."""
    if not isinstance(value, expected):
        raise TypeError(f"{name} must be a {expected.__name__}, got {type(value).__name__}")
    return value


def function(name: str, value: Any, signature: str) -> Any:
    """Return the value, if it can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be a function {signature}, got {value!r}")
    return value
