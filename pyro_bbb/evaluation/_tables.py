"""Scores in print: their names and formats, and tables as aligned text and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from pyro_bbb.evaluation._scores import LEVELS, Scores

Table: TypeAlias = tuple[list[str], list[list[str]]]  # head and rows

PRINTED = {  # a score's name in a table, and its format there
    "accuracy": ("accuracy", ".1%"),
    "rmse": ("RMSE", ".4g"),
    "nll": ("NLL", "z.3f"),
    "brier": ("Brier", "z.3f"),
    "ece": ("ECE", ".1%"),
    "aurc": ("AURC", ".2%"),
    **{name: (f"{level:.0%} interval", ".1%") for name, level in LEVELS.items()},
    "entropy": ("entropy", "z.3f"),
    "std": ("sd", ".4g"),
    "epistemic": ("epistemic", "z.3f"),
    "epistemic_std": ("epistemic sd", ".4g"),
    "auroc_entropy": ("AUROC entropy", ".1%"),
    "auroc_epistemic": ("AUROC epistemic", ".1%"),
    "auroc_std": ("AUROC sd", ".1%"),
    "auroc_epistemic_std": ("AUROC epistemic sd", ".1%"),
}


def columns(scores: Iterable[Scores]) -> list[str]:
    """The scores that there are, in the order of tables."""
    found = set().union(*scores)
    return [name for name in PRINTED if name in found]


def cell(scores: Scores, name: str) -> str:
    """One score in print; empty where there is none."""
    return format(scores[name], PRINTED[name][1]) if name in scores else ""


def as_text(head: Sequence[str], rows: Sequence[Sequence[str]], labels: int = 1) -> str:
    """Lines of columns two spaces apart, labels to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column < labels else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join(map(line, [head, *rows]))


def as_markdown(head: Sequence[str], rows: Sequence[Sequence[str]], labels: int = 1) -> str:
    """The table in Markdown, as notebooks show it."""
    rule = ["---"] * labels + ["---:"] * (len(head) - labels)
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in (head, rule, *rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in escaped)
