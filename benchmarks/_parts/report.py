# SPDX-License-Identifier: Apache-2.0
"""Printed tables and the JSON record."""

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from _parts.results import Results, aims
from _parts.timing import Comparison, interquartile
from pyro_bbb._utils.tables import as_markdown

sys.path.append(str(Path(__file__).parents[2] / "experiments"))
from _helpers.run import commit, versions  # noqa: E402

PACKAGES = (
    "pyro-bbb", "pyro-ppl", "torch", "numpy", "torchbnn", "bayesian-torch",
    "blitz-bayesian-pytorch", "torch_blue", "tyxe",
)  # fmt: skip
MIB = 2**20


def of_times(comparison: Comparison) -> str:
    """Medians, quartiles and ratios of one comparison."""
    rows = []
    for name in comparison.rounds:
        times = comparison.times(name)
        first, third = interquartile(times)
        low, high = interquartile(comparison.ratios(name))
        rows.append(
            [
                name,
                f"{median(times):.4g}",
                f"{first:.4g} to {third:.4g}",
                f"{comparison.ratio(name):.2f}",
                f"{low:.2f} to {high:.2f}",
                str(len(times)),
            ]
        )
    head = ["", "median, ms", "quartiles, ms", f"/ {comparison.floor}", "quartiles", "times"]
    text = f"{comparison.suite}: {comparison.title}\n\n{as_markdown(head, rows)}"
    return text + _absent(comparison.absent)


def _absent(reasons: Mapping[str, str]) -> str:
    lines = "\n".join(f"- {name}: {reason}" for name, reason in reasons.items())
    return f"\n\n{lines}" if lines else ""


def of_training_memory(results: Results) -> str:
    """Peaks of training."""
    rows = [
        [
            name,
            _mib(peak.tensors),
            _times(results.memory_ratio(name)),
            _mib(peak.process),
            _times(results.memory_ratio(name, "process")),
        ]
        for name, peak in results.training_memory.items()
        if peak.absent is None
    ]
    absent = {n: p.absent for n, p in results.training_memory.items() if p.absent is not None}
    head = ["", "tensors, MiB", "/ floor", "process, MiB", "/ floor"]
    title = f"memory: training at width {results.budget.memory_width}, peak of a steady step"
    return f"{title}\n\n{as_markdown(head, rows)}{_absent(absent)}"


def of_prediction_memory(results: Results) -> str:
    """Peaks of prediction."""
    rows = [
        [f"{samples} draws, {count} inputs", _mib(peak.beyond), _mib(peak.returned)]
        for (samples, count), peak in results.prediction_memory.items()
    ]
    head = ["", "tensors beyond the result, MiB", "result, MiB"]
    title = f"memory: pyro_bbb.predict at width {results.budget.widths[0]}, peak"
    return f"{title}\n\n{as_markdown(head, rows)}"


def of_aims(results: Results) -> str:
    """Tabulate performance targets and measurements."""
    rows = [
        [aim.what, "" if aim.value is None else f"{aim.value:.2f}", f"{aim.limit:g}", aim.verdict]
        for aim in aims(results)
    ]
    return f"aims\n\n{as_markdown(['', 'measured', 'at most', ''], rows)}"


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / MIB:.1f}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def record(results: Results, config: dict[str, Any]) -> dict[str, Any]:
    """Collect all measurements, the machine and the versions."""
    return {
        "config": config,
        "effort": asdict(results.budget),
        "machine": machine(config["device"]) | {"load_before": results.load_before},
        "versions": versions(PACKAGES),
        "commit": commit(),
        "seconds": results.seconds,
        "comparisons": [_comparison(each) for each in results.comparisons],
        "training_memory": {
            name: asdict(peak) | {"tensors_ratio": results.memory_ratio(name)}
            for name, peak in results.training_memory.items()
        },
        "prediction_memory": [
            {"samples": samples, "inputs": count} | asdict(peak) | {"beyond": peak.beyond}
            for (samples, count), peak in results.prediction_memory.items()
        ],
        "aims": [asdict(aim) | {"verdict": aim.verdict} for aim in aims(results)],
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    contenders = {
        name: {
            "median_ms": median(times := comparison.times(name)),
            "quartiles_ms": interquartile(times),
            "ratio": comparison.ratio(name),
            "ratio_quartiles": interquartile(comparison.ratios(name)),
            "repetitions": len(times),
            "rounds": len(comparison.rounds[name]),
        }
        for name in comparison.rounds
    }
    heading = {"suite": comparison.suite, "title": comparison.title, "floor": comparison.floor}
    return heading | {"contenders": contenders, "absent": dict(comparison.absent)}


def machine(device: str) -> dict[str, Any]:
    """Describe the machine."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": None if device == "cpu" else torch.cuda.get_device_name(device),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }
