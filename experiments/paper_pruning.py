# SPDX-License-Identifier: Apache-2.0
"""Pruning by signal-to-noise ratio: Table 2 of the paper.

    python experiments/paper_pruning.py
    python experiments/paper_pruning.py --ways once steps [--posterior FOLDER]

Blundell et al. (2015), "Weight Uncertainty in Neural Networks", section 5.1 and Table 2: two hidden
layers of 1,200 units; weights are ranked by their signal-to-noise ratio |mean| / standard deviation
and the lowest set to zero: at once, with no training afterwards (the paper), or in steps with 15
epochs after each. Both begin with a posterior of ``paper_mnist.py`` or `pyro_bbb.save`, or one
trained here first. The third way, by default, trains a network with dropout, then a posterior with
the log-uniform prior of sparse variational dropout (Molchanov et al. 2017), and removes a little
before each epoch. Settings were chosen by the validation images; the test images are read at the
scored shares only.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import tyro
from _helpers.paper import DROPOUT, MIXTURE, Preset, Scores, Sets, Trained, error, recipe_of, train
from _helpers.run import DataSettings, Run, SeveralSeeds, check_names
from _helpers.tables import Summary, Table, at, shown
from _helpers.training import prune_to
from torch import Tensor, nn

import pyro_bbb as bbb

PUBLISHED = {0.0: 0.0124, 0.5: 0.0124, 0.75: 0.0124, 0.95: 0.0129, 0.98: 0.0139}
FRACTIONS = tuple(PUBLISHED)
WIDTH = 1200
STEPS = (0.5, 0.75, 0.9, 0.95, 0.98)  # of the removal with training between
# fractions that are removed gradually, and epochs of training with the others
GRADUAL = {0.0: 2, 0.5: 1, 0.75: 2, 0.81: 1, 0.85: 1, 0.89: 1, 0.915: 1, 0.935: 1, 0.95: 2}
GRADUAL |= {0.963: 1, 0.973: 1, 0.98: 6}
TEMPERATURES = 0.05, 0.02  # at the start and the end; on the way it falls geometrically


@dataclass(frozen=True)
class Config(SeveralSeeds, DataSettings):
    """Settings of one run."""

    ways: tuple[str, ...] = ("gradually",)
    """Ways to remove weights: once, steps, gradually."""
    preset: Preset = "ours"
    """Recipe of the posterior from which weights go at once, or in steps."""
    posterior: Path | None = None
    """Folder of that posterior; without one it is trained first."""
    epochs: int | None = None
    """Passes over the training images for the first training, if not the recipe's."""
    draws: int = 50
    """Networks drawn from the posterior for the ensemble."""
    device: str = "cpu"
    """Device; on a GPU the training step is captured in a CUDA graph."""


def posterior(config: Config, sets: Sets, seed: int) -> Trained:
    """Return the trained posterior, from its folder, or train it."""
    if config.posterior is None:
        recipe = recipe_of(config.preset, MIXTURE, WIDTH, config.epochs)
        return train(recipe, 24 if config.smoke else WIDTH, seed, sets)
    saved, device = bbb.load(config.posterior), torch.device(config.device)
    return Trained(model=saved.model.to(device), guide=saved.guide.to(device))


def once(config: Config, sets: Sets, seed: int) -> Iterator[Trained]:
    """Prune a trained posterior to each fraction."""
    trained = posterior(config, sets, seed)
    for fraction in FRACTIONS:
        yield replace(trained, guide=bbb.prune(trained.guide, fraction))


def in_steps(config: Config, sets: Sets, seed: int) -> Iterator[Trained]:
    """Remove more and more from a trained posterior, with training between."""
    recipe, trained = recipe_of("ours", MIXTURE, WIDTH), posterior(config, sets, seed)
    yield trained
    for step, fraction in enumerate(STEPS, start=1):
        trained = replace(trained, guide=bbb.prune(trained.guide, fraction))
        bbb.fit(
            trained.model,
            trained.guide,
            sets.train,
            epochs=1 if config.smoke else 15,
            lr=recipe.lr / 2,
            kl_schedule=bbb.KLSchedule(temperature=recipe.temperature),
            estimator=recipe.estimator,
            cuda_graph=sets.train[0].is_cuda,
            seed=seed + step,
        )
        if fraction in FRACTIONS:
            yield trained


def gradually(config: Config, sets: Sets, seed: int) -> Iterator[Trained]:
    """Train an ordinary network, then a posterior that loses weights before each epoch.

    Units without weights go, too, which makes the later epochs faster. Dropout stays, of rates that
    fall with the weights: fewer weights need less of it.
    """
    x, y = sets.train
    recipe = replace(recipe_of("ours", DROPOUT, WIDTH, config.epochs or 25), batch_size=256)
    precision = None if x.is_cuda else torch.bfloat16
    # without the cache, which would keep the first step's weights in bfloat16
    with torch.autocast("cpu", torch.bfloat16, enabled=not x.is_cuda, cache_enabled=False):
        network = train(recipe, 24 if config.smoke else WIDTH, seed, sets).network
    bayesian = bbb.bayesianize(network, "log_uniform")
    model = bbb.BayesianModel(bayesian, bbb.likelihoods.Categorical(), num_data=len(x))
    guide = bbb.AutoSoftplusNormal(model.to(x.device), init_rho=-5.0).to(x.device)
    total, done, epochs = weights_left(guide), 0, sum(GRADUAL.values())
    for step, (removed, repetitions) in enumerate(GRADUAL.items()):
        left = 1 - removed
        model, guide = prune_to(guide, left * total, x)
        of_inputs, *of_units = (m for m in model.modules() if isinstance(m, nn.Dropout))
        of_inputs.p = 0.2 * left**0.25
        for layer in of_units:
            layer.p = 0.4 * left**0.5
        first, last = TEMPERATURES
        bbb.fit(
            model,
            guide,
            (x, y),
            epochs=repetitions,
            batch_size=512,
            lr=0.005,
            optimizer=partial(slow_means, guide=guide),
            kl_schedule=bbb.KLSchedule(temperature=first * (last / first) ** (done / epochs)),
            estimator="local_reparam",
            autocast=precision,
            progress=False,
            seed=1000 * seed + step,
        )
        done += repetitions
        trained = Trained(model=model, guide=guide)
        errors = error(trained.point(sets.validation[0]), sets.validation[1])
        print(f"seed {seed}, {left:.1%} left: validation error {errors:.2%}", flush=True)
        if removed in FRACTIONS:
            yield trained


def slow_means(parameters: list[Tensor], lr: float, guide: bbb.AutoSoftplusNormal) -> Any:
    """Make Adam, with at most 0.001 for the means: the standard deviations have further to go."""
    names = {id(value): name for name, value in guide.named_parameters()}
    means = [p for p in parameters if "loc" in names[id(p)]]
    others = [p for p in parameters if "loc" not in names[id(p)]]
    groups = [{"params": means, "max_lr": 0.001}, {"params": others}]
    return torch.optim.Adam(groups, lr=lr, fused=True)


def weights_left(guide: bbb.AutoSoftplusNormal) -> int:
    """Return the number of weights that are not removed, whose standard deviation is not 0."""
    return sum(int(guide.scale(name).count_nonzero()) for name in guide.weight_names)


Way: TypeAlias = Callable[[Config, Sets, int], Iterator[Trained]]
WAYS: dict[str, tuple[str, Way]] = {
    "once": ("removed once", once),
    "steps": ("removed in steps", in_steps),
    "gradually": ("removed gradually", gradually),
}


def one(config: Config, sets: Sets, name: str, seed: int) -> Scores:
    """Errors by the fraction that is removed."""
    (_, way), figures = WAYS[name], Scores()
    for fraction, trained in zip(FRACTIONS, way(config, sets, seed), strict=True):
        figures[str(fraction)] = {"weights": weights_left(trained.guide)}
        for name, (x, y) in (("", sets.test), ("validation_", sets.validation)):
            answer = trained.ensemble(x, config.draws, seed)
            figures[str(fraction)] |= {
                f"{name}error": error(trained.point(x), y),
                f"{name}ensemble_error": error(answer, y),
            }
    return figures


def errors_table(summaries: dict[str, Summary]) -> Table:
    """Errors in percent of the mean network and of the ensemble, beside the paper's."""
    rows = []
    for fraction in FRACTIONS:
        cells = [
            " / ".join(shown(at(summary, str(fraction)), x) for x in ("error", "ensemble_error"))
            for summary in summaries.values()
        ]
        rows.append((f"{100 * fraction:.0f}", f"{100 * PUBLISHED[fraction]:.2f}", *cells))
    columns = (f"{name}: mean network / ensemble" for name in summaries)
    return Table(("weights removed (%)", "paper: error (%)", *columns), rows)


def main(config: Config) -> dict[str, Any]:
    """Trains or loads, removes, evaluates, prints the tables and writes the results."""
    if config.smoke:
        config = replace(config, epochs=2, draws=3)
    if config.smoke or config.posterior is not None:
        config = replace(config, seeds=1)
    check_names("--ways", config.ways, WAYS)
    run = Run(config, free=("ways",))
    sets = Sets.load(config.data_root, config.device, config.smoke)
    found = run.compare(partial(one, config, sets), WAYS, config.ways)
    summaries = {WAYS[name][0]: summary for name, summary in found.items()}
    lines = {
        title: (FRACTIONS, [summary["mean"][str(fraction)]["error"] for fraction in FRACTIONS])
        for title, summary in summaries.items()
    }
    lines["paper"] = FRACTIONS, list(PUBLISHED.values())
    axes = {"xlabel": "fraction of weights removed", "ylabel": "test error"}
    picture = run.curves("pruning", "The network of mean weights.", {"": lines}, **axes)
    return run.report(__doc__, {"errors": summaries}, [errors_table(summaries)], [picture])


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
