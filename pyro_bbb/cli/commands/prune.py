"""``pyro-bbb prune``: the same model with fewer weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from pyro_bbb import pruning
from pyro_bbb.cli.base import WritingCommand
from pyro_bbb.cli.commands.evaluate import judged
from pyro_bbb.cli.console import Console
from pyro_bbb.cli.errors import BadInput
from pyro_bbb.cli.metrics import score
from pyro_bbb.cli.model import Model


@dataclass(frozen=True, kw_only=True)
class Prune(WritingCommand):
    """Removes the weights whose mean is smallest against their uncertainty, and saves the rest."""

    model: tyro.conf.Positional[Path]
    """Folder of a trained model; it stays as it is."""
    out: Path
    """Folder for the pruned model."""
    fraction: float = 0.75
    """Share of the weights to remove."""
    data: Path | None = None
    """Table with the target; the model is scored on it before and after."""
    separator: str = ","
    """Character between the values of a CSV file."""

    def run(self, console: Console) -> dict[str, Any]:
        """Loads, prunes, scores, saves."""
        self.check_out(self.model, self.data)
        model = Model.load(self.model)
        pruned = _pruned(model, self.fraction)
        ratios = pruning.signal_to_noise(pruned.estimator.posterior_.guide).values()
        total, left = (sum(int(f(x)) for x in ratios) for f in (lambda x: x.numel(), _not_zero))
        console.print(f"{left} of {total} weights are left")
        result: dict[str, Any] = {"model": str(self.out), "weights": total, "left": left}
        if self.data is not None:
            for words, each in (("before", model), ("after", pruned)):
                rows = judged(each, self.data, self.separator, console)
                result[words] = score(rows, each.about.level, each.about.threshold)
                console.print(f"{words}:")
                console.scores(result[words])
        pruned.save(self.out)
        console.print(f"saved as {self.out}")
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
