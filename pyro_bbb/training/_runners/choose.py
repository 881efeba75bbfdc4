# SPDX-License-Identifier: Apache-2.0
"""The choice of the step runner of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from pyro.optim import PyroOptim
from torch import nn
from torch.utils.data import DataLoader

from pyro_bbb._utils.distributed import Processes
from pyro_bbb._utils.interrupts import Interrupts
from pyro_bbb._utils.validation import require
from pyro_bbb.training._runners.capture_devices import CaptureDevice, CudaDevice, TracingDevice
from pyro_bbb.training._runners.captured import CapturedRunner
from pyro_bbb.training._runners.distributed import DistributedRunner
from pyro_bbb.training._runners.sync_free import UnsupportedOptimizerError
from pyro_bbb.training._step import EagerRunner, NonFiniteRollback, StepProgram, StepRunner

if TYPE_CHECKING:
    from pyro_bbb.training._fit import Options

_FEW_PARAMETERS = 2**20  # with more, a captured step takes more memory and no less time
_WORTH_IT = 100  # steps; to capture one takes the time of some twenty


def capture_device(options: Options, device: torch.device) -> CaptureDevice | None:
    """The device that captures the steps of a run, if they are to be captured.

    Raises:
        ValueError: ``cuda_graph=True`` for what no captured step can have.
    """
    guide, data = options.guide, options.data
    lacking = {
        "a guide that is a module, with parameters of its own": not isinstance(guide, nn.Module),
        "data in memory, tensors or a Dataset, got a DataLoader": isinstance(data, DataLoader),
        "a torch optimiser, Adam or AdamW, got a PyroOptim": isinstance(
            options.optimizer, PyroOptim
        ),
    }
    if options.cuda_graph:
        require(
            "cuda_graph=True", lacking | {f"a CUDA device, got {device}": device.type != "cuda"}
        )
        return CudaDevice(device)
    if options.engine == "eager" or options.accumulate > 1 or any(lacking.values()):
        return None
    if device.type == "cuda" and options.engine == "compiled" and options.nonfinite == "raise":
        return CudaDevice(device)
    return TracingDevice() if device.type == "cpu" else None


def make_runner(
    program: StepProgram,
    options: Options,
    capture: CaptureDevice | None,
    group: Processes,
    interrupts: Interrupts,
    num_steps: int,
) -> StepRunner:
    """The runner of a program of so many steps: captured, of several processes, or eager."""
    runner: StepRunner
    if group.size > 1:
        runner = DistributedRunner(program, group, interrupts)
    elif capture is not None and _wanted(options, program, num_steps):
        try:
            runner = CapturedRunner(program, capture, required=options.cuda_graph)
        except UnsupportedOptimizerError:
            if options.cuda_graph:
                raise
            runner = EagerRunner(program)
        if capture.asynchronous:
            return runner
    else:
        runner = EagerRunner(program)
    return NonFiniteRollback(runner, program, options.nonfinite)


def _wanted(options: Options, program: StepProgram, num_steps: int) -> bool:
    """Return whether steps are to be captured; by themselves only where it is as good, and faster.

    A callback may change in Python what has been captured.
    """
    if options.cuda_graph or options.engine == "compiled":
        return True
    few = has_few_parameters(*program.modules)
    return few and num_steps >= _WORTH_IT and not options.callbacks


def has_few_parameters(*parts: Any) -> bool:
    """Return whether the modules among the parts have so few that captured steps are faster."""
    modules = (part for part in parts if isinstance(part, nn.Module))
    return sum(p.numel() for module in modules for p in module.parameters()) <= _FEW_PARAMETERS
