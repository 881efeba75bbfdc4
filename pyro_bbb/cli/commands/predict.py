# SPDX-License-Identifier: Apache-2.0
"""``pyro-bbb predict``: answers for a new table."""

from __future__ import annotations

from typing import Any

import polars as pl
from polars import selectors as cs

from pyro_bbb.cli.console import Console
from pyro_bbb.cli.errors import BadInput
from pyro_bbb.cli.model import Model
from pyro_bbb.cli.options import Predict
from pyro_bbb.cli.table_io import column, write

_DIGITS = 6  # of the numbers written, far more than the samples make certain


def run(options: Predict, console: Console) -> dict[str, Any]:
    """Reads, predicts, writes."""
    model = Model.load(options.model)
    table = model.read(options, options.data, console.print, truth=False)
    copied = _copied(options.keep, table, model)
    answers = model.ask(model.inputs(table, console.print), progress=console.shows_progress)
    found = pl.concat([each.table() for each in answers])
    if used := set(copied) & set(found.columns):
        hint = "choose the columns to copy by --keep, or rename them"
        raise BadInput(f"columns {sorted(used)} of the table are those of predictions, too: {hint}")
    numbers = found.with_columns(cs.float().round_sig_figs(_DIGITS))
    write(pl.concat([table.select(copied), numbers], how="horizontal"), options.out)
    refused = int(found["refused"].sum())
    console.print(f"{len(found)} predictions of {model.about.target!r}, {refused} of them refused")
    console.print(f"written to {options.out}")
    return {"predictions": str(options.out), "rows": len(found), "refused": refused}


def _copied(keep: tuple[str, ...] | None, table: pl.DataFrame, model: Model) -> list[str]:
    """Names of the columns to copy: those asked for, or those that the model does not take."""
    if keep is None:
        taken = {each.name for each in model.about.columns} | model.about.dates.keys()
        return [name for name in table.columns if name not in taken]
    return [column(table, name, "--keep").name for name in keep]
