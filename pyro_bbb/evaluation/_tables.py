# SPDX-License-Identifier: Apache-2.0
"""Scores in print: their names and formats."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from pyro_bbb.evaluation._scores import LEVELS, Scores

Table: TypeAlias = tuple[list[str], list[list[str]]]  # head and rows

PRINTED = {  # a score's name in a table, and its format there
    "accuracy": ("accuracy", ".1%"),
    "base_rate": ("base rate", ".1%"),
    "recall": ("lowest recall", ".1%"),
    "auroc": ("AUROC", ".1%"),
    "rmse": ("RMSE", ".4g"),
    "nll": ("NLL", "z.3f"),
    "brier": ("Brier", "z.3f"),
    "ece": ("ECE", ".1%"),
    "aurc": ("AURC", ".2%"),
    "aurc_epistemic": ("AURC epistemic", ".2%"),
    **{name: (f"{level:.0%} interval", ".1%") for name, level in LEVELS.items()},
    "aurc_std": ("AURC sd", ".4g"),
    "aurc_epistemic_std": ("AURC epistemic sd", ".4g"),
    "refusal_p": ("refusal p", ".3f"),
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
