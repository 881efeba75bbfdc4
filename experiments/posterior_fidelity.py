# SPDX-License-Identifier: Apache-2.0
"""Fidelity of posteriors: distances of every guide and of chains to the references by NUTS.

    python experiments/posterior_fidelity.py [--problems sine gap ...]

The twelve problems of `pyro_bbb.data.reference`, whose draws of the network's function by NUTS come
with the library; NUTS does not run here. Weights cannot be compared, as units may be permuted or
change their sign without changing the function: every method is compared by its functions at the
probe inputs on the data and off them.
"""

import math
import warnings
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import tyro
from _helpers import fidelity
from _helpers.run import Run, Settings, check_names, read_json, write_json
from _helpers.tables import Table
from torch import Tensor
from tqdm import tqdm

import pyro_bbb as bbb
from pyro_bbb.data import REFERENCES, Reference

LR = 0.05  # of the first half of the steps
MEASURES = {"function": "Function", "sd_ratio": "Sd"}


@dataclass(frozen=True)
class Config(Settings):
    """Settings of one run."""

    problems: tuple[str, ...] = REFERENCES
    """Problems, of those of `pyro_bbb.data.reference`."""
    approaches: tuple[str, ...] = ()
    """Names of the table's rows, and of those that they start from; by default all."""
    steps: int = 1500
    """Training steps of each guide."""
    draws: int = 2000
    """Draws from each guide."""
    data_root: Path | None = None
    """Folder of the UCI sets; by default $PYRO_BBB_DATA."""


@dataclass(frozen=True)
class Approach:
    """A guide and how it is trained."""

    guide: str
    options: dict[str, Any] = field(default_factory=dict)
    num_particles: int = 4
    length: int = 1  # factor of the number of steps
    lr_factor: float = 1.0
    batch_size: int | None = None  # examples of a step; by default all
    after: str | None = None  # approach whose means are the initial ones
    trained_as: str | None = None
    """Approach whose guide this one predicts by, instead of training one."""
    linearized: bool = False  # whether predictions are those of the network's tangent


FACTORISED = "softplus_normal"
SHORT, SAMPLE = "100 chains of sghmc", "sample"
FROM_ITS_MEANS: dict[str, Any] = {"after": FACTORISED, "length": 2}
CHAINS = {"num_chains": 100, "warmup_steps": 1000, "num_samples": 20, "thin": 25}
APPROACHES: dict[str, Any] = {  # a guide, or options of chains
    "delta (MAP)": Approach("delta", num_particles=1),
    "ensemble of 5 delta": Approach("ensemble", {"size": 5, "guide": "delta"}, num_particles=1),
    "swag": Approach("swag", num_particles=1, lr_factor=0.2, length=2, batch_size=16),
    "laplace, linearized": Approach("laplace", num_particles=1, length=3, linearized=True),
    "laplace": Approach("laplace", trained_as="laplace, linearized"),
    FACTORISED: Approach(FACTORISED),
    "low_rank": Approach("low_rank"),
    "full_rank": Approach("full_rank", {"init_scale": 0.1}, lr_factor=0.2, **FROM_ITS_MEANS),
    SHORT: {"lr": 0.01, "momentum": 0.99, **CHAINS},
    SAMPLE: {},
}


def constant_then_cosine(progress: float) -> float:
    """Return 1 for half of the training, then half a cosine down to 0."""
    return 1.0 if progress < 0.5 else 0.5 * (1 + math.cos(2 * math.pi * (progress - 0.5)))


def sample(reference: Reference, name: str, config: Config) -> tuple[bbb.BayesianModel, bbb.Chains]:
    """Run short chains on all data, or `pyro_bbb.sample`."""
    torch.manual_seed(config.seed)
    options = APPROACHES[name] | {"seed": config.seed, "progress": False}
    if name == SHORT:
        run, options["batch_size"] = bbb.run_sgmcmc, len(reference.x)
        tiny = {"num_chains": 4, "warmup_steps": 2, "num_samples": 2, "thin": 1}
    else:
        run, tiny = bbb.sample, {"num_chains": 4, "num_samples": 40, "max_steps": 50}
    options |= tiny if config.smoke else {}
    model = reference.make_model()
    return model, run(model, (reference.x, reference.y), **options)


def train(
    reference: Reference, approach: Approach, config: Config, start: Any = None
) -> tuple[bbb.BayesianModel, bbb.guides.Guide]:
    """Train one guide."""
    torch.manual_seed(config.seed)
    model = reference.make_model()
    options = approach.options if start is None else approach.options | {"init_loc": start.median()}
    guide = bbb.guides.make(approach.guide, model, **options)
    batch_size = approach.batch_size or len(reference.x)
    batches = math.ceil(len(reference.x) / batch_size)
    with warnings.catch_warnings():  # that the tangent does better; laplace_fidelity.py compares
        warnings.simplefilter("ignore", bbb.guides.LinearizationWarning)
        bbb.fit(
            model,
            guide,
            (reference.x, reference.y),
            epochs=max(2, config.steps * approach.length // batches),
            batch_size=batch_size,
            lr=LR * approach.lr_factor,
            lr_schedule=constant_then_cosine,
            num_particles=approach.num_particles,
            seed=config.seed,
            progress=False,
        )
    return model, guide


def study(reference: Reference, config: Config) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return figures of all methods on one problem, and their draws of the function, by name."""
    started, figures = perf_counter(), dict[str, Any]()
    draws: dict[str, Tensor] = {}
    posteriors: dict[str, Any] = {}
    for name in tqdm(config.approaches or tuple(APPROACHES), desc=reference.name):
        approach, began = APPROACHES[name], process_time()
        try:
            if isinstance(approach, Approach) and approach.trained_as in posteriors:
                posteriors[name] = posteriors[approach.trained_as]
                began -= figures[approach.trained_as]["seconds"]
            elif isinstance(approach, Approach):
                _, start = posteriors.get(approach.after or "", (None, None))
                posteriors[name] = train(reference, approach, config, start)
            else:
                posteriors[name] = sample(reference, name, config)
        except ArithmeticError as error:  # the point of a Laplace approximation is no maximum
            figures[name] = {"failed": str(error)}
            continue
        seconds = process_time() - began
        draws[name] = fidelity.functions(
            reference,
            *posteriors[name],
            config.draws,
            config.seed,
            linearized=getattr(approach, "linearized", False),
        )
        figures[name] = reference.compare(draws[name]) | {"seconds": seconds}
    record = {"NUTS": dict(reference.diagnostics), "guides": figures}
    return record | {"seconds": perf_counter() - started}, draws


def comparison_table(problems: dict[str, Any], measure: str, region: str) -> Table:
    """One measure of every method on every problem, on or off the data, and the median."""
    columns = (f"{MEASURES[measure]}, {region} the data", *map(fidelity.title, problems), "median")
    methods: dict[str, list[dict[str, Any]]] = {}
    for record in problems.values():
        for name, guide in record["guides"].items():
            methods.setdefault(name, []).append(guide)
    floors = [record["NUTS"]["floor"] for record in problems.values()]
    rows = [_row("NUTS, half against half", floors, region, measure)]
    rows += [_row(name, guides, region, measure) for name, guides in methods.items()]
    return Table(columns, rows)


def _row(name: str, guides: list[dict[str, Any]], region: str, measure: str) -> list[str]:
    values = [guide[region][measure] if region in guide else math.nan for guide in guides]
    finite = [value for value in values if math.isfinite(value)]
    return [name, *("–" if math.isnan(v) else f"{v:.2f}" for v in values), f"{median(finite):.2f}"]


def seconds_table(problems: dict[str, Any]) -> Table:
    """Seconds of the processor of NUTS and of every method on every problem."""
    rows = [["NUTS", *(f"{record['NUTS']['seconds']:.0f}" for record in problems.values())]]
    for name in next(iter(problems.values()))["guides"]:
        seconds = (record["guides"][name].get("seconds") for record in problems.values())
        rows.append([name, *("–" if s is None else f"{s:.0f}" for s in seconds)])
    return Table(("seconds", *map(fidelity.title, problems)), rows)


def tables(problems: dict[str, Any]) -> dict[str, Table]:
    """All tables by the names that a page has for them."""
    columns = {"off": ("function", "off"), "sd": ("sd_ratio", "off")}
    columns |= {"on": ("function", "on"), "sd on": ("sd_ratio", "on")}
    comparisons = {name: comparison_table(problems, *column) for name, column in columns.items()}
    nuts = fidelity.nuts_table({name: record["NUTS"] for name, record in problems.items()})
    return comparisons | {"seconds": seconds_table(problems), "NUTS": nuts}


def main(config: Config) -> dict[str, Any]:
    """Run every method on every problem; returns what ``metrics.json`` holds."""
    check_names("--problems", config.problems, REFERENCES)
    check_names("--approaches", config.approaches, APPROACHES)
    if config.smoke:
        config = replace(config, problems=("sine",), steps=2, draws=8)
    run, problems, pictures = Run(config, free=("problems",)), {}, []
    for name in config.problems:
        reference = bbb.data.reference(name, root=config.data_root)
        path = run.cells / f"{name}.json"
        if path.exists():
            problems[name] = read_json(path)
            run.started -= problems[name]["seconds"]
            continue
        problems[name], draws = study(reference, config)
        write_json(path, problems[name])
        if reference.sizes[0] == 1:
            figures = problems[name]["guides"]
            pictures.append(fidelity.draw_bands(run, name, reference, figures, draws))
    recipes = {k: v if isinstance(v, dict) else asdict(v) for k, v in APPROACHES.items()}
    metrics = {"problems": problems, "approaches": recipes}
    shown = list(tables(problems).values())
    return run.report(__doc__, metrics, shown, pictures, remark=fidelity.SUMMARY)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
