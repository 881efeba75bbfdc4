# SPDX-License-Identifier: Apache-2.0
"""Options of IVON, and how its decay rate depends on the length of a run."""

from __future__ import annotations

from dataclasses import dataclass

from pyro_bbb._utils.validation import positive, probability

IVON_LR = 0.1  # in units of a Newton step
_WINDOWS = 10.0  # decay times of the Hessian in a run


@dataclass(frozen=True, kw_only=True)
class IVON:
    r"""Options of ``fit(..., optimizer="ivon")``: natural gradients for an `AutoSoftplusNormal`.

    Shen et al. (2024), Algorithm 1: each step draws the latents once, runs network and likelihood
    on plain tensors, and updates mean $m$ and Hessian $h$ of the mean loss per example;
    $\sigma^{-2} = \lambda(h + \delta)$, $\lambda$ being the number of data over the temperature.
    Natural gradients follow $E_q[\nabla^2(-\ln p(D|w) - \ln p(w))]$ (Khan and Rue 2023). A fixed
    Normal prior $N(\mu_0, 1/(\lambda\delta))$ has the Hessian $\delta$ and the gradient
    $\delta(m - \mu_0)$, which enter as they are. For any other prior $\delta = 0$:
    $-\nabla\ln p(\theta)/\lambda$ joins the gradient $\hat g$, so that its curvature is in Price's
    estimate $\hat h = \hat g\,\epsilon/\sigma$. Its sign needs no care: the term
    $\tfrac12(1-\beta_2)^2(h-\hat h)^2/(h+\delta)$ keeps $h + \delta$ positive (Lin et al. 2020).

    Args:
        hess_init: $h$ at the start; by default that of the guide's scales, but from 1 to 10.
        beta1: decay rate of the momentum.
        beta2: decay rate of $h$, as in the paper. By default $1 - 10/\text{steps}$ (at least .9),
            approached over the first quarter of a run: $e^{-9}$ of the initial $h$ is left, and the
            means have settled before $h$ follows the noise.

    Raises:
        ValueError: a number out of range.
        TypeError: no number.
    """

    hess_init: float | None = None
    beta1: float = 0.9
    beta2: float | None = None

    def __post_init__(self) -> None:
        if self.hess_init is not None:
            positive("hess_init", self.hess_init)
        probability("beta1", self.beta1)
        if self.beta2 is not None:
            probability("beta2", self.beta2)

    def hessian_decay(self, num_steps: int) -> tuple[float, float]:
        """``beta2`` in a run of so many steps, and how much of ``1 - beta2`` each step adds.

        By default the rate reaches its value after a quarter of the run.
        """
        if self.beta2 is not None:
            return self.beta2, 1.0
        return 1 - min(_WINDOWS / num_steps, 0.1), 4 / num_steps
