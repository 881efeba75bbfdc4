# SPDX-License-Identifier: Apache-2.0
"""Fidelity of variational families: predictive distances of every guide to NUTS.

    python experiments/posterior_fidelity.py [--problems sine diabetes breast_cancer]

Every guide, and many short chains of stochastic-gradient Hamiltonian Monte Carlo. Three problems
are small and smooth enough for NUTS to solve: the sine regression of the Keras and TFP articles of
2019, and two of scikit-learn's real sets. NUTS is the reference if its four chains agree, by the
rank-normalised split R-hat (Vehtari et al. 2021) of *functions*: of the network's output at inputs
on and off the data. Weights cannot be compared, as units may be permuted or change their sign
without changing the function.

Every guide but SWAG, whose width is that of the minibatches' noise, is trained on the full training
set in each step, half of the steps at a constant learning rate and half along a cosine to 0, so
that what remains is the family's distance and not the optimiser's; one guide is trained twice as
long to see that. Each is trained from several seeds, and tables show the means; NUTS runs once. The
floor is the distance between two halves of NUTS, chains 1-2 against 3-4. Learning rates, and that
``full_rank`` and ``flow`` start at the means of ``softplus_normal``, were chosen by the training
loss. The short chains' steps were halved once, as the distances to NUTS stayed below 0.1.
"""

import math
import warnings
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import tyro
from _helpers import fidelity
from _helpers.fidelity import (
    LEVEL,
    NUTS,
    OFF,
    ON,
    PROBLEMS,
    Predictions,
    Problem,
    predict_at,
    score,
)
from _helpers.run import Picture, Run, Section, Settings, Table, check_names
from tqdm import tqdm

import pyro_bbb as bbb

FLOOR = "floor"
SUMMARY = (
    "Distances are between what a guide predicts and what NUTS predicts. Function: 1-Wasserstein "
    "distance between the draws of the network's output (of the probability, for classes) at one "
    "input, averaged over inputs, in standard deviations of NUTS's draws. A point in their middle "
    "would score about 0.8. y: the same for the targets, in standard deviations of theirs. Total "
    "variation: difference of the predicted class probabilities. Sd: the standard deviation of the "
    "guide's draws over that of NUTS's; the ideal is 1. The first row is NUTS against itself, "
    "chains 1-2 against 3-4: smaller distances are noise."
)
OVERVIEW = (
    "Where there are no data posteriors differ most. A standard deviation below 1 is over"
    "confidence; above 1, underconfidence."
)


@dataclass(frozen=True)
class Config(Settings):
    """Settings of one run."""

    problems: tuple[str, ...] = tuple(PROBLEMS)
    """Problems, of sine, diabetes and breast_cancer."""
    approaches: tuple[str, ...] = ()
    """Names of the table's rows, and of those that they start from; by default all."""
    steps: int = 3000
    """Training steps of each guide."""
    lr: float = 0.05
    """Learning rate of the first half of the steps."""
    draws: int = 2000
    """Draws from each guide."""
    repeats: int = 3
    """Trainings of each guide with consecutive seeds; tables show means, pictures the first."""
    chain_length: int = 1000
    """Draws of each of the four chains of NUTS, after as many to warm up."""
    max_tree_depth: int = 7
    """A draw of NUTS takes at most 2 to this power leapfrog steps."""
    compile: bool = False
    """Compile the gradient of NUTS, which needs a C++ compiler and takes less time then."""
    workers: int = 2
    """Processes for the chains."""
    output: Path = Path("results/posterior_fidelity")
    """Folder for results."""


@dataclass(frozen=True)
class Approach:
    """A guide and how it is trained."""

    guide: str
    options: dict[str, Any] = field(default_factory=dict)
    num_particles: int = 4
    estimator: str = "reparam"
    length: int = 1
    """Factor of the number of steps."""
    lr_factor: float = 1.0
    batch_size: int | None = None
    """Examples of a step; by default all."""
    after: str | None = None
    """Approach whose means are the initial ones."""
    linearized: bool = False
    """Whether predictions are those of the network's tangent."""


@dataclass(frozen=True)
class ShortChains:
    """Many chains of SGHMC, with all data in each step."""

    num_chains: int = 100
    warmup_steps: int = 1000
    num_samples: int = 20
    thin: int = 25
    lr: float = 0.01
    momentum: float = 0.99
    linearized = False


def of_five(guide: str, options: dict[str, Any] | None = None, **fit: Any) -> Approach:
    """An ensemble of five guides of that name, each with one draw per step."""
    options = {"size": 5, "guide": guide, **(options or {})}
    return Approach("ensemble", options, **{"num_particles": 1, **fit})


FACTORISED = "softplus_normal"
SHORT = "100 chains of sghmc"
FROM_ITS_MEANS: dict[str, Any] = {"after": FACTORISED, "length": 2}
ON_BATCHES: dict[str, Any] = {"num_particles": 1, "lr_factor": 0.2, "length": 2, "batch_size": 16}
TO_A_MODE: dict[str, Any] = {"num_particles": 1, "length": 3}
APPROACHES: dict[str, Approach | ShortChains] = {
    "delta (MAP)": Approach("delta", num_particles=1),
    "ensemble of 5 delta": of_five("delta"),
    SHORT: ShortChains(),
    "laplace, linearized": Approach("laplace", linearized=True, **TO_A_MODE),
    "laplace": Approach("laplace", **TO_A_MODE),
    "laplace, exact Hessian": Approach("laplace", {"curvature": "hessian"}, **TO_A_MODE),
    "swag": Approach("swag", **ON_BATCHES),
    "ensemble of 5 swag": of_five("swag", **ON_BATCHES),
    FACTORISED: Approach(FACTORISED),
    f"{FACTORISED}, twice the steps": Approach(FACTORISED, length=2),
    f"{FACTORISED}, local_reparam": Approach(
        FACTORISED, num_particles=1, estimator="local_reparam"
    ),
    f"ensemble of 5 {FACTORISED}": of_five(FACTORISED),
    "normal": Approach("normal"),
    "low_rank": Approach("low_rank"),
    "full_rank": Approach("full_rank", {"init_scale": 0.1}, lr_factor=0.2, **FROM_ITS_MEANS),
    "ensemble of 5 full_rank": of_five("full_rank", {"init_scale": 0.1}, lr_factor=0.2, length=2),
    "flow": Approach("flow", {"init_scale": 0.1}, lr_factor=0.1, **FROM_ITS_MEANS),
}
NOT_PICTURED = (
    "laplace, exact Hessian",
    f"{FACTORISED}, twice the steps",
    f"{FACTORISED}, local_reparam",
    "normal",
)


def constant_then_cosine(progress: float) -> float:
    """1 for half of the training, then down to 0 along half a cosine."""
    return 1.0 if progress < 0.5 else 0.5 * (1 + math.cos(2 * math.pi * (progress - 0.5)))


def differences(found: Predictions, gold: Predictions) -> dict[str, dict[str, float]]:
    """`compare` on and off the data."""
    return {region: fidelity.compare(found[region], gold[region]) for region in (ON, OFF)}


def solve(problem: Problem, config: Config) -> tuple[dict[str, Any], Predictions]:
    """NUTS: its diagnostics, the distance between its halves, scores; and its predictions."""
    torch.manual_seed(config.seed)
    model = problem.make_model()
    chains = bbb.run_nuts(
        model,
        problem.train,
        num_samples=config.chain_length,
        warmup_steps=config.chain_length,
        num_chains=4,
        num_workers=config.workers,
        max_tree_depth=config.max_tree_depth,
        compile=config.compile,
        seed=config.seed,
    )
    draws = 4 * config.chain_length
    gold = predict_at(problem, model, chains, draws, config.seed)
    halves = [
        {name: values.unflatten(0, (2, -1))[half] for name, values in chains.items()}
        for half in range(2)
    ]
    one, other = (predict_at(problem, model, half, draws, config.seed) for half in halves)
    record = {
        **diagnose(chains, gold),
        "seconds": chains.seconds,
        "scores": score(gold[ON], problem.test[1]),
        FLOOR: differences(one, other),
    }
    return record, gold


def diagnose(chains: bbb.Chains, gold: Predictions) -> dict[str, Any]:
    """R-hat and effective sample sizes of function values, and of the noise's scale if latent."""
    values = {
        region: fidelity.functions(gold[region]).unflatten(0, (4, -1)) for region in (ON, OFF)
    }
    noise = {name: x for name, x in chains.by_chain.items() if name.startswith("likelihood.")}
    quantities = replace(chains, by_chain=values | noise)
    r_hat, bulk, tail = quantities.r_hat(), quantities.ess("bulk"), quantities.ess("tail")
    return {
        "r_hat": {name: float(value.max()) for name, value in r_hat.items()},
        "ess_bulk": {name: float(value.min()) for name, value in bulk.items()},
        "ess_tail": {name: float(value.min()) for name, value in tail.items()},
        "divergences": int(chains.diverging.sum()),
        "gradients_per_draw": float(chains.num_gradients.double().mean()),
    }


def sample(
    problem: Problem, chains: ShortChains, config: Config
) -> tuple[dict[str, Any], Predictions, bbb.Chains]:
    """Short chains: how long they took; their predictions; themselves."""
    torch.manual_seed(config.seed)
    model = problem.make_model()
    if config.smoke:
        chains = ShortChains(num_chains=4, warmup_steps=2, num_samples=2, thin=1)
    found = bbb.run_sgmcmc(
        model,
        problem.train,
        batch_size=len(problem.train[0]),
        seed=config.seed,
        progress=False,
        **asdict(chains),
    )
    predictions = predict_at(problem, model, found, config.draws, config.seed)
    return {"seconds": found.seconds}, predictions, found


def train(
    problem: Problem, approach: Approach, config: Config, start: Any = None
) -> tuple[dict[str, Any], Predictions, bbb.guides.Guide]:
    """One guide: how long its training took and where its loss ended; its predictions; itself."""
    torch.manual_seed(config.seed)
    model = problem.make_model()
    options = approach.options if start is None else approach.options | {"init_loc": start.median()}
    guide = bbb.guides.make(approach.guide, model, **options)
    everything = len(problem.train[0])
    batch_size = approach.batch_size or everything
    batches = math.ceil(everything / batch_size)
    began = perf_counter()
    with warnings.catch_warnings():  # that the tangent does better; laplace_fidelity.py compares
        warnings.simplefilter("ignore", bbb.guides.LinearizationWarning)
        history = bbb.fit(
            model,
            guide,
            problem.train,
            epochs=max(2, config.steps * approach.length // batches),
            batch_size=batch_size,
            lr=config.lr * approach.lr_factor,
            lr_schedule=constant_then_cosine,
            num_particles=approach.num_particles,
            estimator=approach.estimator,
            seed=config.seed,
            progress=False,
        )
    seconds = perf_counter() - began
    last = history.loss[-max(1, len(history.loss) // 20) :]
    record = {"seconds": seconds, "loss": sum(last) / len(last)}
    predictions = predict_at(
        problem, model, guide, config.draws, config.seed, linearized=approach.linearized
    )
    return record, predictions, guide


def study(problem: Problem, config: Config) -> tuple[dict[str, Any], dict[str, Predictions]]:
    """All guides and NUTS on one problem: the figures and the predictions by name."""
    record, gold = solve(problem, config)
    seeds = range(config.seed, config.seed + config.repeats)
    runs = [approximate(problem, gold, replace(config, seed=seed)) for seed in seeds]
    figures = {name: fidelity.mean_of([run[0][name] for run in runs]) for name in runs[0][0]}
    record = {"title": problem.title, NUTS: record, "guides": figures}
    record["of_seeds"] = [run[0] for run in runs]
    return record, {NUTS: gold, **runs[0][1]}


def approximate(
    problem: Problem, gold: Predictions, config: Config
) -> tuple[dict[str, Any], dict[str, Predictions]]:
    """All guides, and the short chains, from one seed: the figures and predictions by name."""
    figures: dict[str, Any] = {}
    predictions: dict[str, Predictions] = {}
    trained: dict[str, Any] = {}
    chosen = config.approaches or tuple(APPROACHES)
    for name in tqdm(chosen, desc=f"{problem.title}, seed {config.seed}"):
        approach = APPROACHES[name]
        try:
            if isinstance(approach, ShortChains):
                training, found, trained[name] = sample(problem, approach, config)
            else:
                start = trained.get(approach.after or "")
                training, found, trained[name] = train(problem, approach, config, start)
        except ArithmeticError as error:  # the point of a Laplace approximation is no maximum
            figures[name] = {"failed": str(error)}
            continue
        scores = {"scores": score(found[ON], problem.test[1])}
        figures[name] = training | scores | differences(found, gold)
        predictions[name] = found
    return figures, predictions


def fidelity_table(record: dict[str, Any]) -> Table:
    """One problem: distances, spread and scores of NUTS and of every guide."""
    nuts = record[NUTS]
    classes = "accuracy" in nuts["scores"]
    columns = (
        record["title"],
        "function, on",
        "off",
        "total variation, on" if classes else "y, on",
        "off",
        "sd, on",
        "off",
        *(("accuracy (%)", "ECE (%)") if classes else (f"in {LEVEL:.0%} interval (%)", "RMSE")),
        "NLL",
        "seconds",
    )
    itself = {region: nuts[FLOOR][region] | {"sd_ratio": 1.0} for region in (ON, OFF)}
    rows = [_row("NUTS, half against half", nuts | itself)]
    rows += [_row(name, guide) for name, guide in record["guides"].items()]
    return Table(columns, rows)


def _row(name: str, figures: dict[str, Any]) -> list[str]:
    if "failed" in figures:
        return [name, "no mode found", *9 * ["–"]]
    measures = ("function", "predictive", "sd_ratio")
    cells = [f"{figures[region][measure]:.2f}" for measure in measures for region in (ON, OFF)]
    scores = figures["scores"]
    if "accuracy" in scores:
        cells += [f"{100 * scores['accuracy']:.1f}", f"{100 * scores['ece']:.1f}"]
    else:
        cells += [f"{100 * scores['coverage']:.1f}", f"{scores['rmse']:.2f}"]
    return [name, *cells, f"{scores['nll']:.3f}", f"{figures['seconds']:.0f}"]


def draw_bands(
    run: Run,
    name: str,
    problem: Problem,
    record: dict[str, Any],
    predictions: dict[str, Predictions],
) -> Picture:
    """A picture of what differs, from the first seed."""
    shown = {key: found for key, found in predictions.items() if key not in NOT_PICTURED}
    return fidelity.draw_bands(run, name, problem, record["of_seeds"][0], shown)


def overview_table(problems: dict[str, Any]) -> Table:
    """All problems: how far each guide's functions are off the data, and how wide they spread."""
    columns = ["off the data"]
    for record in problems.values():
        columns += [f"{record['title']}: function", "sd"]
    rows = [
        [name, *(cell for record in problems.values() for cell in _off(record["guides"][name]))]
        for name in next(iter(problems.values()))["guides"]
    ]
    return Table(columns, rows)


def _off(figures: dict[str, Any]) -> list[str]:
    if "failed" in figures:
        return ["–", "–"]
    return [f"{figures[OFF][measure]:.2f}" for measure in ("function", "sd_ratio")]


def main(config: Config) -> dict[str, Any]:
    """Solve every problem by NUTS and by every guide; returns what ``metrics.json`` holds."""
    check_names("--problems", config.problems, PROBLEMS)
    check_names("--approaches", config.approaches, APPROACHES)
    if config.smoke:
        small = {"steps": 2, "draws": 8, "chain_length": 8, "workers": 1, "repeats": 1}
        config = replace(config, problems=config.problems[-1:], **small)
    run = Run(config)
    problems, sections = {}, []
    for name in config.problems:
        problem = PROBLEMS[name](config.seed)
        problems[name], predictions = study(problem, config)
        sections.append(
            Section(
                problem.title,
                f"{problem.text} {fidelity.verdict(problems[name][NUTS])}",
                tables=[fidelity_table(problems[name])],
                pictures=[draw_bands(run, name, problem, problems[name], predictions)],
            )
        )
    overview = Section("Overview", OVERVIEW, tables=[overview_table(problems)])
    recipes = {name: asdict(approach) for name, approach in APPROACHES.items()}
    record = run.finish({"problems": problems, "approaches": recipes})
    run.report("Fidelity of variational families", SUMMARY, [overview, *sections], record)
    return record


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
