# SPDX-License-Identifier: Apache-2.0
"""Out-of-distribution detection by one network: scores of `pyro_bbb.ood`, networks, posteriors.

    python experiments/ood.py [--datasets fashion_mnist mnist] [--data-root ROOT]

Question: does one network, in at most two passes, tell Fashion-MNIST and MNIST apart without having
seen the other one, and better than five networks do? A residual network is trained on shifted
images, with and without outliers made of the training images; 784-400-400-10 and LeNet-5 by MAP, an
ensemble of five, Bayes by Backprop, IVON, rank-1 factors, and a variational last layer with priors
of weights and of functions. Each row has the score of the best mean AUROC on validation images and
changes of them (noise, upside down, rotated, patches, corrupted). The other set, photographs,
mirrored images and other angles decide nothing. "all layers" are the means and standard deviations
of every channel of every BatchNorm layer.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import tyro
from _helpers.images import images, train_and_validation
from _helpers.posteriors import METHODS, Trainings
from _helpers.residual import ResNet, train_augmented
from _helpers.run import (
    Data,
    DataSettings,
    Picture,
    Run,
    SeveralSeeds,
    check_names,
    chosen,
    fingerprint,
)
from _helpers.tables import Table, at, table
from _helpers.training import predict_plain
from matplotlib import pyplot as plt
from safetensors.torch import load_model, save_model
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

import pyro_bbb as bbb
from pyro_bbb import metrics, plots
from pyro_bbb.data import corrupt, rotate

Detector: TypeAlias = Callable[[Tensor], Tensor]  # from images to scores, high for seen ones
TITLES = {"fashion_mnist": "Fashion-MNIST", "mnist": "MNIST"}
OTHER = {"fashion_mnist": "mnist", "mnist": "fashion_mnist"}
WIDTHS = {"fashion_mnist": (32, 64, 128), "mnist": (16, 32, 64)}  # of the residual network
EPOCHS = {"fashion_mnist": 18, "mnist": 10}  # of its training
OTHER_EPOCHS = 5  # of the other networks'
OUTLIERS = {"residual": 0.0, "residual, outliers": 0.5}  # weight of the outliers' loss
METHODS_OF = {  # by the name of a network, and its problem
    ("784-400-400-10", "fashion_mlp"): (
        *("map", "ensemble", "bbb_normal_reparam", "ivon", "rank1", "vbll", "vbll_functions"),
    ),
    ("LeNet-5", "mnist_lenet5"): ("map", "ensemble", "bbb_normal_reparam", "vbll_functions"),
}
TRAININGS = {
    f"{network}, {METHODS[method].label}": (problem, method)
    for (network, problem), methods in METHODS_OF.items()
    for method in methods
}
PASSES = {"map": 1, "vbll": 1, "vbll_functions": 1, "ensemble": 5}  # others take ten
ANGLES = (15, 30, 45, 60, 75)  # degrees, beside the 90 of `changes`
DRAWN = ("energy", "entropy", "mutual_information", "mahalanobis", "ddu", "knn")
OF_LAYERS = ("mahalanobis", "relative_mahalanobis", "ddu", "knn")
SHOWN = (*OUTLIERS, *(f"784-400-400-10, {name}" for name in ("MAP", "ensemble of 5")))  # drawn
BINS, MISSES = 40, 16  # of histograms, and of pictures
ROWS = 10_000  # training images that scores are fitted to


@dataclass(frozen=True)
class Config(SeveralSeeds, DataSettings):
    """Settings of one run."""

    seeds: int = 3
    """Runs of the residual network with consecutive seeds; the others take the first."""
    datasets: tuple[str, ...] = tuple(TITLES)
    """Data sets that are seen."""
    networks: tuple[str, ...] = ()
    """Rows of the table, by their names, instead of all."""
    number: int = 2_000
    """Images of each set that are scored."""


def changes(x: Tensor) -> dict[str, Tensor]:
    """Return images unlike ``x``, made of ``x`` or of noise."""
    tiles = nn.functional.unfold(x, 7, stride=7)
    order = torch.rand(len(x), tiles.shape[-1]).argsort(1)[:, None].expand_as(tiles)
    return {
        "noise": torch.rand_like(x),
        "upside down": x.flip(-2),
        "rotated": rotate(x, 90),
        "patches": nn.functional.fold(tiles.gather(2, order), x.shape[-2:], 7, stride=7),
        "corrupted": corrupt(x, "gaussian_noise", 5),
    }


def photographs() -> Tensor:
    """Return the tiles, ``[660, 1, 28, 28]``, of scikit-learn's two photographs, in grey."""
    grey = torch.tensor(np.stack(load_sample_images().images) / 255).mean(-1, keepdim=True)
    tiles = grey.movedim(-1, 1).float().unfold(2, 28, 28).unfold(3, 28, 28)
    return tiles.movedim(1, 3).flatten(0, 2)


def detectors(model: Any, posterior: Any, data: Data, draws: int) -> Iterator[tuple[str, Detector]]:
    """Yield detectors by name, each fitted to training images."""
    options = {"num_samples": draws, "seed": 0}
    for score in DRAWN:
        yield score, bbb.ood(model, posterior, data, score=score, **options).score_samples
    if isinstance(model, ResNet):
        norms = [path for path, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)]
        for score in OF_LAYERS:
            fitted = bbb.ood(model, None, data, score=score, layer=norms, seed=0)
            yield f"all layers, {score}", fitted.score_samples


def train(name: str, config: Config, dataset: str, seed: int, data: Data) -> tuple[Any, Any, int]:
    """Return a trained network or model, its posterior, and the number of draws.

    Residual networks that this commit has trained before are read from their files.
    """
    root = config.output / "trainings" / dataset
    if name in OUTLIERS:
        torch.manual_seed(seed)
        network, flip = ResNet(WIDTHS[dataset]), dataset == "fashion_mnist"
        epochs = 1 if config.smoke else EPOCHS[dataset]
        key = fingerprint({"epochs": epochs, "smoke": config.smoke})
        path = root / key / f"{name}_{seed}.safetensors"
        if path.exists():
            load_model(network, path)
        else:
            train_augmented(network, data, epochs, flip=flip, outliers=OUTLIERS[name])
            path.parent.mkdir(parents=True, exist_ok=True)
            save_model(network, path)
        return network.eval(), None, 1 + flip
    options = {"data_root": config.data_root, "smoke": config.smoke, "epochs": OTHER_EPOCHS}
    trainings = Trainings(root=root, **options)
    problem, method = TRAININGS[name]
    task = trainings.task(problem, method, seed, trainings.sets(problem))
    model, posterior = METHODS[method].train(replace(task, data=data))
    return model, posterior, PASSES.get(method, 10)


def probabilities(model: Any, posterior: Any, x: Tensor, draws: int) -> Tensor:
    """Return class probabilities of the mean prediction; of two passes one is mirrored."""
    if posterior is not None:
        return bbb.predict(model, posterior, x, num_samples=draws, seed=0).probs
    passes = [predict_plain(model, z).probs for z in (x, x.flip(-1))[:draws]]
    return torch.stack(passes).mean(0)


def measure(config: Config, sets: dict[str, Any], dataset: str, name: str, seed: int) -> Any:
    """Train; score by every detector; and return the figures of the one chosen."""
    begin = time.process_time()
    model, posterior, draws = train(name, config, dataset, seed, sets["train"])
    seconds = time.process_time() - begin
    x, y = sets["test"]
    fitted = tuple(values[:ROWS] for values in sets["train"])
    right = probabilities(model, posterior, x, draws).argmax(-1).flatten() == y
    torch.manual_seed(seed)
    tested = {"other": sets["other"], **changes(x), "photographs": photographs()[: config.number]}
    tested |= {"mirrored": x.flip(-1)} | {f"{angle}": rotate(x, angle) for angle in ANGLES}
    found, scores = {}, {}
    for score, detector in detectors(model, posterior, fitted, draws):
        valid = detector(sets["valid"][0])
        proxies = [metrics.auroc(-detector(z), -valid) for z in changes(sets["valid"][0]).values()]
        seen = detector(x)
        unseen = {key: detector(z) for key, z in tested.items()}
        threshold = seen.quantile(0.05)
        found[score] = {
            "proxies": sum(proxies) / len(proxies),
            "auroc": {key: metrics.auroc(-values, -seen) for key, values in unseen.items()},
            "fpr95": float((unseen["other"] >= threshold).double().mean()),
            "retained": float(right[seen >= threshold].double().mean()),
        }
        scores[score] = seen, unseen["other"]
    best = max(found, key=lambda score: found[score]["proxies"])
    common = {"accuracy": float(right.double().mean()), "draws": draws, "seconds": seconds}
    seen, other = scores[best]
    low, high = (float(torch.cat([seen, other]).quantile(q)) for q in (0.01, 0.99))
    histograms = [z.clamp(low, high).histc(BINS, low, high).tolist() for z in (seen, other)]
    common |= {"histograms": histograms, "range": [low, high]}
    common["misses"] = other.topk(min(MISSES, len(other))).indices.tolist()
    return {"chosen": best, **common, **found[best], "scores": found}


def load(config: Config, dataset: str) -> dict[str, Any]:
    """Return images for training, choosing and the test, and the other data set's."""
    get = partial(images, root=config.data_root, smoke=config.smoke)
    train, valid = train_and_validation(get(dataset, train=True), 1 / 12)
    first = slice(0, config.number)
    test, other = get(dataset, train=False), get(OTHER[dataset], train=False)[0]
    valid, test = (tuple(values[first] for values in part) for part in (valid, test))
    return {"train": train, "valid": valid, "test": test, "other": other[first]}


COLUMNS = (
    ("score chosen", lambda summary: next(iter(summary["seeds"].values()))["chosen"]),
    ("passes", "draws", 1, 0),
    ("accuracy (%)", "accuracy", 100, 1),
    ("of 95 % retained", "retained", 100, 1),
    ("AUROC, other set (%)", "auroc.other", 100, 1),
    ("FPR95", "fpr95", 100, 1),
    *(
        (name, f"auroc.{name}", 100, 1)
        for name in ("photographs", "noise", "patches", "mirrored", "corrupted")
    ),
)
ROTATED = (
    *((f"{angle}°", f"auroc.{angle}", 100, 1) for angle in ANGLES),
    ("90°", "auroc.rotated", 100, 1),
)


def tables(record: dict[str, Any]) -> list[Table]:
    """Return the chosen detectors of each data set, and every score of the residual network."""
    made = []
    for dataset, found in record["datasets"].items():
        made.append(table(f"{TITLES[dataset]} seen", found, COLUMNS))
        made.append(table(f"{TITLES[dataset]}, AUROC of rotated images (%)", found, ROTATED))
        for name in chosen(OUTLIERS, tuple(found)):
            scores = found[name]["mean"]["scores"]
            summaries = {score: at(found[name], "scores", score) for score in scores}
            columns = (("AUROC of changes, validation (%)", "proxies", 100, 1), *COLUMNS[4:6])
            made.append(table(f"{TITLES[dataset]}, {name}", summaries, columns))
    return made


def pictures(run: Run, config: Config, record: dict[str, Any]) -> Iterator[Picture]:
    """Draw histograms of the chosen scores, and the unseen images most like seen ones."""
    for dataset, found in record["datasets"].items():
        shown = {name: found[name] for name in chosen(SHOWN, tuple(found))}
        with plots.style():
            figure, axes = plt.subplots(2, len(shown), figsize=(3 * len(shown), 5), squeeze=False)
        other = load(config, dataset)["other"]
        for (name, summary), (top, bottom) in zip(shown.items(), axes.T, strict=True):
            figures = summary["seeds"][str(config.seed)]
            edges = np.linspace(*figures["range"], BINS + 1)
            for label, counts in zip((dataset, OTHER[dataset]), figures["histograms"], strict=True):
                top.stairs(counts, edges, fill=True, alpha=0.5, label=TITLES[label])
            top.set(title=name.replace(", ", "\n"), xlabel=figures["chosen"], yticks=[])
            top.locator_params("x", nbins=3)
            grid = other[figures["misses"]][:, 0].unflatten(0, (-1, 4))
            bottom.imshow(grid.movedim(2, 1).flatten(2).flatten(0, 1).numpy(), cmap="gray_r")
            bottom.axis("off")
        axes[0, 0].legend()
        caption = (
            f"Scores, high for images like the seen ones; {TITLES[OTHER[dataset]]} at its highest."
        )
        yield run.picture(figure, f"ood_{dataset}", caption)


def main(config: Config) -> dict[str, Any]:
    """Trains and scores every network, prints the tables and writes the results."""
    if config.smoke:
        networks = ("residual, outliers", *list(TRAININGS)[-2:])
        config = replace(config, datasets=config.datasets[:1], number=20, seeds=1)
        config = replace(config, networks=networks)
    check_names("--networks", config.networks, (*OUTLIERS, *TRAININGS))
    once, run = (Run(c, ("datasets", "networks")) for c in (replace(config, seeds=1), config))
    record: dict[str, Any] = {"datasets": {}}
    for dataset in config.datasets:
        sets = load(config, dataset)
        one = partial(measure, config, sets, dataset)
        record["datasets"][dataset] = {
            **run.compare(one, OUTLIERS, config.networks, dataset),
            **once.compare(one, TRAININGS, config.networks, dataset),
        }
    return run.report(__doc__, record, tables(record), [*pictures(run, config, record)])


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
