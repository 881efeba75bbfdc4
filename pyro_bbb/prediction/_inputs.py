# SPDX-License-Identifier: Apache-2.0
"""Inputs of a prediction: their checks, device and precision, and the rows of one pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pyro_bbb._utils.inputs import Rows, parts_of, require_inputs, to_precision
from pyro_bbb._utils.validation import all_finite, count
from pyro_bbb.models import BayesianModel
from pyro_bbb.prediction._weight_samples import default_rows


def rows_of_pass(batch_size: int | None, x: Rows) -> int:
    """Rows of one pass."""
    return default_rows(x) if batch_size is None else count("batch_size", batch_size)


def checked(model: BayesianModel, guide: Any, x: Any) -> Rows:
    """The inputs as tensors of the model's precision; arrays and batches go to its device."""
    given: Rows = to_precision(require_inputs(x), guide, model)
    device = _device(guide) or given.device
    if not isinstance(x, Tensor):
        given = given.to(device)
    for name, part in parts_of(given).items():
        if device != part.device:
            found = f"got a tensor on {part.device}"
            raise ValueError(f"{name} must be on {device} as the guide is, {found}")
        if not all_finite(part):
            row = (~part.isfinite()).reshape(len(part), -1).any(1).nonzero()[0].item()
            raise ValueError(f"{name} must be finite, got NaN or infinity in row {row}")
    return given


def on_device(guide: Any, batches: Iterable[Rows]) -> Iterator[Rows]:
    device = _device(guide)
    return (x if device is None else x.to(device) for x in batches)


def _device(guide: Any) -> torch.device | None:
    """Device of the guide's parameters or of the given draws, if there are any."""
    if isinstance(guide, nn.Module):
        found: Iterable[Any] = guide.parameters()
    else:
        found = guide.values() if isinstance(guide, Mapping) else ()
    return next((x.device for x in found if isinstance(x, Tensor)), None)
