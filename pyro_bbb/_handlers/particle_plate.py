# SPDX-License-Identifier: Apache-2.0
"""Pyro's plates around a call, and the one of several draws at once."""

from __future__ import annotations

from typing import Any

from pyro.poutine.broadcast_messenger import BroadcastMessenger
from pyro.poutine.indep_messenger import IndepMessenger
from pyro.poutine.runtime import _PYRO_STACK
from torch import Size


class PlateOfDraws(IndepMessenger):
    """The plate of several draws at once: each site is one of them all, and counts as it is.

    `pyro.plate` multiplies every site's factor by their number and divides by it, which can round,
    and makes different tensors of one.
    """

    def _process_message(self, msg: Any) -> None:
        super()._process_message(msg)
        BroadcastMessenger._pyro_sample(msg)


def in_plate() -> bool:
    """Return whether a plate is around the call."""
    return bool(_around())


def plate_shape() -> Size | None:
    """Return the batch shape around the call, ``None`` in other plates than draws."""
    plates = _around()
    if not plates:
        return Size()
    one = plates[0]
    if len(plates) > 1 or not isinstance(one, PlateOfDraws) or one.dim is None:
        return None
    return Size([one.size] + [1] * (-one.dim - 1))


def _around() -> list[IndepMessenger]:
    return [handler for handler in _PYRO_STACK if isinstance(handler, IndepMessenger)]
