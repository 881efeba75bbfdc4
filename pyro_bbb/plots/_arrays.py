# SPDX-License-Identifier: Apache-2.0
"""Tensors as matplotlib takes them."""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pyro_bbb._utils.validation import of_array

Array = npt.NDArray[np.float64]


def as_numpy(x: Tensor) -> Array:
    """A tensor's numbers, wherever and of whatever kind they are."""
    return np.asarray(of_array(x).detach().cpu().double())


def flat(x: Tensor) -> Array:
    """As a vector."""
    return as_numpy(x).reshape(-1)
