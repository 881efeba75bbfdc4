# SPDX-License-Identifier: Apache-2.0
"""``pyro-bbb prune``: the same model with fewer weights."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from pyro_bbb import pruning
from pyro_bbb.cli.commands.evaluate import judged
from pyro_bbb.cli.console import Console
from pyro_bbb.cli.errors import BadInput
from pyro_bbb.cli.metrics import described, score, with_refusal
from pyro_bbb.cli.model import Model
from pyro_bbb.cli.options import Prune


def run(options: Prune, console: Console) -> dict[str, Any]:
    """Load, prune, find the threshold again, score, save."""
    model = Model.load(options.model)
    pruned = _pruned(model, options.fraction)
    ratios = pruning.signal_to_noise(pruned.estimator.posterior_.guide).values()
    total, left = (sum(int(f(x)) for x in ratios) for f in (lambda x: x.numel(), _not_zero))
    console.print(f"{left} of {total} weights are left")
    rows = judged(model, options, options.data, console)
    before = score(rows, model)
    rows = judged(pruned, options, options.data, console)
    pruned = with_refusal(pruned.knowing(held_out=len(rows["y"])), rows)
    for words, scores in (("before", before), ("after", pruned.about.scores)):
        console.print(f"{words}:\n{described(scores)}")
    pruned.save(options.out)
    console.print(f"saved as {options.out}")
    return {
        "model": str(options.out),
        "weights": total,
        "left": left,
        "before": before,
        "after": pruned.about.scores,
        "uncertainty": pruned.about.uncertainty,
        "threshold": pruned.about.threshold,
    }


def _not_zero(ratio: Any) -> int:
    return int((ratio > 0).sum())


def _pruned(model: Model, fraction: float) -> Model:
    try:
        guide = pruning.prune(model.estimator.posterior_.guide, fraction)
    except (ValueError, TypeError) as error:
        raise BadInput(str(error)) from error
    estimator = copy.copy(model.estimator)
    estimator.posterior_ = replace(model.estimator.posterior_, guide=guide)
    return replace(model.knowing(pruned=fraction), estimator=estimator)
