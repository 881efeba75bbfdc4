# SPDX-License-Identifier: Apache-2.0
"""Size and speed of pruned networks as ordinary modules."""

import gzip
import io
import statistics
import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn

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
