# SPDX-License-Identifier: Apache-2.0
"""What every public function owes to bad input, and how a table of such input is judged.

A call either works or raises a clear error: of a documented type, raised by this library itself and
not from deep inside Pyro or torch, and naming the argument. In both cases it ends in time and
leaves its arguments and all global state as they were.
"""

import inspect
import math
import re
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pytest
import torch
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.parameter import is_lazy

import pyro_bbb

PACKAGE = Path(pyro_bbb.__file__).parent
CLEAR = (ValueError, TypeError)
SECONDS = 20.0  # for one call; the slowest takes a tenth of one
SAYS_WHAT = re.compile(r"must|expected|need|lack|has no|does not|no latent|outside|is not|leaves")


@dataclass(frozen=True, repr=False)
class Row:
    """One public function and what is tried on it.

    Args:
        of: its dotted name below ``pyro_bbb``; of a method, with the class.
        good: arguments by name with which it works, new at each call.
        bad: an argument, its value and a pattern that the error matches; or what replaces several
            arguments, and a pattern.
        fine: what replaces some of the arguments so that it works.
        also: further types of error that it documents.
        aka: patterns by which errors call an argument, where not by its name.
        skip: automatic variants that are left out, and why: ``"argument: variant"``, either of
            which may be ``*``.
        changes: names of the arguments that it is there to change.
        fails: whether the good arguments lack something that is not there, such as a file.
        half_made: whether an error leaves those as far as it came.
    """

    of: str
    good: Callable[[], dict[str, Any]]
    bad: Sequence[tuple[Any, ...]] = ()
    fine: Sequence[dict[str, Any]] = ()
    also: tuple[type[Exception], ...] = ()
    aka: Mapping[str, str] = field(default_factory=dict)
    skip: Mapping[str, str] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    fails: bool = False
    half_made: bool = False

    def __repr__(self) -> str:
        return f"Row({self.of!r})"

    @property
    def function(self) -> Callable[..., Any]:
        """What is called."""
        return resolve(self.of.partition(" ")[0])


@dataclass(frozen=True)
class Case:
    """One call: a row's good arguments with some of them replaced.

    Args:
        row: the row.
        words: what is wrong or unusual.
        replaced: the replacements; callables of the good value are called.
        error: pattern of the message where an error is due; ``""`` for any clear one, ``None`` for
            none; ``...`` where both are right.
        same: whether the result is that of the good arguments.
    """

    row: Row
    words: str
    replaced: dict[str, Any]
    error: Any
    same: bool = False


def row(of: str, good: Callable[[], dict[str, Any]], *bad: tuple[Any, ...], **options: Any) -> Row:
    """A row, its cases of bad input one after the other."""
    return Row(of, good, bad, **options)


def resolve(name: str) -> Any:
    """A public object by its dotted name."""
    head, *path = name.split(".")
    root = pyro_bbb if hasattr(pyro_bbb, head) else import_module(f"pyro_bbb.{head}")
    return reduce(getattr, name.split(".") if root is pyro_bbb else path, root)


def cases(row: Row) -> Iterator[Case]:
    """A row's own cases and those that the kind of each argument suggests."""
    yield Case(row, "good", {}, "" if row.fails else None)
    for *what, message in row.bad:
        replaced = what[0] if len(what) == 1 else dict([what])
        yield Case(row, f"{replaced!r:.80}", replaced, message)
    for replaced in row.fine:
        yield Case(row, f"{replaced!r:.80}", replaced, None)
    with torch.random.fork_rng(devices=[]):
        good = row.good()
    for name, value in good.items():
        optional = takes_none(row.function, name)
        for words, make, due in variants(value, optional=optional):
            skipped = {f"{name}: {words}", f"{name}: *", f"*: {words}"} & row.skip.keys()
            if name == "self" or skipped:
                continue
            error = {WRONG: "", SAME: None}.get(due, ...)
            yield Case(row, f"{name}: {words}", {name: Replaced(make)}, error, due == SAME)


def left(argument: str, *words: str, why: str) -> dict[str, str]:
    """Automatic variants of an argument that are left out, for `Row.skip`."""
    return {f"{argument}: {word}": why for word in words}


def no_counts(*names: str) -> list[tuple[str, Any, str]]:
    """Return entries of `Row.bad`: each argument replaced by what is no positive integer."""
    message = "{} must be an integer of at least 1, got"
    return [(name, value, message.format(name)) for name in names for value in (0, True, 2.0)]


@dataclass(frozen=True)
class Replaced:
    """A value computed from the good one."""

    make: Callable[[Any], Any]


def takes_none(function: Callable[..., Any], name: str) -> bool:
    """Whether None is a documented value of an argument."""
    parameter = inspect.signature(function).parameters.get(name)
    return parameter is not None and parameter.default is None


def judge(case: Case) -> None:
    """Makes the call of a case and checks all that is promised."""
    row, arguments = case.row, arguments_of(case)
    torch.manual_seed(0)
    seeded = arguments.get("seed") is not None
    before, outside = snapshot(arguments), surroundings(seeded)
    error, result = call(row.function, arguments)
    assert surroundings(seeded) == outside, "global state has changed"
    begun = error is None or isinstance(error, row.also) or row.half_made
    for name, value in before[1].items():
        if not (begun and name in row.changes):
            assert same(value, snapshot(arguments[name])), f"{name} was changed"
    if error is not None:
        assert case.error is not None, f"must work, raised {error!r}"
        require_clear(row, case, error)
    else:
        assert case.error is None or case.error is ..., f"must be an error, returned {result!r}"
    if case.same and not row.changes:
        arguments = row.good()
        torch.manual_seed(0)
        _, plain = call(row.function, arguments)
        assert same(snapshot(plain), snapshot(result), values_only=True), "another result"


def arguments_of(case: Case) -> dict[str, Any]:
    """The arguments of a case."""
    arguments = case.row.good()
    for name, value in case.replaced.items():
        is_made = isinstance(value, Replaced)
        arguments[name] = value.make(arguments[name]) if is_made else value
    return arguments


def call(
    function: Callable[..., Any], arguments: dict[str, Any]
) -> tuple[BaseException | None, Any]:
    """What a call raises, and what it returns, within the time limit."""
    try:
        with in_time():
            return None, function(**arguments)
    except TimeoutError:
        raise
    except Exception as error:
        return error, None


def require_clear(row: Row, case: Case, error: BaseException) -> None:
    """An error is clear: its type, where it was raised, and what it says."""
    types = (*CLEAR, *row.also)
    assert isinstance(error, types), f"raised {type(error).__name__}: {error}"
    if isinstance(error, OSError):  # the system says of which file
        return
    place = raised_in(error)
    assert PACKAGE in place.parents, f"raised in {place}: {error!r}"
    if case.error not in ("", ...):
        assert re.search(case.error, str(error)), f"says {str(error)!r}"
    elif not isinstance(error, row.also):
        names = "|".join(row.aka.get(name, rf"\b{name}\b") for name in case.replaced)
        assert re.search(names, str(error)), f"does not name {names}: {error!r}"
        assert SAYS_WHAT.search(str(error)), f"does not say what is expected: {error!r}"


def raised_in(error: BaseException) -> Path:
    """The file of the innermost frame."""
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    return Path(trace.tb_frame.f_code.co_filename)


@contextmanager
def in_time() -> Iterator[None]:
    """Raises TimeoutError in a call that does not end."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"still running after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def surroundings(with_random_state: bool) -> dict[str, Any]:
    """Global state that a call is to leave alone; the random one where it has a seed."""
    state = {
        "store": sorted(pyro.get_param_store().keys()),
        "handlers": len(_PYRO_STACK),
        "validation": Distribution._validate_args,
        "pyro validation": pyro.poutine.util.is_validation_enabled(),
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
    }
    if with_random_state:
        state["random"] = torch.get_rng_state().tolist()
    return state


def snapshot(x: Any) -> Any:
    """Values of all tensors and arrays inside, with what else a call could change of them."""
    if isinstance(x, Tensor):
        grad = None if not x.is_leaf or x.grad is None else x.grad.clone()
        if is_lazy(x):
            return "tensor", None
        values = None if x.device.type == "meta" else x.detach().clone()
        return "tensor", values, (x.shape, x.dtype, x.device, x.requires_grad, x._version), grad
    if isinstance(x, np.ndarray):
        return "array", x.copy() if x.dtype != object else None, x.flags.writeable
    if isinstance(x, nn.Module):
        tensors = {**dict(x.named_parameters()), **dict(x.named_buffers())}
        return "module", snapshot(tensors), [m.training for m in x.modules()]
    if isinstance(x, Distribution):
        return "distribution", {k: snapshot(v) for k, v in vars(x).items() if isinstance(v, Tensor)}
    if is_dataclass(x) and not isinstance(x, type):
        names = [f.name for f in fields(x) if f.name != "seconds"]  # wall time
        return "record", {name: snapshot(getattr(x, name)) for name in names}
    if isinstance(x, Mapping):
        return "mapping", {key: snapshot(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return "sequence", [snapshot(value) for value in x]
    if isinstance(x, (int, float, str, bytes, complex, type(None))):
        return "value", x
    return "object", None


def same(a: Any, b: Any, *, values_only: bool = False) -> bool:
    """Whether two snapshots are equal; NaN equals itself."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        kept = a.shape == b.shape and (values_only or a.dtype == b.dtype)
        return kept and torch.allclose(a, b.to(a.dtype), rtol=1e-5, atol=1e-6, equal_nan=True)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    if isinstance(a, tuple) and a and a[0] == "tensor" and values_only:
        return same(a[1], b[1], values_only=True)
    if isinstance(a, dict):
        pairs = [(a[key], b.get(key)) for key in a]
        return a.keys() == b.keys() and all(same(*p, values_only=values_only) for p in pairs)
    if isinstance(a, (list, tuple)):
        if type(a) is not type(b) or len(a) != len(b):
            return False
        return all(same(p, q, values_only=values_only) for p, q in zip(a, b, strict=True))
    if isinstance(a, (float, complex)):
        return a == b or (a != a and b != b) or (values_only and a == pytest.approx(b, rel=1e-5))
    return bool(a == b)


# --- values to try in place of an argument, by the kind of its good value ---

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
    listed: list[Variant] = [(words, constant(value), WRONG) for words, value in wrong.items()]
    return listed + [(words, constant(value), EITHER) for words, value in either.items()]


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
    """Return the same values in memory of numpy that must not be written."""
    array = x.numpy().copy()
    array.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that torch cannot protect it
        return torch.from_numpy(array)


def spread(x: Tensor) -> Tensor:
    """Return the same values, every other number in memory."""
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
    listed = list(_variants(value))
    if listed and not optional:
        listed.append(("None", constant(None), WRONG))
    yield from listed


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
