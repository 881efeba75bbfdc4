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
from pyro_bbb.cli.metrics import described, score
from pyro_bbb.cli.model import Model
from pyro_bbb.cli.options import Prune


def run(options: Prune, console: Console) -> dict[str, Any]:
    """Loads, prunes, scores, saves."""
    model = Model.load(options.model)
    pruned = _pruned(model, options.fraction)
    ratios = pruning.signal_to_noise(pruned.estimator.posterior_.guide).values()
    total, left = (sum(int(f(x)) for x in ratios) for f in (lambda x: x.numel(), _not_zero))
    console.print(f"{left} of {total} weights are left")
    result: dict[str, Any] = {"model": str(options.out), "weights": total, "left": left}
    if options.data is not None:
        for words, each in (("before", model), ("after", pruned)):
            rows = judged(each, options.data, options.separator, console)
            result[words] = score(rows, each.about.level, each.about.threshold)
            console.print(f"{words}:")
            console.print(described(result[words]))
    pruned.save(options.out)
    console.print(f"saved as {options.out}")
    return result


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
