# SPDX-License-Identifier: Apache-2.0
"""Tables as aligned text, and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice, product

from torch import Tensor

_ROWS = 5


def as_text(head: Sequence[str], rows: Sequence[Sequence[str]], labels: int = 1) -> str:
    """Return lines of columns two spaces apart: labels aligned left, other cells right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column < labels else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join(map(line, [head, *rows]))


def as_markdown(head: Sequence[str], rows: Sequence[Sequence[str]], labels: int = 1) -> str:
    """Return the table in Markdown, for notebooks."""
    rule = ["---"] * labels + ["---:"] * (len(head) - labels)
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in (head, rule, *rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in escaped)


def first_rows(columns: Mapping[str, Tensor]) -> str:
    """Return Markdown of the first five entries of tensors ``[n, ...]``, by their index."""
    shape = next(iter(columns.values())).shape
    indices = islice(product(*map(range, shape)), _ROWS)
    values = zip(*(column.flatten()[:_ROWS].tolist() for column in columns.values()), strict=True)
    rows = [
        [", ".join(map(str, index)), *(f"{value:.4g}" for value in row)]
        for index, row in zip(indices, values, strict=True)
    ]
    if shape.numel() > _ROWS:
        rows.append(["..."] + [""] * len(columns))
    return as_markdown(["", *columns], rows)
