# SPDX-License-Identifier: Apache-2.0
"""The captured training step: repeated without Python finding out anew what to compute.

The step is a function of tensors that stay where they are; a minibatch, its weight and its learning
rate are copied into them, and what the device has captured is run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from pyro_bbb._utils.inputs import Rows, parts_of
from pyro_bbb.elbo import NonFiniteError, loss_parts
from pyro_bbb.training._runners.capture_devices import CaptureDevice, Run, StepTensors
from pyro_bbb.training._runners.sync_free import SyncFreeOptim
from pyro_bbb.training._step import Parts, StepProgram, numbered

Batch: TypeAlias = tuple[Rows, Tensor]
_UNCAPTURABLE = (
    "cuda_graph=True needs a step that does the same on the device each time: no .item(), no "
    "Python branch on a tensor's values, no new tensor from numbers on the host, in network, "
    "prior, likelihood or guide. The capture failed: {}"
)
_SIZES = 2  # of minibatches that are captured: the last of an epoch is smaller


class CapturedRunner:
    """A `StepRunner` that repeats a captured step.

    ``required``: whether a step that cannot be captured is an error. Else it is run as it is.
    """

    def __init__(self, program: StepProgram, device: CaptureDevice, required: bool) -> None:
        elbo = program.elbo.without_reads()
        self.svi = program.svi(partial(SyncFreeOptim, elbo=elbo), elbo)
        self.optim: SyncFreeOptim = self.svi.optim
        self.program, self.device, self.required = program, device, required
        self.buffers = [buffer for module in program.modules for buffer in module.buffers()]
        like = self.optim.parameters[0]
        self.kl_weight = torch.zeros((), dtype=like.dtype, device=like.device)
        self.captured: dict[torch.Size, tuple[Batch, Run]] = {}  # with the minibatch that it reads
        self._unrecorded: list[tuple[Tensor, float, float]] = []

    def step(self, parts: Parts, lr: float) -> None:
        """Run one step on the one part."""
        ((x, y, kl_weight),) = parts
        self.optim.set_lr(lr)
        self.kl_weight.fill_(kl_weight)
        if x.shape not in self.captured and len(self.captured) < _SIZES:
            self.captured[x.shape] = self._capture((x, y))
        if x.shape in self.captured:
            batch, run = self.captured[x.shape]
            for buffer, value in zip(_tensors(batch), _tensors((x, y)), strict=True):
                buffer.copy_(value)
            run()
        else:
            self.device.run(partial(self._step, (x, y)))
        if self.device.asynchronous:
            self._unrecorded.append((self.optim.row.clone(), kl_weight, lr))
        else:
            row, _ = self.optim.row.tolist(), self.optim.failed.zero_()
            self._record(row, kl_weight, lr, parts)

    def flush(self) -> None:
        """Record the steps since the last call; NonFiniteError where one was not finite."""
        self.optim.flush()
        unrecorded, self._unrecorded = self._unrecorded, []
        if not unrecorded:
            return
        rows = torch.stack([row for row, *_ in unrecorded]).tolist()
        for row, (_, kl_weight, lr) in zip(rows, unrecorded, strict=True):
            self._record(row, kl_weight, lr)

    def _record(self, row: list[float], kl_weight: float, lr: float, parts: Parts = ()) -> None:
        loss, kl, log_guide, nll, norm = row
        if not math.isfinite(loss + norm):
            error = NonFiniteError("gradient" if math.isfinite(loss) else "loss", [])
            raise numbered(self._named(error, parts), self.program.history)
        found = loss_parts(loss, kl, log_guide, nll, kl_weight)
        self.program.history.steps.append(found, lr)

    def _named(self, error: NonFiniteError, parts: Parts) -> NonFiniteError:
        """The error with the names of where it is, found by other draws on the minibatch."""
        program = self.program
        try:
            with self._without_effect(), program.scope():
                for part in parts:
                    program.elbo.loss_and_grads(program.model, program.guide, *part)
                self.optim.require_finite()
        except NonFiniteError as named:
            return named
        return error

    def _step(self, batch: Batch) -> None:
        with self.program.scope():
            self.svi.step(*batch, self.kl_weight)

    def _capture(self, batch: Batch) -> tuple[Batch, Run]:
        x, y = batch
        batch = x.clone(), y.clone()
        step = partial(self._step, batch)
        with self._without_effect():
            changes = self._warm_up(step)
            inputs = [*_tensors(batch), self.kl_weight, *self.optim.lrs]
            tensors = StepTensors(inputs, [*self.optim.tensors, *self.buffers])
            try:
                if changes:
                    raise RuntimeError("a step changes an attribute of network or guide")
                return batch, self.device.capture(step, tensors)
            except RuntimeError as error:
                if self.required:
                    raise RuntimeError(_UNCAPTURABLE.format(error)) from error
        return batch, partial(self.device.run, step)

    def _warm_up(self, step: Run) -> bool:
        """Run the step as often as the device wants; true if that changes an attribute."""
        before = Attributes(self.program.modules)
        for _ in range(self.device.warm_up):
            self.device.run(step)
        if self.optim.flat is None and not self.device.asynchronous:
            self.optim.flatten()
        return before.differ()

    @contextmanager
    def _without_effect(self) -> Iterator[None]:
        """Inside, steps move no parameter, no buffer, no random state and no attribute."""
        device, touched = self.kl_weight.device, [*self.buffers, self.optim.failed]
        before, attributes = [x.clone() for x in touched], Attributes(self.program.modules)
        self.optim.failed.fill_(1.0)
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                yield
        finally:
            for tensor, value in zip(touched, before, strict=True):
                tensor.copy_(value)
            attributes.restore()


def _tensors(batch: Batch) -> list[Tensor]:
    return [*parts_of(batch[0]).values(), batch[1]]


class Attributes:
    """Numbers, words, lists and dicts of modules, such as a counter of calls, as they are now."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        modules = {module for root in roots for module in root.modules()}
        named = [(m, name, value) for m in modules for name, value in vars(m).items()]
        self._plain = [each for each in named if isinstance(each[2], bool | int | float | str)]
        containers = [value for *_, value in named if isinstance(value, list | dict)]
        self._containers = [(value, value.copy()) for value in containers]

    def differ(self) -> bool:
        """Return whether a number or word is another, or a list or dict is longer or shorter."""
        others = (vars(module)[name] != value for module, name, value in self._plain)
        return any(others) or any(len(now) != len(then) for now, then in self._containers)

    def restore(self) -> None:
        """Make them what they were."""
        for module, name, value in self._plain:
            vars(module)[name] = value
        for now, then in self._containers:
            if len(now) != len(then):
                now.clear()
                now.extend(then) if isinstance(now, list) else now.update(then)
