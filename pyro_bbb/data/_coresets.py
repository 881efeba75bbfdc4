# SPDX-License-Identifier: Apache-2.0
"""Coresets: a few examples that stand for a data set."""

import torch
from torch import Tensor

from pyro_bbb._utils.validation import all_finite, as_seed, count, tensor


def k_center(x: Tensor, size: int, seed: int = 0) -> Tensor:
    """Return examples that are far from each other, so that every example is near one of them.

        rows = bbb.data.k_center(x, size=200)
        x[rows], y[rows]

    The first is random; each next one is the farthest from those chosen. Its largest distance to
    the nearest chosen one is at most twice the best that ``size`` examples can have (Gonzalez 1985,
    "Clustering to minimize the maximum intercluster distance"). Nguyen et al. (2018,
    arXiv:1710.10628) choose coresets of earlier tasks in this way.

    Args:
        x: examples ``[n, ...]``, floating and finite; distances are Euclidean over all features.
        size: number of examples, at most n.
        seed: of the first one; the global random state stays as it is.

    Returns:
        Their indices in the order in which they were chosen, int64 ``[size]``.
    """
    x = tensor("x", x)
    if not x.is_floating_point():
        raise TypeError(f"x must be floating, got {x.dtype}")
    if x.dim() == 0 or x.is_meta or not all_finite(x):
        raise ValueError(f"x must be finite examples [n, ...], got shape {list(x.shape)} or NaN")
    if count("size", size) > len(x):
        raise ValueError(f"size must be at most the length of x, {len(x)}, got {size}")
    generator = torch.Generator().manual_seed(as_seed("seed", seed))
    newest = torch.randint(len(x), (1,), generator=generator).to(x.device)
    chosen, flat = [newest], x.detach().flatten(1) if x.dim() > 1 else x.detach()[:, None]
    distance = flat.new_full((len(x),), torch.inf)
    while len(chosen) < size:
        distance = distance.minimum(torch.linalg.vector_norm(flat - flat[newest], dim=-1))
        distance[newest] = -1.0  # below that of its duplicates
        newest = distance.argmax()[None]
        chosen.append(newest)
    return torch.cat(chosen)
