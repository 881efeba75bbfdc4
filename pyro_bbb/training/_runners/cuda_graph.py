"""The training step captured in a CUDA graph: one launch instead of one for every operation.

The step is a function of tensors that stay where they are; a minibatch, its weight and its learning
rate are copied into them, and the graph is replayed. All of it but the capture itself is the same
code on every device, and is tested on the CPU step by step. The capture follows the documentation
of `torch.cuda.graphs`; docs/performance.md says on what it was run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from pyro.optim import PyroOptim
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pyro_bbb._utils.inputs import Rows, parts_of
from pyro_bbb._utils.validation import require
from pyro_bbb.guides import Ensemble
from pyro_bbb.training._runners.protocol import Parts, StepProgram
from pyro_bbb.training._runners.sync_free import SyncFreeOptim, sync_free
from pyro_bbb.training.objectives import NonFiniteError

Run: TypeAlias = Callable[[], None]
_WARM_UP = 3  # runs before the capture, in which libraries set themselves up


class CaptureDevice(Protocol):
    """A device that runs steps, and captures them."""

    def run(self, step: Run) -> None:
        """Run it now."""

    def capture(self, step: Run) -> Run:
        """Make it a function that repeats on the device what it does there."""


class CudaDevice:
    """Runs and captures steps on one stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def run(self, step: Run) -> None:
        """Run the step after what is under way, and before what follows."""
        around = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(around)
        with torch.cuda.stream(self.stream):
            step()
        around.wait_stream(self.stream)

    def capture(self, step: Run) -> Run:
        """Capture the step as a CUDA graph, with memory of its own for all that lives within it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            step()
        replay: Run = graph.replay
        return replay


def capture_device(guide: Any, data: Any, optimizer: Any, device: torch.device) -> CaptureDevice:
    """The device that captures steps; ValueError for arguments that no captured step can have."""
    lacking = {
        "a guide that is a module, with parameters of its own": not isinstance(guide, nn.Module),
        "a guide that does the same at every call, which an Ensemble does not": isinstance(
            guide, Ensemble
        ),
        "data in memory, tensors or a Dataset, got a DataLoader": isinstance(data, DataLoader),
        "a torch optimiser, Adam or AdamW, got a PyroOptim": isinstance(optimizer, PyroOptim),
        f"a CUDA device, got {device}": device.type != "cuda",
    }
    require("cuda_graph=True", lacking)
    return CudaDevice(device)


class CudaGraphRunner:
    """A `StepRunner` that replays a captured step; `flush` reads and records its numbers."""

    def __init__(self, program: StepProgram, device: CaptureDevice) -> None:
        elbo = sync_free(program.elbo)
        self.svi = program.svi(partial(SyncFreeOptim, elbo=elbo), elbo)
        self.optim: SyncFreeOptim = self.svi.optim
        self.device, self.history = device, program.history
        self.buffers = [buffer for module in program.modules for buffer in module.buffers()]
        like = self.optim.parameters[0]
        self.kl_weight = torch.zeros((), dtype=like.dtype, device=like.device)
        self.batch: tuple[Rows, Tensor] | None = None  # the minibatch that the graph reads
        self._replay: Run | None = None
        self._unrecorded: list[tuple[Tensor, float, float]] = []

    def step(self, parts: Parts, lr: float) -> None:
        """Run one step on the one part; a minibatch of another size runs uncaptured."""
        ((x, y, kl_weight),) = parts
        self.optim.set_lr(lr)
        self.kl_weight.fill_(kl_weight)
        if self.batch is None or self._replay is None:
            self.batch = x.clone(), y.clone()
            self._replay = self._capture(partial(self._step, *self.batch))
        if x.shape == self.batch[0].shape:
            buffers = *parts_of(self.batch[0]).values(), self.batch[1]
            for buffer, value in zip(buffers, (*parts_of(x).values(), y), strict=True):
                buffer.copy_(value)
            self._replay()
        else:
            self.device.run(partial(self._step, x, y))
        self._unrecorded.append((self.optim.row.clone(), kl_weight, lr))

    def flush(self) -> None:
        """Record the steps since the last call; NonFiniteError where one was not finite."""
        unrecorded, self._unrecorded = self._unrecorded, []
        if not unrecorded:
            return
        rows = torch.stack([row for row, *_ in unrecorded]).tolist()
        for row, (_, kl_weight, lr) in zip(rows, unrecorded, strict=True):
            self._record(row, kl_weight, lr)

    def _record(self, row: list[float], kl_weight: float, lr: float) -> None:
        loss, log_prior, log_guide, nll, norm = row
        if not (math.isfinite(loss) and math.isfinite(norm)):
            what = "gradient" if math.isfinite(loss) else "loss"
            error = NonFiniteError(what, [], len(self.history.steps) + 1)
            error.history = self.history
            raise error
        self.history.steps.append(
            self.optim.elbo.parts(loss, log_prior, log_guide, nll, kl_weight), lr
        )

    def _step(self, x: Rows, y: Tensor) -> None:
        self.svi.step(x, y, self.kl_weight)

    def _capture(self, step: Run) -> Run:
        with self._without_effect():
            for _ in range(_WARM_UP):
                self.device.run(step)
        try:
            return self.device.capture(step)
        except RuntimeError as error:
            raise RuntimeError(
                "cuda_graph=True needs a step that does the same on the device each time: no "
                ".item(), no Python branch on a tensor's values, no new tensor from numbers on the "
                f"host, in network, prior, likelihood or guide. The capture failed: {error}"
            ) from error

    @contextmanager
    def _without_effect(self) -> Iterator[None]:
        """Inside, steps move no parameter, no buffer and no random state."""
        device = self.kl_weight.device
        before = [buffer.clone() for buffer in self.buffers]
        self.optim.failed.fill_(1.0)
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                yield
        finally:
            self.optim.failed.zero_()
            for buffer, value in zip(self.buffers, before, strict=True):
                buffer.copy_(value)
