# SPDX-License-Identifier: Apache-2.0
"""Size, speed and accuracy of pruned networks, as tables and a figure."""

import gzip
import io
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import pyro_bbb as bbb
from _helpers import repeats
from _helpers.repeats import shown
from _helpers.run import Data, Picture, Run, Table
from _helpers.scores import SCORES
from pyro_bbb import metrics
from pyro_bbb.deployment import sparse_where_faster


def compare(modules: Mapping[str, nn.Module], x: Tensor, repetitions: int) -> dict[str, dict]:
    """Bytes, and ratios of size and time to the first module's, which is the dense one.

    Passes are of one and of a thousand inputs, of which there must be as many at least. Of each
    network the layers that are faster so have sparse weights.
    """
    dense = next(iter(modules))
    sizes = {name: file_size(module) for name, module in modules.items()}
    one, many = (
        latencies({n: sparse_where_faster(m, part) for n, m in modules.items()}, part, repetitions)
        for part in (x[:1], x[:1000])
    )
    return {
        name: {
            "bytes": sizes[name],
            "size": sizes[name] / sizes[dense],
            "latency_one": one[name] / one[dense],
            "latency_thousand": many[name] / many[dense],
        }
        for name in modules
    }


def file_size(module: nn.Module) -> int:
    """Bytes that ``torch.save`` writes of the module's tensors, compressed."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    return len(gzip.compress(file.getvalue()))


def latencies(modules: Mapping[str, nn.Module], x: Tensor, repetitions: int) -> dict[str, float]:
    """Median seconds of a pass; the modules take turns, so that all meet the same disturbances."""
    seconds: dict[str, list[float]] = {name: [] for name in modules}
    with torch.no_grad():
        for _ in range(repetitions):
            for name, module in modules.items():
                started = time.perf_counter()
                module(x)
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in seconds.items()}


Scores: TypeAlias = dict[str, Any]
SOURCE = "MXNet tutorial"
PUBLISHED_EPOCHS = (0.9455, 0.9593, 0.9641, 0.9684, 0.9723, 0.9733, 0.9756, 0.9749, 0.9765, 0.9775)

PUBLISHED_PRUNING = {
    0.1: 0.9777,
    0.25: 0.9779,
    0.5: 0.9756,
    0.75: 0.9602,
    0.95: 0.7259,
    0.99: 0.3753,
    1.0: 0.098,
}

FRACTIONS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 1.0)
EXPORTED = (0.0, 0.75, 0.95, 0.98)


@dataclass(frozen=True)
class Trained:
    """A network after its training, with the test accuracy after every epoch."""

    model: bbb.BayesianModel
    guide: bbb.AutoSoftplusNormal
    history: bbb.History
    curve: list[float]

    def accuracy(self, data: Data) -> float:
        """Compute the accuracy of the network of mean weights."""
        return accuracy(self.model, self.guide, data)

    def pruned(self, fraction: float) -> "Trained":
        """Prune the weights of lowest signal-to-noise ratio."""
        return replace(self, guide=bbb.prune(self.guide, fraction))


def accuracy(model: bbb.BayesianModel, guide: bbb.AutoSoftplusNormal, data: Data) -> float:
    """Accuracy of the network of mean weights."""
    return metrics.accuracy(bbb.predict_mean(model, guide, data[0]).probs, data[1])


def accuracy_table(record: Scores, names: list[str]) -> Table:
    """Test accuracy of the mean network after each epoch."""
    epochs = [int(epoch) for epoch in record["mean"][names[0]]["accuracy_by_epoch"]]
    rows = [
        (
            str(epoch),
            f"{100 * PUBLISHED_EPOCHS[epoch - 1]:.2f}" if epoch <= len(PUBLISHED_EPOCHS) else "",
            *(shown(record, name, "accuracy_by_epoch", str(epoch)) for name in names),
        )
        for epoch in epochs
        if epoch <= len(PUBLISHED_EPOCHS) or epoch % 10 == 0
    ]
    return Table(("test accuracy (%) after epoch", SOURCE, *names), rows)


def networks_table(record: Scores, names: list[str], samples: int) -> Table:
    """The mean network and the ensemble, in scores that take probabilities."""
    networks = {
        f"{name}: {label}": {k: record[k][name][kind] for k in ("mean", "sd") if k in record}
        for name in names
        for kind, label in (("mean_network", "mean network"), ("ensemble", f"{samples} networks"))
    }
    return repeats.table("on the test images", networks, SCORES)


def pruning_table(record: Scores, names: list[str]) -> Table:
    """Tabulate the mean network's test accuracy by pruned fraction."""
    rows = [
        (
            f"{100 * fraction:.0f}",
            f"{100 * PUBLISHED_PRUNING[fraction]:.2f}" if fraction in PUBLISHED_PRUNING else "",
            *(shown(record, name, "pruning", str(fraction)) for name in names),
        )
        for fraction in FRACTIONS
    ]
    return Table(("weights removed (%)", f"{SOURCE}: accuracy (%)", *names), rows)


def export_table(record: Scores, name: str) -> Table:
    """Size and speed against the dense network."""
    columns = (
        ("accuracy (%)", "accuracy", 100, 2),
        ("compressed file (kB)", "bytes", 1e-3, 0),
        ("of the dense file (%)", "size", 100, 1),
        ("time for 1 image, dense = 1", "latency_one", 1, 2),
        ("for 1,000 images, dense = 1", "latency_thousand", 1, 2),
    )
    kinds = {k: record[k][name] for k in ("mean", "sd") if k in record}
    networks = {
        f"{100 * fraction:.0f}": {
            k: each["exported"][str(fraction)] | {"accuracy": each["pruning"][str(fraction)]}
            for k, each in kinds.items()
        }
        for fraction in EXPORTED
    }
    return repeats.table(f"{name}: removed (%)", networks, columns)


def draw_pruning(run: Run, record: Scores, names: list[str]) -> Picture:
    """Plot accuracy by pruned fraction, and the published one."""
    lines = {name: (FRACTIONS, [*record["mean"][name]["pruning"].values()]) for name in names}
    lines[SOURCE] = list(PUBLISHED_PRUNING), list(PUBLISHED_PRUNING.values())
    caption = "Test accuracy of the mean network, without training after the removal."
    axes = {"xlabel": "fraction of weights removed", "ylabel": "test accuracy"}
    return run.curves("pruning", caption, {"": lines}, **axes)
