# SPDX-License-Identifier: Apache-2.0
"""Tables and a figure of `lenet5_mnist`."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

import pyro_bbb as bbb
from _helpers import repeats
from _helpers.run import Data, Picture, Run, Table
from _helpers.scores import MEASURES, SCORES

Answers: TypeAlias = dict[str, bbb.ClassificationPrediction]
Scores: TypeAlias = dict[str, Any]
NOISE = "Gaussian noise"
PUBLISHED_CUT_OFF = 0.2

PUBLISHED = {  # LeNet-5 of uncertainty-baselines, github.com/google/uncertainty-baselines
    "mnist": {
        "variational": {"accuracy": 0.985, "nll": 0.048, "ece": 0.010},
        "deterministic": {"accuracy": 0.991, "nll": 0.037},
    },
    "fashion_mnist": {
        "variational": {"accuracy": 0.895, "nll": 0.292, "ece": 0.011},
        "deterministic": {"accuracy": 0.910, "nll": 0.321},
    },
}

ALL = "all layers"
NUM_SHOWN = 500  # validation images of a snapshot; a fifth as many are noise


@dataclass(frozen=True)
class Sets:
    """The images of a run, ``[n, 1, 28, 28]``, and labels ``[n]``."""

    train: Data
    valid: Data
    test: Data
    ood: dict[str, Tensor]


def noise(count: int, seed: int) -> Tensor:
    """Images of which every pixel is an independent draw from N(0, 1)."""
    return torch.randn(count, 1, 28, 28, generator=torch.Generator().manual_seed(seed))


def scores_table(dataset: str, summary: Scores, variants: dict[str, Scores]) -> Table:
    """Tabulate scores on the test images, and published ones."""
    kinds = {"ensemble": (summary, "test"), "network of mean weights": (summary, "mean_network")}
    kinds |= {f"ensemble, random: {name}": (each, "test") for name, each in variants.items()}
    rows = {
        label: {k: each[k][part] for k in ("mean", "sd") if k in each}
        for label, (each, part) in kinds.items()
    }
    published = {}
    for name, known in PUBLISHED[dataset].items():
        ece = f"{100 * known['ece']:.1f}" if "ece" in known else "–"
        published[f"published, {name}"] = (
            f"{100 * known['accuracy']:.1f}",
            f"{known['nll']:.3f}",
            ece,
        )
    return repeats.table("on the test images", rows, SCORES, published)


def ood_table(summaries: dict[str, Scores]) -> Table:
    """AUROC of three measures, by random layers and kind of image."""
    cells = [
        (
            f"{kind}; random: {name}",
            *(repeats.shown(s, "foreign", kind, m, digits=1) for m in MEASURES),
        )
        for kind in next(iter(summaries.values()))["mean"]["foreign"]
        for name, s in summaries.items()
    ]
    return Table(("AUROC (%) against test images", *MEASURES), cells)


def refusal_table(summary: Scores) -> Table:
    """Tabulate the rates of refusal at both cut-offs."""
    cut_off = repeats.shown(summary, "cut_off", factor=1)
    columns = (
        (f"cut-off {PUBLISHED_CUT_OFF}", "published", 100, 1),
        (f"cut-off {cut_off}", "validation", 100, 1),
    )
    kinds = {
        kind: {k: summary[k]["refused"][kind] for k in ("mean", "sd") if k in summary}
        for kind in summary["mean"]["refused"]
    }
    return repeats.table("refused (%)", kinds, columns)


def draw_steps(run: Run, steps: list[Scores]) -> Picture:
    """Plot held-out log-probability and entropies by step."""
    at = [step["step"] for step in steps]
    entropies = {"validation": "entropy", NOISE: "noise_entropy"}
    panels = {
        "Held-out nats per image": {"validation": (at, [step["held_out_nats"] for step in steps])},
        "Mean entropy (nats)": {
            label: (at, [step[key] for step in steps]) for label, key in entropies.items()
        },
    }
    caption = f"{NUM_SHOWN} validation images, and a fifth as many of noise."
    return run.curves("steps", caption, panels, xlabel="step")
