"""``pyro-bbb predict``: answers for a new table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import tyro

from pyro_bbb.cli.base import WritingCommand
from pyro_bbb.cli.console import Console
from pyro_bbb.cli.errors import BadInput
from pyro_bbb.cli.model import Model
from pyro_bbb.cli.table_io import check_writable, column, read, write


@dataclass(frozen=True, kw_only=True)
class Predict(WritingCommand):
    """Writes a table of predictions, a row for each row given.

    Of numbers: prediction, lower and upper end of the interval, aleatoric and epistemic standard
    deviation. Of classes: prediction, its probability, the set of classes that together reach the
    level, aleatoric and epistemic entropy (nats), and each class's probability. And whether the
    answer is refused, as less certain than almost all answers on rows held out from training.
    """

    model: tyro.conf.Positional[Path]
    """Folder of a trained model."""
    data: tyro.conf.Positional[Path]
    """CSV (with a header) or Parquet file; columns that the model does not know are ignored."""
    out: Path
    """File for the predictions, .csv or .parquet."""
    keep: tuple[str, ...] = ()
    """Columns of the table to copy, such as an identifier."""
    separator: str = ","
    """Character between the values of a CSV file."""

    def run(self, console: Console) -> dict[str, Any]:
        """Reads, predicts, writes."""
        self.check_out(self.data, self.model)
        check_writable(self.out)
        model = Model.load(self.model)
        table = read(self.data, self.separator)
        copied = [column(table, name, "--keep") for name in self.keep]
        answers = console.answers(model, model.inputs(table))
        found = pl.concat([each.table() for each in answers])
        if used := set(self.keep) & set(found.columns):
            raise BadInput(f"--keep: {sorted(used)} are names of the predictions, too")
        write(pl.DataFrame([*copied, *found.get_columns()]), self.out)
        refused = int(found["refused"].sum())
        console.print(
            f"{len(found)} predictions of {model.about.target!r}, {refused} of them refused"
        )
        console.print(f"written to {self.out}")
        return {"predictions": str(self.out), "rows": len(found), "refused": refused}
