# SPDX-License-Identifier: Apache-2.0
"""Pool of large CPU buffers, reused from one training step to the next.

A C library gives large blocks back to the system as they are freed, and the system clears every
page anew at its first use. With hundreds of thousands of weights that is a tenth of a step or more.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from pyro_bbb._ops.step_context import current_step
from pyro_bbb._ops.tuning import LEAST_BUFFER as LEAST

LINE = 64  # bytes


class Memory:
    """Blocks of the processor's memory, each lent while a tensor lies on it."""

    def __init__(self) -> None:
        self._blocks: defaultdict[int, list[np.ndarray]] = defaultdict(list)  # by bytes

    @property
    def size(self) -> int:
        """Bytes of all blocks; torch's own account of its memory does not know of them."""
        return sum(size * len(blocks) for size, blocks in self._blocks.items())

    def lend(self, size: int) -> Tensor:
        """A tensor of so many bytes, of any content, on which no other tensor lies."""
        blocks = self._blocks[size]
        number = next((i for i in range(len(blocks)) if _holders(blocks, i) == _UNUSED), None)
        if number is None:
            number = len(blocks)
            blocks.append(_aligned(size))  # numpy asks Linux for large pages, which torch does not
        return torch.from_numpy(blocks[number])  # holds the array as long as its memory is in use


def _aligned(size: int) -> np.ndarray:
    """A block that begins where a line of the cache does, as torch's own."""
    block = np.empty(size + LINE, dtype=np.uint8)
    first = -block.ctypes.data % LINE
    return block[first : first + size]


def _holders(blocks: list[np.ndarray], number: int) -> int:
    return sys.getrefcount(blocks[number])


_UNUSED = _holders([np.empty(1)], 0)


def empty_from_pool(like: Tensor, shape: torch.Size | None = None) -> Tensor:
    """A tensor of any content like another one, of its shape or another."""
    shape = like.shape if shape is None else shape
    memory, size = current_step().options.memory, math.prod(shape) * like.element_size()
    if memory is None or size < LEAST or like.device.type != "cpu":
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return memory.lend(size).view(like.dtype).view(shape)
