# SPDX-License-Identifier: Apache-2.0
"""Fingerprint of a training run: its configuration, compared on resuming and between processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pyro_bbb._utils.distributed import Processes
from pyro_bbb._utils.inputs import parts_of
from pyro_bbb._utils.version import __version__
from pyro_bbb.persistence.archive import Json, differences
from pyro_bbb.persistence.definition import definition, in_words
from pyro_bbb.persistence.state_dict import digest
from pyro_bbb.training._batches import Batches
from pyro_bbb.training._checkpoints.state import TrainingState
from pyro_bbb.training._config import FitConfig
from pyro_bbb.training._schedules import KLSchedule
from pyro_bbb.training.objectives import RecordedELBO
from pyro_bbb.training.optim import JointOptim

_OPTIONS = (  # of `FitConfig`
    *("epochs", "lr", "lr_schedule", "estimator", "autocast", "accumulate"),
    *("cuda_graph", "engine", "nonfinite", "seed", "patience"),
)
_ROWS = 1024  # of which the content counts; in a large data set they are spread evenly


def fingerprint(config: FitConfig, state: TrainingState, elbo: RecordedELBO) -> dict[str, Json]:
    """The definition of a run by name; functions count by their names."""
    guide = state.guide
    return {
        "version of pyro_bbb": __version__,
        "version of torch": str(torch.__version__),
        **{name: _word(getattr(config, name)) for name in _OPTIONS},
        "num_particles": elbo.num_particles,
        "kl_schedule": _word(config.schedule),
        "loss": type(elbo).__name__,
        "num_data": state.batches.model.num_data,
        "device": state.device.type,
        "optimizer": _of_optimizer(state.optim),
        "in evaluation mode": [k for k, part in state.model.named_modules() if not part.training],
        **definition(state.model, "model"),
        **definition(guide, "guide"),
        "pruned weights": digest(getattr(guide, "unpruned", {}).values())[:16],
        **_of_data(state.batches),
        **_of_tensors("model", state.model),
        **_of_tensors("guide", guide),
    }


def _word(value: Any) -> Json:
    if isinstance(value, KLSchedule):
        return {name: _word(part) for name, part in vars(value).items()}
    return value if isinstance(value, bool | int | float | str | None) else in_words(value)


def _of_optimizer(optim: JointOptim) -> str:
    """Its class and options; a learning rate is set at each step."""
    optimizer = optim.optimizer
    options = optimizer.defaults.items() if optimizer else ()
    words = [f"{name}={value}" for name, value in options if name != "lr"]
    return f"{type(optimizer).__name__}({', '.join(words)})"


def _of_data(batches: Batches) -> dict[str, Json]:
    source = batches.source
    if isinstance(source, DataLoader):
        sampler = type(source.sampler).__name__
        kind = f"DataLoader of {len(batches)} batches in the order of a {sampler}"
        return {"data": kind, "batch_size": batches.batch_size}
    tensors = {**parts_of(source.x), "y": source.y}
    shapes = {name: _shape(tensor) for name, tensor in tensors.items()}
    content = digest(map(_some_rows, tensors.values()))[:16]
    return {**shapes, "content of data": content, "batch_size": source.batch_size}


def _of_tensors(prefix: str, module: nn.Module) -> dict[str, Json]:
    trained = module.named_parameters()
    return {
        f"{prefix}.{name}": _shape(x) + ("" if x.requires_grad else ", frozen")
        for name, x in trained
    }


def _shape(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _some_rows(x: Tensor) -> Tensor:
    count = min(len(x), _ROWS)
    rows = torch.arange(count, device=x.device) * (len(x) - 1) // max(count - 1, 1)
    return x.detach()[rows]


def check_alike(run: Mapping[str, Json], processes: Processes) -> None:
    """Raise ValueError, in all processes, where one has another run than the first."""
    runs = [json.loads(text) for text in processes.all_gather_bytes(json.dumps(run).encode())]
    for rank, other in enumerate(runs):
        if other != runs[0]:
            found = "; ".join(differences(runs[0], other)).replace(" there", " on rank 0")
            raise ValueError(
                "all processes must call fit with the same arguments; rank "
                f"{rank} differs: {found.replace(' here', f' on rank {rank}')}"
            )
