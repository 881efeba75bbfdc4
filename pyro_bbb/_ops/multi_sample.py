# SPDX-License-Identifier: Apache-2.0
r"""Scales, and their gradients, of several samples of one posterior, found once.

A draw is $w = \mu + \sigma\epsilon$, $\sigma = \mathrm{softplus}(\rho)$. Its gradient in $\rho$ is
that in $\sigma$ times a slope which is the same for all draws, and so is that of $-\ln\sigma$.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_bbb._ops.buffers import empty_from_pool
from pyro_bbb._ops.flat import FlatTensors, over_parts
from pyro_bbb._ops.reductions import over_block
from pyro_bbb._ops.step_context import current_step


class ScaleGradient:
    r"""The gradient in $\rho$ of scales that lie side by side, added up over draws.

    Args:
        rhos: unconstrained scales.

    Attributes:
        rhos: these, without a gradient of their own.
    """

    def __init__(self, rhos: Sequence[Tensor]) -> None:
        self.rhos = [rho.detach() for rho in rhos]
        self._of_sigma: Tensor | None = None  # but for that of ln q
        self._of_log_q: Tensor | None = None

    def add_draws(self, of_value: Tensor, noise: Tensor) -> Tensor:
        """Adds what draws ``[n]`` or ``[m, n]`` have by their values.

        Args:
            of_value: the gradient in them.
            noise: theirs, likewise.

        Returns:
            The gradient in their mean, ``[n]``.
        """
        if noise.dim() == 1 and self._of_sigma is not None:
            self._of_sigma.addcmul_(of_value, noise)
        else:
            self._add(over_block(torch.mul(of_value, noise, out=empty_from_pool(noise))))
        return over_block(of_value)

    def add(self, of_scale: Tensor | None, of_log_q: Tensor | None) -> None:
        r"""Adds, after draws, the gradients in their scale, ``[n]``, and in each $\sum\ln q$."""
        if of_scale is not None:
            self._add(of_scale)
        if of_log_q is not None:
            of_log_q = of_log_q.sum() if of_log_q.dim() else of_log_q
            self._of_log_q = of_log_q if self._of_log_q is None else self._of_log_q + of_log_q

    def _add(self, of_sigma: Tensor) -> None:
        self._of_sigma = of_sigma if self._of_sigma is None else self._of_sigma.add_(of_sigma)

    def take(self, shared: Shared) -> list[Tensor]:
        r"""The sum in each $\rho$; none where no draw has added any."""
        of_sigma, self._of_sigma = self._of_sigma, None
        if of_sigma is None:
            return []
        if self._of_log_q is not None and shared.scale is not None:
            of_sigma.addcdiv_(self._of_log_q, shared.scale, value=-1)
        of_rho = FlatTensors(of_sigma, self.rhos)
        if shared.several:
            of_rho.vector.mul_(shared.slope_of(of_rho))
        else:
            over_parts(_times_slope, of_rho, self.rhos)
        return of_rho.parts


def _times_slope(rho: Tensor, *, out: Tensor) -> Tensor:
    return out.mul_(torch.sigmoid(rho, out=empty_from_pool(rho)))


@dataclass
class Shared:
    r"""Scales of one posterior, their logarithms and derivatives."""

    several: bool = False
    """Whether there are several."""
    rhos: tuple[Tensor, ...] = ()
    """Their unconstrained scales."""
    scale: Tensor | None = None
    """Standard deviations."""
    log_scale: Tensor | None = None
    """The sum of their logarithms."""
    slope: Tensor | None = None
    r"""Derivatives of the standard deviations in $\rho$."""
    gradient: ScaleGradient | None = None
    """Where draws that lie side by side add theirs up, if they do."""

    def slope_of(self, gradient: FlatTensors) -> Tensor:
        """The derivatives, as a vector like a gradient in the unconstrained scales."""
        if self.slope is None:
            self.slope = over_parts(torch.sigmoid, gradient.empty_like(), gradient.like).vector
        return self.slope

    def flush(self) -> None:
        """Adds the gradient of all samples to that of the parameters."""
        gradients = self.gradient.take(self) if self.gradient is not None else []
        torch.autograd.backward(self.rhos[: len(gradients)], gradients)


def shared_by(names: Iterable[str], rhos: Sequence[Tensor]) -> Shared:
    """The scales that samples of these sites share in a step; of a single sample its own.

    Members of an ensemble have sites of the same names, so the parameters count as well.
    """
    step = current_step()
    if not step.options.several:
        return Shared()
    addresses = (id(x) if x.is_leaf and x.requires_grad else x.data_ptr() for x in rhos)
    key: tuple[str | int, ...] = (*names, *addresses)
    if key not in step.scales:
        learned = all(x.is_leaf and x.requires_grad for x in rhos)
        gradient = ScaleGradient(rhos) if learned else None
        step.scales[key] = Shared(several=True, rhos=tuple(rhos), gradient=gradient)
    return step.scales[key]
