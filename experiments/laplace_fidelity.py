# SPDX-License-Identifier: Apache-2.0
"""Laplace's approximation by draws of the weights and by the network's tangent, against NUTS.

    python experiments/laplace_fidelity.py [--repeats 3]

The reference posterior of the sine (`pyro_bbb.data.reference`): a network is trained to its MAP,
and every structure of the curvature is computed there, with the model's prior and with the one of
largest marginal likelihood. Each predicts by draws of its weights in the network, and by the
network's tangent at the MAP (Immer et al. 2021). Each repeat trains with another seed.
"""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
import tyro
from _helpers import fidelity
from _helpers.run import RepeatedSettings, Run
from _helpers.tables import Table
from torch import Tensor
from tqdm import tqdm

import pyro_bbb as bbb
from pyro_bbb.data import Reference

LR = 0.05
STRUCTURES = ("full", "kron", "diag", "last_layer")


@dataclass(frozen=True)
class Config(RepeatedSettings):
    """Settings of one run."""

    repeats: int = 3
    """Trainings with consecutive seeds; tables show their means, the picture the first."""
    steps: int = 9000
    """Training steps to the MAP, each on all data."""
    draws: int = 2000
    """Draws from each guide."""


def study(
    reference: Reference, config: Config, seed: int
) -> dict[str, tuple[dict[str, Any], Tensor]]:
    """Every variant around one MAP: its figures and its draws of the function."""
    torch.manual_seed(seed)
    data = reference.x, reference.y
    model, scores = reference.make_model(), {}
    point = bbb.guides.make("delta", model)
    options = {"batch_size": len(reference.x), "lr": LR, "seed": seed}
    bbb.fit(model, point, data, epochs=config.steps, progress=False, **options)
    for structure in STRUCTURES:
        for optimize in (False, True):
            options = {"structure": structure, "optimize_prior": optimize}
            guide = bbb.guides.make("laplace", model, init_loc=point.median(), **options)
            guide.approximate(data)
            for linearized in (False, True):
                name = structure + (", optimized prior" if optimize else "")
                name += ", linearized" if linearized else ", draws"
                draws = fidelity.functions(
                    reference, model, guide, config.draws, 0, linearized=linearized
                )
                scale = {"prior_scale": guide.prior_scale.item()}
                scores[name] = reference.compare(draws) | scale, draws
    return scores


def table(floor: dict[str, Any], variants: dict[str, Any]) -> Table:
    """All variants, after NUTS against itself."""
    columns = ("Sine", "function, on", "off", "sd, on", "off", "factor of prior's sd")
    rows = [["NUTS, half against half", *_cells(floor), ""]]
    for name, record in variants.items():
        factor = f"{record['prior_scale']:.2f}" if "optimized" in name else ""
        rows.append([f"laplace {name}", *_cells(record), factor])
    return Table(columns, rows)


def _cells(record: dict[str, Any]) -> list[str]:
    measures = ("function", "sd_ratio")
    return [f"{record[at][measure]:.2f}" for measure in measures for at in ("on", "off")]


def main(config: Config) -> dict[str, Any]:
    """Compare all variants; returns what ``metrics.json`` holds."""
    if config.smoke:
        config = replace(config, repeats=1, steps=20, draws=8)
    run, reference = Run(config), bbb.data.reference("sine")
    with warnings.catch_warnings():  # that draws do worse: the table has both
        warnings.simplefilter("ignore", bbb.guides.LinearizationWarning)
        seeds = config.all_seeds
        studies = [study(reference, config, seed) for seed in tqdm(seeds, desc="Laplace")]
    variants = {name: fidelity.mean_of([s[name][0] for s in studies]) for name in studies[0]}
    shown = {name: result[1] for name, result in studies[0].items() if "optimized" not in name}
    first = {name: result[0] for name, result in studies[0].items()}
    picture = fidelity.draw_bands(run, "laplace", reference, first, shown)
    floor = dict(reference.diagnostics)["floor"]
    metrics = {"floor": floor, "variants": variants, "seeds": list(seeds)}
    return run.report(
        __doc__, metrics, [table(floor, variants)], [picture], remark=fidelity.SUMMARY
    )


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
