# SPDX-License-Identifier: Apache-2.0
r"""Draws of the weights, each with separate BatchNorm statistics.

A BatchNorm layer gives $\gamma (h - \mu) / \sqrt{v + \epsilon} + \beta$. In training $\mu$ and $v$
are those of the minibatch at the drawn weights $w_s$; in evaluation they are running averages over
the draws of many steps, $E_q[\mu(w)]$, and over the members of an `Ensemble`. Here each draw has
$\mu(w_s)$ and $v(w_s)$, of a pass over training inputs, as SWAG has for its samples (Maddox et al.
2019, "A Simple Baseline for Bayesian Uncertainty in Deep Learning", section 3.2).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyro_bbb._param_store import own_store
from pyro_bbb._utils.context import evaluating, seeded
from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.validation import count, kind
from pyro_bbb.guides import batchnorms, renew_running_statistics
from pyro_bbb.latents import stack, statistics_in
from pyro_bbb.models import BayesianModel, require_guide
from pyro_bbb.prediction._draws import default_rows, posterior_draws
from pyro_bbb.prediction._predict import checked_inputs


@locked
def batchnorm_draws(
    model: BayesianModel,
    guide: Any,
    x: Any,
    *,
    num_samples: int = 100,
    batch_size: int | None = None,
    seed: int | None = None,
) -> dict[str, Tensor]:
    """Draw weights, each with the BatchNorm statistics that it gives to training inputs.

    Args:
        model: the model, with BatchNorm layers in training mode.
        guide: as for `predict`.
        x: training inputs, ``[n, ...]``; a thousand will do.
        num_samples: number of draws; of an `Ensemble` at least its size.
        batch_size: inputs per pass, by default 1,024 on a CPU.
        seed: makes the draws a function of this number, and leaves torch's random state alone.

    Returns:
        What `predict` and others take as draws: tensors ``[num_samples, ...]`` by site name, and by
        ``"network.PATH.running_mean"`` and ``"network.PATH.running_var"``.

    Raises:
        ValueError: the model has no such layer, a number is out of range, or inputs do not fit.
    """
    kind("model", model, BayesianModel)
    require_guide(guide)
    num_samples = count("num_samples", num_samples)
    inputs = checked_inputs(model, guide, x, move=True)
    rows = default_rows(inputs) if batch_size is None else count("batch_size", batch_size)
    norms = batchnorms(model)
    if not norms:
        raise ValueError("model must have BatchNorm layers in training mode, it has none")
    model.check(inputs)
    rows = math.ceil(len(inputs) / math.ceil(len(inputs) / rows))  # passes weigh the same
    if rows == 1 or len(inputs) % rows == 1:
        raise ValueError(
            "x must give passes of two rows or more to batch normalisation, got one of 1 row of "
            f"{len(inputs)}: give more rows, or another batch_size"
        )
    kept = {path: dict(norm._buffers) for path, norm in norms.items()}
    draws: list[dict[str, Tensor]] = []
    try:
        with seeded(seed), own_store(model, guide), torch.no_grad(), evaluating(model):
            for norm in norms.values():
                norm.train()
                norm._buffers.update({k: v.clone() for k, v in norm.named_buffers()})
            for chunk in posterior_draws(model, guide, inputs, num_samples):
                for values in zip(*chunk.values(), strict=True):
                    draw = dict(zip(chunk, values, strict=True))
                    batches = ((batch, None) for batch in inputs.split(rows))
                    renew_running_statistics(model, draw, batches)
                    buffers = dict(model.named_buffers())
                    draws.append(draw | {k: buffers[k].clone() for k in statistics_in(buffers)})
    finally:
        for path, norm in norms.items():
            norm._buffers.update(kept[path])
    return stack(draws)
