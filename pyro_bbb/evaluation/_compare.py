# SPDX-License-Identifier: Apache-2.0
"""Several evaluations as one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyro_bbb._utils.tables import as_markdown, as_text
from pyro_bbb._utils.validation import kind
from pyro_bbb.evaluation._evaluate import Evaluation
from pyro_bbb.evaluation._scores import Scores
from pyro_bbb.evaluation._tables import PRINTED, Table, cell, columns


@dataclass(frozen=True, repr=False)
class Comparison:
    """Several evaluations as one table, made by `compare`.

    Args:
        scores: those of each evaluation, by its name.
    """

    scores: dict[str, dict[str, Scores]]

    def __repr__(self) -> str:
        return f"Comparison({', '.join(self.scores)})"

    def __str__(self) -> str:
        return as_text(*self._table(), labels=2)

    def _repr_markdown_(self) -> str:
        return as_markdown(*self._table(), labels=2)

    def _table(self) -> Table:
        rows = []
        for data in dict.fromkeys(name for scores in self.scores.values() for name in scores):
            found = [scores.get(data, {}) for scores in self.scores.values()]
            for i, name in enumerate(columns(found)):
                cells = (cell(each, name) for each in found)
                rows.append(["" if i else str(data), PRINTED[name][0], *cells])
        return ["", "", *self.scores], rows


def compare(evaluations: Mapping[str, Evaluation]) -> Comparison:
    """Put the scores of several evaluations side by side: a row for each, a column for each model.

        bbb.compare({"MAP": of_map, "Bayes by Backprop": of_bbb})

    Args:
        evaluations: results of `evaluate` by the name of the model, of the same data sets; where a
            data set or score is missing, its cell is empty.

    Returns:
        The scores, which print as a table and show as one in a notebook.

    Raises:
        ValueError: there are none.
        TypeError: one of them is no `Evaluation`.
    """
    if not kind("evaluations", evaluations, Mapping):
        raise ValueError("evaluations must hold at least one evaluation, got none")
    for name, each in evaluations.items():
        kind(f"evaluations[{name!r}]", each, Evaluation)
    return Comparison({str(name): each.scores for name, each in evaluations.items()})
