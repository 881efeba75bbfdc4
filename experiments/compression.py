# SPDX-License-Identifier: Apache-2.0
"""Compression of LeNet-300-100 and LeNet-5-Caffe: what remains right, and what remains uncertain.

    python experiments/compression.py [--problems lenet300_mnist] [--data-root ROOT]

Questions. (1) What is the test error when 1/68 of the weights of LeNet-300-100 are left, or 1/280
of LeNet-5-Caffe's (Molchanov et al. 2017: 1.92 and 0.75 %), or 1/156 by whole units (Louizos et al.
2017: 1.0 %)? (2) Are NLL, ECE and the detection of the other data set those of the dense posterior?
(3) How small is the file, how fast the network? All methods start from one network trained without
a prior. Then a posterior is trained, or none for magnitude pruning, and weights are removed in
steps, by the signal-to-noise ratio or the magnitude, with training after each. "rewound" (Frankle
and Carbin 2019) trains the weights that magnitude pruning left from where they were after the first
epoch. Settings were chosen by the error on 10,000 of the training images; the test images decided
nothing.
"""

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import torch
import tyro
from _helpers.images import images, train_and_validation
from _helpers.run import Data, DataSettings, Picture, Run, SeveralSeeds, check_names
from _helpers.scores import scores
from _helpers.tables import Table, at, table
from _helpers.training import he, named, predict_plain, prune_to, train_plain
from matplotlib import pyplot as plt
from pyro.distributions import Normal
from torch import Tensor, nn

import pyro_bbb as bbb
from pyro_bbb import metrics, plots
from pyro_bbb.deployment import sparse_where_faster

Scores: TypeAlias = dict[str, Any]
OTHER = {"mnist": "fashion_mnist", "fashion_mnist": "mnist"}
OTHERS = 2_000  # images of the other set
TEMPERATURE = 0.3  # of all posteriors


def lenet300() -> nn.Sequential:
    """Multilayer perceptron 784-300-100-10 of ReLU units, 266,610 weights."""
    layers: dict[str, nn.Module] = {"flatten": nn.Flatten(), "fc1": nn.Linear(784, 300)}
    layers |= {"relu1": nn.ReLU(), "fc2": nn.Linear(300, 100), "relu2": nn.ReLU()}
    return named(layers | {"last": nn.Linear(100, 10)})


def lenet5() -> nn.Sequential:
    """LeNet-5 as in Caffe's example, 20 and 50 filters and 500 units, 431,080 weights."""
    layers: dict[str, nn.Module] = {"conv1": nn.Conv2d(1, 20, 5), "pool1": nn.MaxPool2d(2)}
    layers |= {"relu1": nn.ReLU(), "conv2": nn.Conv2d(20, 50, 5), "pool2": nn.MaxPool2d(2)}
    layers |= {"relu2": nn.ReLU(), "flatten": nn.Flatten(), "fc1": nn.Linear(800, 500)}
    return named(layers | {"relu3": nn.ReLU(), "last": nn.Linear(500, 10)})


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A network, its images, what is removed, and the epochs of the parts of a training."""

    title: str  # name in tables and figures
    dataset: str  # training and test images; the other set is out-of-distribution
    network: Callable[[], nn.Sequential]
    factor: float  # weights over weights left at the end
    units: float  # share of the units that go, where units go
    methods: tuple[str, ...]
    start: int = 10  # of the network without prior from which all methods start
    all: int = 5  # of the posterior with all weights
    ramp: int = 20  # in each of which something is removed
    last: int = 8  # after the last removal
    seeds: int = 3


@dataclass(frozen=True)
class Method:
    """A way to choose the weights that go."""

    label: str
    prior: Any = None
    """Prior of a posterior; without one the smallest weights of a network go."""
    units: bool = False  # whether units go, before weights


METHODS = {
    "log_uniform": Method("log-uniform prior", "log_uniform"),
    "normal": Method("N(0, 0.1²) prior", Normal(0.0, 0.1)),
    "units": Method("normal-Jeffreys, units", "normal_jeffreys", units=True),
    "magnitude": Method("magnitude"),
}
PROBLEMS = {
    f"lenet300_{name}": Problem(
        title=f"LeNet-300-100, {title}",
        dataset=dataset,
        network=lenet300,
        factor=68,
        units=0.85,
        methods=tuple(METHODS),
        seeds=seeds,
    )
    for name, dataset, title, seeds in (
        ("mnist", "mnist", "MNIST", 3),
        ("fashion", "fashion_mnist", "Fashion-MNIST", 1),
    )
} | {
    "lenet5_mnist": Problem(
        title="LeNet-5-Caffe, MNIST",
        dataset="mnist",
        network=lenet5,
        factor=280,
        units=0.955,
        methods=("units",),
        start=6,
        all=2,
        ramp=12,
        last=40,
        seeds=1,
    )
}


@dataclass(frozen=True)
class Config(SeveralSeeds, DataSettings):
    """Settings of one run."""

    problems: tuple[str, ...] = tuple(PROBLEMS)
    """Networks and their images."""
    methods: tuple[str, ...] = ()
    """Methods, instead of all."""
    draws: int = 10
    """Networks drawn from the posterior for its predictions."""
    repetitions: int = 30
    """Timed passes of each network."""
    output: Path = Path("results/compression")
    """Folder for results."""


# --- trainings, which yield networks or posteriors with all weights, then with fewer ---

State: TypeAlias = tuple[Any, Any]  # model and guide, or a network and None


def gone(problem: Problem) -> Iterator[tuple[float, bool]]:
    """Share of what goes that is gone, by epoch (Zhu and Gupta 2017), and whether to score."""
    for epoch in range(1, problem.ramp + 1):
        scored = epoch in (problem.ramp // 2, 3 * problem.ramp // 4)
        yield 1 - (1 - epoch / problem.ramp) ** 3, scored


def by_posterior(
    problem: Problem, method: Method, start: nn.Module, data: Data, seed: int
) -> Iterator[State]:
    """Train a posterior, and remove units or weights of least signal-to-noise ratio."""
    network = bbb.bayesianize(copy.deepcopy(start), copy.deepcopy(method.prior))
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=len(data[0]))
    guide, seeds = bbb.AutoSoftplusNormal(model, init_rho=-6.0), count(1000 * seed)

    def fit(epochs: int, lr_schedule: Any = "constant", warmup: float = 0.0) -> State:
        bbb.fit(
            model,
            guide,
            data,
            epochs=epochs,
            batch_size=256,
            lr=2e-3,
            lr_schedule=lr_schedule,
            kl_schedule=bbb.KLSchedule(temperature=TEMPERATURE, warmup_epochs=warmup),
            estimator="local_reparam",
            progress=False,
            seed=next(seeds),
        )
        return model, guide

    yield fit(problem.all, warmup=problem.all)
    for by_units in (True, False) if method.units else (False,):
        first, before = sum(guide.loc(name).numel() for name in guide.weight_names), 1.0
        for share, is_scored in gone(problem):
            if by_units:
                left = 1 - problem.units * share
                model, guide = bbb.prune(guide, 1 - left / before, units=True, x=data[0][:1])
                before = left
            else:
                left = first + (size(start) / problem.factor - first) * share
                model, guide = prune_to(guide, left, data[0])
            state = fit(1)
            if is_scored and by_units == method.units:
                yield state
        yield fit(problem.last, lambda progress: 1 - progress)


def by_magnitude(
    problem: Problem, start: nn.Module, early: nn.Module, data: Data
) -> Iterator[State]:
    """Remove the smallest weights of all kernels and train those left; at last from ``early``."""
    network, rewound, total = copy.deepcopy(start), copy.deepcopy(early), size(start)
    # weight decay: without it weights of pixels that are always 0 keep their initial magnitude
    train = partial(train_plain, optimizer=partial(torch.optim.Adam, weight_decay=1e-4))
    kernels = [weight for weight in network.parameters() if weight.dim() > 1]
    biases = total - sum(map(Tensor.numel, kernels))
    yield network, None
    for share, is_scored in gone(problem):
        left = round(total * (1 - (1 - 1 / problem.factor) * share)) - biases
        sizes = torch.cat([weight.detach().abs().flatten() for weight in kernels])
        least = sizes.topk(left).values[-1]
        keep_zeros(kernels, [weight.detach().abs() >= least for weight in kernels])
        train(network, data, 1, lr_schedule="constant")
        if is_scored:
            yield network, None
    yield train(network, data, problem.last), None
    others = [weight for weight in rewound.parameters() if weight.dim() > 1]
    keep_zeros(others, [weight.detach() != 0 for weight in kernels])
    yield train(rewound, data, problem.start), None


def keep_zeros(weights: list[nn.Parameter], masks: list[Tensor]) -> None:
    """Set weights to 0 where masks are false, for good: their gradients become 0, too."""
    for weight, mask in zip(weights, masks, strict=True):
        weight.data.mul_(mask)
        weight.register_hook(partial(torch.mul, mask))


# --- figures of a state ---


def size(network: nn.Module) -> int:
    """Return the number of weights."""
    return sum(parameter.numel() for parameter in network.parameters())


def latencies(modules: dict[str, nn.Module], x: Tensor, repetitions: int) -> dict[str, float]:
    """Median seconds of a pass; the modules take turns, so that all meet the same disturbances."""
    seconds: dict[str, list[float]] = {name: [] for name in modules}
    with torch.no_grad():
        for _ in range(repetitions):
            for name, module in modules.items():
                started = time.perf_counter()
                module(x)
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in seconds.items()}


def file_size(model: Any, guide: Any) -> int:
    """Bytes of all files of a saved posterior."""
    with tempfile.TemporaryDirectory() as folder:
        bbb.save(Path(folder) / "saved", model, guide, compressed=True)
        return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def measure(
    state: State, dense: nn.Module, sets: dict[str, Any], config: Config, seed: int
) -> Scores:
    """All figures of a state."""
    (model, guide), (x, y), (x_valid, y_valid) = state, sets["test"], sets["valid"]
    module = copy.deepcopy(model).eval() if guide is None else bbb.to_module(model, guide)
    mean = predict_plain(module, x)
    answer, other = mean, partial(predict_plain, module)
    if guide is not None:
        options = {"num_samples": config.draws, "seed": seed, "batch_size": 2000}
        other = partial(bbb.predict, model, guide, **options, estimator="reparam")
        answer = other(x)
    figures = {
        "factor": size(dense) / sum(int(t.count_nonzero()) for t in module.parameters()),
        **errors(answer, y),
        "auroc": metrics.auroc(other(sets["other"]).entropy, answer.entropy),
        "mean_network": errors(mean, y),
        "validation_error": errors(predict_plain(module, x_valid), y_valid)["error"],
    }
    for rows in (1, 1000):
        modules = {"dense": dense, "this": sparse_where_faster(module, x[:rows])}
        seconds = latencies(modules, x[:rows], config.repetitions if rows == 1 else 10)
        figures[f"faster_{rows}"] = seconds["dense"] / seconds["this"]
    if guide is not None:
        figures["smaller"] = 4 * size(dense) / file_size(model, guide)
    return figures


def errors(prediction: bbb.ClassificationPrediction, y: Tensor) -> Scores:
    """Compute the error rate, NLL and ECE."""
    figures = scores(prediction.probs, y)
    return {"error": 1 - figures["accuracy"], "nll": figures["nll"], "ece": figures["ece"]}


@cache
def load(config: Config, problem: Problem) -> dict[str, Any]:
    """Return images for training and scores, and the other data set's."""

    def get(dataset: str, *, train: bool) -> Data:
        x, y = images(dataset, config.data_root, train=train, smoke=config.smoke)
        return x * (255 / 126), y  # the paper's pixels

    train, valid = train_and_validation(get(problem.dataset, train=True))
    test, (other, _) = get(problem.dataset, train=False), get(OTHER[problem.dataset], train=False)
    return {"train": train, "valid": valid, "test": test, "other": other[:OTHERS]}


@cache
def started(config: Config, problem: Problem, seed: int) -> tuple[nn.Module, nn.Module]:
    """Train the network from which all methods start; return also that after one epoch."""
    torch.manual_seed(seed)
    network, early = he(problem.network()), list[nn.Module]()
    train_plain(
        network,
        load(config, problem)["train"],
        problem.start,
        callback=lambda epoch: None if early else early.append(copy.deepcopy(network)),
    )
    return network, early[0]


def one(config: Config, problem: Problem, name: str, seed: int) -> Scores:
    """Figures of a method's states."""
    method, (start, early) = METHODS[name], started(config, problem, seed)
    sets, begin = load(config, problem), time.process_time()
    train = sets["train"]
    states = (
        by_magnitude(problem, start, early, train)
        if method.prior is None
        else by_posterior(problem, method, start, train, seed)
    )
    found = {}
    for i, state in enumerate(states):
        found[str(i)] = measure(state, start, sets, config, seed)
        known = (found[str(i)][key] for key in ("factor", "validation_error"))
        print(problem.title, method.label, *(f"{x:.4g}" for x in known), flush=True)
    return {"states": found, "seconds": time.process_time() - begin}


COLUMNS = (
    ("factor", "factor", 1, 0),
    ("error (%)", "error", 100, 2),
    ("mean network", "mean_network.error", 100, 2),
    ("NLL (nats)", "nll", 1, 4),
    ("ECE (%)", "ece", 100, 2),
    ("AUROC, other set (%)", "auroc", 100, 1),
    ("file, times smaller", "smaller", 1, 0),
    ("1 image, times faster", "faster_1", 1, 1),
    ("1,000 images", "faster_1000", 1, 1),
)


def tables(record: Scores) -> list[Table]:
    """Tabulate the states of every problem's methods."""
    made = []
    for name, methods in record["problems"].items():
        rows = {}
        for method, summary in methods.items():
            steps = list(summary["mean"]["states"])
            for i in steps if METHODS[method].units else dict.fromkeys((steps[0], *steps[-2:])):
                label = METHODS[method].label + (", all weights" if i == "0" else f", step {i}")
                rewound = METHODS[method].prior is None and i == steps[-1]
                rows["rewound" if rewound else label] = at(summary, "states", i)
        made.append(table(PROBLEMS[name].title, rows, COLUMNS))
    return made


def pictures(run: Run, record: Scores) -> Iterator[Picture]:
    """Draw the scores against the factor."""
    for name, methods in record["problems"].items():
        with plots.style():
            figure, axes = plt.subplots(2, 2, figsize=(6, 5.5), sharex=True)
            for ax, (title, key, factor, _) in zip(
                axes.flat, COLUMNS[1:2] + COLUMNS[3:6], strict=True
            ):
                for (method, summary), mark in zip(methods.items(), "osD^", strict=False):
                    points = list(summary["mean"]["states"].values())
                    points = points if METHODS[method].prior else points[:-1]  # not the rewound
                    x = [point["factor"] for point in points]
                    y = [factor * point[key] for point in points]
                    ax.plot(x, y, f"-{mark}", ms=4, label=METHODS[method].label)
                ax.set(title=title, xscale="log")
            for ax in axes[1]:
                ax.set_xlabel("weights over weights left")
            figure.legend(
                *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2
            )
        yield run.picture(figure, name, f"{PROBLEMS[name].title}: scores on the test images.")


def main(config: Config) -> dict[str, Any]:
    """Trains, compresses and scores, prints the tables and writes the results."""
    check_names("--problems", config.problems, PROBLEMS)
    check_names("--methods", config.methods, METHODS)
    if config.smoke:
        config = replace(config, problems=config.problems[::2])  # one of each network
    run, problems = Run(config, free=("problems", "methods")), dict[str, Scores]()
    for name in config.problems:
        problem = PROBLEMS[name]
        own = replace(config, seeds=min(config.seeds, problem.seeds))
        if config.smoke:
            own = replace(own, seeds=1, repetitions=2, draws=2)
            problem = replace(problem, start=1, all=1, ramp=2, last=1)
        problems[name] = Run(own, run.free).compare(
            partial(one, own, problem), problem.methods, config.methods, name
        )
    seconds = {  # without the networks that they start from
        f"{name}, {method}": sum(found["seconds"] for found in summary["seeds"].values())
        for name, methods in problems.items()
        for method, summary in methods.items()
    }
    record = {"problems": problems, "processor_seconds": seconds}
    return run.report(__doc__, record, tables(record), [*pictures(run, record)])


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
