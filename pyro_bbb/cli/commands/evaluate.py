# SPDX-License-Identifier: Apache-2.0
"""``pyro-bbb evaluate``: scores on a table whose targets are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyro_bbb.cli.console import Console
from pyro_bbb.cli.metrics import by_row, cautions, described, score
from pyro_bbb.cli.model import Model
from pyro_bbb.cli.options import Evaluate, ReadingCommand


def run(options: Evaluate, console: Console) -> dict[str, Any]:
    """Reads, predicts, scores."""
    model = Model.load(options.model)
    rows = judged(model, options, options.data, console)
    scores = score(rows, model)
    console.print(f"scores on the {len(rows['y'])} rows of {options.data}:")
    console.print(described(scores))
    result = {"model": str(options.model), "rows": len(rows["y"])}
    return result | {"scores": scores, "warnings": cautions(scores)}


def judged(model: Model, options: ReadingCommand, data: Path, console: Console) -> dict[str, Any]:
    """Answers and truth by row, for a file."""
    table = model.read(options, data, console.print, truth=True)
    truth, inputs = model.truth(table), model.inputs(table, console.print)
    return by_row(model.ask(inputs, progress=console.shows_progress), truth)
