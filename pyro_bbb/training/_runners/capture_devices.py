# SPDX-License-Identifier: Apache-2.0
"""Devices that capture a training step, to repeat it without Python finding out what to compute.

A GPU captures its launches in a CUDA graph, a CPU the list of tensor operations. The capture
follows the documentation of `torch.cuda.graphs`; docs/performance.md says on what it was run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from pyro_bbb._recorder import record_step

Run: TypeAlias = Callable[[], None]


@dataclass(frozen=True)
class StepTensors:
    """The tensors of a step that outlast it."""

    inputs: Sequence[Tensor]  # that are set before each step
    state: Sequence[Tensor]  # all others that it may change, its results among them


class CaptureDevice(Protocol):
    """A device that runs steps, and captures them."""

    asynchronous: bool  # whether to read a number the host must wait for the device
    warm_up: int  # runs before the capture, in which libraries set themselves up

    def run(self, step: Run) -> None:
        """Run it now."""

    def capture(self, step: Run, tensors: StepTensors) -> Run:
        """Make it a function that repeats what it does.

        Raises:
            RuntimeError: the step does not do the same each time, as far as can be seen.
        """


class CudaDevice:
    """Runs and captures steps on one stream of a GPU."""

    asynchronous, warm_up = True, 3

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def run(self, step: Run) -> None:
        """Run the step after what is under way, and before what follows."""
        around = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(around)
        with torch.cuda.stream(self.stream):
            step()
        around.wait_stream(self.stream)

    def capture(self, step: Run, tensors: StepTensors | None = None) -> Run:
        """Capture the step as a CUDA graph, with memory of its own for all that lives within it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            step()
        replay: Run = graph.replay
        return replay


class TracingDevice:
    """Runs steps on a CPU, and traces their operations."""

    asynchronous, warm_up = False, 1

    def run(self, step: Run) -> None:
        """Run it now."""
        step()

    def capture(self, step: Run, tensors: StepTensors) -> Run:
        """Record the step; where that does other than the step itself, RuntimeError."""
        return record_step(step, tensors.inputs, tensors.state)
