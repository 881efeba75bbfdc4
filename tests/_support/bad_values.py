# SPDX-License-Identifier: Apache-2.0
"""Values to try in place of an argument, by the kind of value that it has when all is well."""

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

WRONG = "is an error"
SAME = "works as before"
EITHER = "works or is an error"

Make = Callable[[Any], Any]
Variant = tuple[str, Make, str]  # words, from the good value to another, what is due


def constant(value: Any) -> Make:
    """A variant that does not look at the good value."""
    return lambda _: value


def numbers(wrong: dict[str, Any], either: dict[str, Any]) -> list[Variant]:
    """Variants of a scalar."""
    found: list[Variant] = [(words, constant(value), WRONG) for words, value in wrong.items()]
    return found + [(words, constant(value), EITHER) for words, value in either.items()]


REALS = numbers(
    {"text": "0.5", "NaN": math.nan, "complex": 0.5j, "a list": [0.5]},
    {
        "infinite": math.inf,
        "minus infinite": -math.inf,
        "negative": -1.0,
        "zero": 0.0,
        "tiny": 1e-30,
        "huge": 1e30,
        "too large for a float": 10**400,
        "true": True,
        "a tensor": torch.tensor(0.5),
        "numpy": np.float64(0.5),
        "numpy, single": np.float32(0.5),
    },
)
INTEGERS = numbers(
    {"text": "2", "NaN": math.nan, "complex": 2j, "a list": [2], "a fraction": 1.5},
    {
        "infinite": math.inf,
        "negative": -1,
        "zero": 0,
        "true": True,
        "a whole float": 2.0,
        "a tensor": torch.tensor(2),
        "numpy": np.int64(2),
    },
)
NAMES = numbers(
    {"unknown": "no such name", "a number": 3, "bytes": b"mnist", "a list": ["a", "b"]},
    {"empty": ""},
)
OBJECTS = numbers({"text": "something", "a number": 3.5, "an object": object()}, {})


def read_only(x: Tensor) -> Tensor:
    """The same values in memory of numpy that must not be written."""
    array = x.numpy().copy()
    array.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that torch cannot protect it
        return torch.from_numpy(array)


def spread(x: Tensor) -> Tensor:
    """The same values, every other number in memory."""
    return torch.stack([x, x], -1)[..., 0]


def with_first(value: float) -> Make:
    """The first number replaced."""

    def make(x: Tensor) -> Tensor:
        flat = x.flatten().clone()
        flat[:1] = value
        return flat.view_as(x)

    return make


TENSORS: list[Variant] = [
    ("text", constant("x"), WRONG),
    ("an object", constant(object()), WRONG),
    ("without values", lambda x: x.to("meta"), WRONG),
    ("not contiguous", spread, SAME),
    ("read-only", read_only, SAME),
    ("nested lists", lambda x: x.tolist(), EITHER),
    ("numpy", lambda x: x.numpy(), EITHER),
    ("a single number", lambda x: x.flatten()[0], EITHER),
    ("empty", lambda x: x[:0] if x.dim() else x.new_zeros(0), EITHER),
    ("one row", lambda x: x[:1] if x.dim() else x, EITHER),
    ("one row less", lambda x: x[1:] if x.dim() else x, EITHER),
    ("one dimension more", lambda x: x.unsqueeze(0), EITHER),
    ("one dimension more, last", lambda x: x.unsqueeze(-1), EITHER),
    ("bool", lambda x: x.bool(), EITHER),
    ("complex", lambda x: x.to(torch.complex64), EITHER),
]
FLOATS: list[Variant] = [
    *TENSORS,
    ("NaN", with_first(math.nan), EITHER),
    ("infinite", with_first(math.inf), EITHER),
    ("minus infinite", with_first(-math.inf), EITHER),
    ("huge", with_first(1e30), EITHER),
    ("tiny", with_first(1e-30), EITHER),
    ("negative", lambda x: -x - 1, EITHER),
    ("double", lambda x: x.double(), EITHER),
    ("half", lambda x: x.half(), EITHER),
    ("integers", lambda x: x.long(), EITHER),
    ("with gradient", lambda x: x.clone().requires_grad_(), SAME),
]
LABELS: list[Variant] = [
    *TENSORS,
    ("floats", lambda x: x.float(), EITHER),
    ("negative", lambda x: -x - 1, EITHER),
    ("huge", with_first(2**40), EITHER),
    ("bytes", lambda x: x.to(torch.uint8), EITHER),
]


def variants(value: Any, *, optional: bool) -> Iterator[Variant]:
    """What to try in place of a value; None as well, where it is no documented one."""
    found = list(_variants(value))
    if found and not optional:
        found.append(("None", constant(None), WRONG))
    yield from found


def _variants(value: Any) -> list[Variant]:
    if isinstance(value, Tensor):
        flags = value.dtype == torch.bool
        return FLOATS if value.is_floating_point() else TENSORS if flags else LABELS
    if isinstance(value, bool) or value is None:
        return []
    if isinstance(value, int):
        return INTEGERS
    if isinstance(value, float):
        return REALS
    if isinstance(value, str):
        return NAMES
    return OBJECTS
