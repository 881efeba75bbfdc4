# SPDX-License-Identifier: Apache-2.0
"""Inputs as one tensor, or as several tensors whose rows belong together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Size, Tensor, nn
from torch.utils.data import DataLoader, Dataset

from pyro_bbb._utils.validation import tensor

READ_BATCH = 1024  # items collated at once when a Dataset is read


class SeveralInputs:
    """Inputs of a network that takes several tensors, in place of one tensor of inputs.

    Args:
        args: tensors that the network takes by position, ``[n, ...]`` each.
        kwargs: tensors that it takes by name.
        weight: weights of the examples in the likelihood, ``[n]``; not an input of the network.

    Raises:
        ValueError: no tensor is given, or their lengths differ.
    """

    def __init__(
        self, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], weight: Tensor | None = None
    ) -> None:
        self.args: tuple[Tensor, ...] = args
        self.kwargs: dict[str, Tensor] = kwargs
        self.weight: Tensor | None = weight
        if not (args or kwargs):
            raise ValueError("x must hold at least one tensor, got none")
        rows = {name: len(x) if x.dim() else 0 for name, x in self.parts.items()}
        if len(set(rows.values())) > 1:
            counts = ", ".join(f"{name} has {count}" for name, count in rows.items())
            raise ValueError(f"the tensors of x must have equally many rows, {counts}")

    @property
    def parts(self) -> dict[str, Tensor]:
        """Return the tensors by name; positional ones are ``x[0]``, ``x[1]`` and so on."""
        by_position = {f"x[{i}]": x for i, x in enumerate(self.args)}
        by_name = {f"x[{name!r}]": x for name, x in self.kwargs.items()}
        weight = {} if self.weight is None else {"sample_weight": self.weight}
        return by_position | by_name | weight

    def map(self, function: Callable[[Tensor], Tensor]) -> SeveralInputs:
        """Return the inputs after a function of each tensor."""
        return _rebuilt(self, list(map(function, self.parts.values())))

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0

    def __getitem__(self, rows: Any) -> SeveralInputs:
        return self.map(lambda part: part[rows])

    def split(self, sizes: int | list[int]) -> list[SeveralInputs]:
        """Return views of at most ``sizes`` rows each, or of the given numbers of rows."""
        splits = [x.split(sizes) for x in self.parts.values()]
        return [_rebuilt(self, tensors) for tensors in zip(*splits, strict=True)]

    def tensor_split(self, count: int) -> list[SeveralInputs]:
        """Split into ``count`` nearly equal parts."""
        rows = torch.arange(len(self)).tensor_split(count)
        return [self[indices.to(self.device)] for indices in rows]

    def index_select(self, dim: int, rows: Tensor) -> SeveralInputs:
        """Return the rows at the given indices."""
        return self.map(lambda part: part.index_select(dim, rows))

    def to(self, target: torch.device | torch.dtype) -> SeveralInputs:
        """Return the inputs on a device, or in a precision."""
        return self.map(lambda part: part.to(target))

    def clone(self) -> SeveralInputs:
        """Return a copy."""
        return self.map(Tensor.clone)

    def dim(self) -> int:
        """Dimensions of the first tensor."""
        return len(self.shape)

    @property
    def shape(self) -> Size:
        """Shape of the first tensor."""
        return next(iter(self.parts.values())).shape

    @property
    def device(self) -> torch.device:
        """Device of the first tensor."""
        return next(iter(self.parts.values())).device


Rows: TypeAlias = Tensor | SeveralInputs


def as_inputs(value: Any) -> Rows:
    """Return inputs as a tensor; a list, tuple or dict of them as several."""
    if isinstance(value, SeveralInputs):
        return value
    if isinstance(value, Mapping):
        return SeveralInputs((), {key: tensor(f"x[{key!r}]", x) for key, x in value.items()})
    # a list without any tensor or array is a table in nested lists
    if isinstance(value, tuple | list) and (
        not value or any(isinstance(x, Tensor | np.ndarray) for x in value)
    ):
        return SeveralInputs(tuple(tensor(f"x[{i}]", x) for i, x in enumerate(value)), {})
    return tensor("x", value)


def require_inputs(value: Any) -> Rows:
    """Return inputs of at least one row, by `as_inputs`."""
    x = as_inputs(value)
    for name, values in parts_of(x).items():
        if values.dim() == 0 or len(values) == 0:
            raise ValueError(f"{name} must hold at least one input, got shape {list(values.shape)}")
    return x


def parts_of(x: Rows) -> dict[str, Tensor]:
    """Return the tensors of inputs by their names in messages."""
    return x.parts if isinstance(x, SeveralInputs) else {"x": x}


def input_tensors(x: Rows) -> tuple[Tensor, ...]:
    """Return the tensors of inputs, in order."""
    return tuple(parts_of(x).values())


def with_tensors(like: Rows, parts: Sequence[Tensor]) -> Rows:
    """Return inputs of a form, from their tensors."""
    return parts[0] if isinstance(like, Tensor) else _rebuilt(like, parts)


def _rebuilt(like: SeveralInputs, parts: Sequence[Tensor]) -> SeveralInputs:
    weight = None if like.weight is None else parts[-1]
    kwargs = dict(zip(like.kwargs, parts[len(like.args) :], strict=False))
    return SeveralInputs(tuple(parts[: len(like.args)]), kwargs, weight)


def weighted(x: Rows, weight: Any) -> Rows:
    """Return inputs with weights ``[n]`` of their examples in the likelihood, if given.

    Raises:
        TypeError: the weights are not a tensor or a numeric array.
        ValueError: they are of another shape, negative, NaN or infinite.
    """
    if weight is None:
        return x
    weight = tensor("sample_weight", weight).detach()
    if weight.shape != (len(x),):
        raise ValueError(
            f"sample_weight must have shape [{len(x)}], a weight for each row, got "
            f"{list(weight.shape)}"
        )
    if weight.is_complex() or not (valid := weight.isfinite() & (weight >= 0)).all():
        row = 0 if weight.is_complex() else int((~valid).nonzero()[0, 0])
        raise ValueError(
            f"sample_weight must be finite and at least 0, got {weight[row].item()} in row {row}"
        )
    weight = weight.to(x.device, weight.dtype if weight.is_floating_point() else torch.float64)
    args, kwargs = ((x,), {}) if isinstance(x, Tensor) else (x.args, x.kwargs)
    return SeveralInputs(args, kwargs, weight)


def weight_of(x: Rows) -> Tensor | None:
    """Return weights of the examples ``[n]``, if they have any."""
    return x.weight if isinstance(x, SeveralInputs) else None


def call_arguments(x: Rows) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and named arguments with which a network is called."""
    return (x.args, x.kwargs) if isinstance(x, SeveralInputs) else ((x,), {})


def each(x: Rows, function: Callable[[Tensor], Tensor]) -> Rows:
    """Return the inputs after a function of their tensor, or of each."""
    return x.map(function) if isinstance(x, SeveralInputs) else function(x)


def input_batches(
    data: Dataset[Any] | DataLoader[Any], batch_size: int | None = None
) -> Iterator[Rows]:
    """Yield the inputs of a map-style dataset or a loader by batches, without targets."""
    if not isinstance(data, DataLoader):
        size = batch_size or READ_BATCH
        data = DataLoader(data, batch_size=size, generator=torch.Generator())
    for batch in data:
        yield as_inputs(batch[0] if isinstance(batch, list | tuple) else batch)


def _first_floating(part: Any) -> Tensor | None:
    """Return a module's or mapping's first tensor of floating type, if any."""
    values: Any = part.values() if isinstance(part, Mapping) else ()
    if isinstance(part, nn.Module):
        values = chain(part.parameters(), part.buffers())
    return next((x for x in values if isinstance(x, Tensor) and x.is_floating_point()), None)


def at_least_single(x: Tensor) -> Tensor:
    """Return a floating tensor in single precision at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) if x.is_floating_point() else x


def to_precision(x: Rows, *parts: Any) -> Any:
    """Convert inputs to the precision of the first part that has one; integers stay, as indices.

    Args:
        x: inputs, ``[n, ...]``.
        parts: guides and models, or samples by name; others are ignored.

    Raises:
        ValueError: a finite input is infinite in that precision.
    """
    dtype = next((x.dtype for x in map(_first_floating, parts) if x is not None), None)

    def convert(x: Tensor) -> Tensor:
        new = x.to(dtype) if dtype and x.is_floating_point() else x
        if new is not x and not x.is_meta and (overflow := new.isinf() & x.isfinite()).any():
            index = overflow.nonzero()[0].tolist()
            raise ValueError(
                f"x has {x[tuple(index)].item()} in row {index[0]}, too large for {new.dtype}: "
                "standardise it (data.standardize), or call .double() on the model"
            )
        return new

    return each(x, convert)


def tensor_of(outputs: Any) -> Any:
    """Return the tensor in a network's outputs, such as the ``logits`` of Hugging Face's."""
    return outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", outputs)
