# SPDX-License-Identifier: Apache-2.0
"""Posteriors of one network compared: scores, out-of-distribution detection and cost.

    python experiments/posteriors.py [--problems fashion_mlp mnist_lenet5] [--seeds 3]
    python experiments/posteriors.py --problems mnist_ensemble10 fashion_ensemble10 --output ...

Networks, data and training are the same but for the posterior: MAP (weight decay by the prior), MC
dropout, a deep ensemble, Bayes by Backprop with two priors and two gradient estimators, IVON,
Laplace at the MAP (last layer, and Kronecker factors of all layers; by the network's tangent), the
variational last layer, SWAG, the rank-one ensemble, and cyclical SGHMC. Problems are an MLP on
Fashion-MNIST and LeNet-5 on MNIST; ``mnist_ensemble10`` and ``fashion_ensemble10`` compare ten
deterministic LeNet-5 with ten variational ones, each drawn once, so that prediction costs the same
ten passes. Published beside them are the ensembles of uncertainty-baselines
(https://github.com/google/uncertainty-baselines, baselines/mnist).

Of the training images 5,000 are held out; ``--scored validation`` scores them. Tried on those of
Fashion-MNIST with the MLP, one seed, 4 epochs (variational guides 6), NLL in nats: MAP 0.322; last
layer by Laplace 0.323 by draws of outputs, 0.340 by probit, so outputs are drawn; Kronecker Laplace
0.352 with the prior of largest marginal likelihood, 0.323 with fan-in's of gain 0.7; variational
last layer 0.318; dropout of rate 0.2 0.334; Bayes by Backprop at temperature 0.1 with N(0, 1) 0.299
(local_reparam 0.303), with fan-in's prior 0.313 (local_reparam). With 10 epochs (dropout and IVON
20), one seed: MAP 0.294, SWAG 0.290, cyclical SGHMC 0.289, variational last layer 0.288, rank-1
ensemble 0.280, dropout of rate 0.2 0.288, of 0.1 0.285. IVON at temperature 0.1 with fan-in's
prior: learning rate 0.03 and its own beta2 (0.9988) as in `lenet5_mnist` 0.344, with 0.1 0.467,
with 0.01 0.316; beta2 0.9995 with 0.03 0.295, with 0.1 0.282; 0.9998 with 0.06 0.306; 0.9999 with
0.03 0.346, with 0.1 0.301. N(0, 1) is no better (0.344, and with 0.003 0.338). On LeNet-5 with
Fashion-MNIST, two seeds, MAP had 0.250 and 0.259 after 8 epochs, 0.228 and 0.237 after 16; one draw
of IVON 0.269 and 0.267 after 8 with its own beta2 and 0.03, of the first seed with 0.9995 and 0.1
0.244, with 0.9995 and 0.03 0.280, and after 16 with its own beta2, 0.03 and temperature 0.02 0.253.
No other rate, temperature or number of epochs was tried. Test images are read once, at the end. The
out-of-distribution images are the other data set's test images.

Every cell (problem, method, seed) is a file in the folder of results as soon as it is done, and
long trainings have checkpoints: a run that was interrupted goes on where it was when it is started
again from the same commit. The trainings stay, in the folder ``trainings`` of the results; `shift`
can take them from there.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tyro
from _helpers import posterior_report as report
from _helpers.posterior_cells import Scores, over_cells
from _helpers.posterior_methods import PROBLEMS
from _helpers.posterior_tasks import Trainings
from _helpers.run import DataSettings, Run, Section, check_names, chosen


@dataclass(frozen=True)
class Config(DataSettings):
    """Settings of one run."""

    problems: tuple[str, ...] = ("fashion_mlp", "mnist_lenet5")
    """Problems: fashion_mlp, mnist_lenet5, mnist_ensemble10, fashion_ensemble10."""
    methods: tuple[str, ...] = ()
    """Methods, instead of all of the problem."""
    seeds: int = 3
    """Runs with consecutive seeds; tables show their means and standard deviations."""
    scored: Literal["test", "validation"] = "test"
    """Images that are scored; settings were chosen on the 5,000 of validation."""
    epochs: int | None = None
    """Passes over the training images in every training, instead of the recipes' own."""
    images: int = 5000
    """Out-of-distribution images."""
    output: Path = Path("results/posteriors")
    """Folder for results, and for the cells (problem, method, seed) that are done."""


def compare(config: Config, folder: Path, name: str) -> dict[str, Scores]:
    """All methods on one problem: the figures of the seeds, their means and deviations."""
    trainings = Trainings(
        root=config.output / "trainings",
        data_root=config.data_root,
        smoke=config.smoke,
        epochs=config.epochs,
    )
    sets = trainings.sets(name, testing=config.scored == "test", unknown=config.images)
    seeds = range(config.seed, config.seed + config.seeds)
    found: dict[str, Scores] = {}
    for each in chosen(PROBLEMS[name].methods, config.methods):
        task_of = partial(trainings.task, name, each, sets=sets)
        method = trainings.method(each)
        found[each] = over_cells(folder / name / each, task_of, method, sets, seeds)
    return found


def main(config: Config) -> dict[str, Any]:
    """Trains and scores every method, prints the tables and writes the results."""
    check_names("--problems", config.problems, PROBLEMS)
    known = (name for problem in config.problems for name in PROBLEMS[problem].methods)
    check_names("--methods", config.methods, known)
    if config.smoke:
        problems = config.problems[:1]
        config = replace(config, problems=problems, epochs=1, seeds=1, images=50)
    run = Run(config)
    folder = run.seeds("problems", "methods", "seeds")
    results = {name: compare(config, folder, name) for name in config.problems}
    pictures = [report.draw_costs(run, results)]
    record = run.finish({"problems": results})
    sections = [
        Section(
            PROBLEMS[name].title,
            EXPLANATION,
            [report.table(PROBLEMS[name], found), report.ood_table(PROBLEMS[name], found)],
        )
        for name, found in results.items()
    ]
    sections.append(Section("Costs", COSTS, pictures=pictures))
    run.report("Posteriors of one network", SUMMARY, sections, record)
    return record


SUMMARY = (
    "The same network and images, one posterior after another: what each gains in likelihood, "
    "calibration and detection, and what it costs."
)
EXPLANATION = (
    "NLL is the negative log-probability of the true class per image, ECE the gap between "
    "confidence and accuracy, AUROC the probability that an image of the other data set has a "
    "higher entropy than one of this, AURC the area under risk-coverage; ± is the standard "
    "deviation over seeds. Training and prediction are multiples of the deterministic network's."
)
COSTS = (
    "Processor seconds of the whole training, with set-up, over the deterministic network's steps: "
    "those are measured right before and after each training."
)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
