"""``pyro-bbb evaluate``: scores on a table whose targets are known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from pyro_bbb.cli.base import Command
from pyro_bbb.cli.console import Console
from pyro_bbb.cli.metrics import by_row, score
from pyro_bbb.cli.model import Model
from pyro_bbb.cli.table_io import read


@dataclass(frozen=True, kw_only=True)
class Evaluate(Command):
    """Scores a model on a table that has the target, too."""

    model: tyro.conf.Positional[Path]
    """Folder of a trained model."""
    data: tyro.conf.Positional[Path]
    """CSV (with a header) or Parquet file."""
    separator: str = ","
    """Character between the values of a CSV file."""

    def run(self, console: Console) -> dict[str, Any]:
        """Reads, predicts, scores."""
        model = Model.load(self.model)
        rows = judged(model, self.data, self.separator, console)
        scores = score(rows, model.about.level, model.about.threshold)
        console.print(f"scores on the {len(rows['y'])} rows of {self.data}:")
        console.scores(scores)
        return {"model": str(self.model), "rows": len(rows["y"]), "scores": scores}


def judged(model: Model, data: Path, separator: str, console: Console) -> dict[str, Any]:
    """Answers and truth by row, for a file."""
    table = read(data, separator)
    truth, inputs = model.truth(table), model.inputs(table)
    return by_row(console.answers(model, inputs), truth)
