# SPDX-License-Identifier: Apache-2.0
"""Damped ZCA whitening of images: all directions get similar variance."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Whitening:
    r"""Damped ZCA whitening, then a common length: $z = c\,Wx' / \lVert Wx' \rVert$, $x' = x - m$.

    $W = (C + \lambda I)^{-1/2}$ with mean $m$ and covariance $C$ of the training images (Krizhevsky
    2009, "Learning Multiple Layers of Features from Tiny Images", appendix A). The few directions
    in which garments vary most no longer drown the others, and no image is fainter than another.

    Args:
        mean: of the training images, ``[d]``.
        matrix: $W$, ``[d, d]``.
        length: $c$, the mean length of whitened training images.
    """

    mean: Tensor
    matrix: Tensor
    length: float

    @classmethod
    def of(cls, x: Tensor, ridge: float) -> "Whitening":
        r"""Learned from training images ``[n, d]``; ``ridge`` is $\lambda$, in squared pixels."""
        mean = x.mean(0)
        variances, axes = torch.linalg.eigh((x - mean).T.cov(correction=0).double())
        # rounding makes tiny variances negative; the ridge is larger by many orders of magnitude
        matrix = ((axes * (variances + ridge).rsqrt()) @ axes.T).to(x)
        return cls(mean, matrix, float(((x - mean) @ matrix).norm(dim=1).mean()))

    def __call__(self, x: Tensor) -> Tensor:
        """Images ``[n, d]`` as the network sees them."""
        z = (x - self.mean) @ self.matrix
        return z * (self.length / z.norm(dim=1, keepdim=True))
