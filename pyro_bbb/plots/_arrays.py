"""Tensors as matplotlib takes them."""

import numpy as np
import numpy.typing as npt
from torch import Tensor

Array = npt.NDArray[np.float64]


def as_numpy(x: Tensor) -> Array:
    """A tensor's numbers, wherever and of whatever kind they are."""
    return np.asarray(x.detach().cpu().double())


def flat(x: Tensor) -> Array:
    """As a vector."""
    return as_numpy(x).reshape(-1)
