# SPDX-License-Identifier: Apache-2.0
"""Captured training steps: recorded once and replayed.

A CPU records the list of tensor operations (`pyro_bbb._recorder`), a GPU its launches in a CUDA
graph (`torch.cuda.graphs`); docs/performance.md says on what it was run. The step is a function of
tensors that stay where they are: a minibatch, its weight and its learning rate are copied into
them, and the record is replayed. No number is read on the host in between. A step that is not
finite, like every one after it, changes no parameter: fused Adam takes a flag for this, as in
gradient scaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from pyro.optim import PyroOptim
from torch import Tensor, nn
from torch.optim import Adam, AdamW
from torch.utils.data import DataLoader

from pyro_bbb._recorder import record_step
from pyro_bbb._utils.inputs import Rows, parts_of
from pyro_bbb._utils.validation import require
from pyro_bbb.elbo import NonFiniteError, loss_parts
from pyro_bbb.training._flat_adam import FlatAdam
from pyro_bbb.training._ivon import NaturalGradient
from pyro_bbb.training._step import Parts, StepProgram, StepRunner, numbered
from pyro_bbb.training.optim import JointOptim

if TYPE_CHECKING:
    from pyro_bbb.training._fit import Options

Batch: TypeAlias = tuple[Rows, Tensor]
Run: TypeAlias = Callable[[], None]
_FEW_PARAMETERS = 2**20  # with more, a captured step takes more memory and no less time
_WORTH_IT = 100  # steps; capturing one takes the time of some twenty
_SIZES = 2  # sizes of minibatches that are captured: the last of an epoch is smaller
_UNCAPTURABLE = (
    "cuda_graph=True needs a step that does the same on the device each time: no .item(), no "
    "Python branch on a tensor's values, no new tensor from numbers on the host, in network, "
    "prior, likelihood or guide. The capture failed: {}"
)


def capture_device(options: Options, device: torch.device) -> CudaDevice | TracingDevice | None:
    """Return the device that captures the steps of a run; ValueError where a graph cannot."""
    guide, data = options.guide, options.data
    lacking = {
        "a guide that is a module, with parameters of its own": not isinstance(guide, nn.Module),
        "data in memory, tensors or a Dataset, got a DataLoader": isinstance(data, DataLoader),
        "a torch optimiser, Adam or AdamW, got a PyroOptim": isinstance(
            options.optimizer, PyroOptim
        ),
    }
    if options.cuda_graph:
        lacking[f"a CUDA device, got {device}"] = device.type != "cuda"
        require("cuda_graph=True", lacking)
        return CudaDevice(device)
    if options.engine == "eager" or options.accumulate > 1 or any(lacking.values()):
        return None
    if device.type == "cuda" and options.engine == "compiled" and options.nonfinite == "raise":
        return CudaDevice(device)
    return TracingDevice() if device.type == "cpu" else None


def is_faster_captured(options: Options, program: StepProgram, num_steps: int) -> bool:
    """Return whether to capture the steps; a callback may change in Python what was captured."""
    if options.cuda_graph or options.engine == "compiled":
        return True
    few = has_few_parameters(*program.modules)
    return few and num_steps >= _WORTH_IT and not options.callbacks


def has_few_parameters(*modules: Any) -> bool:
    """Return whether modules have so few parameters that captured steps are faster."""
    modules = tuple(module for module in modules if isinstance(module, nn.Module))
    return sum(p.numel() for module in modules for p in module.parameters()) <= _FEW_PARAMETERS


class CudaDevice:
    """A GPU, which captures steps on one stream."""

    asynchronous = True  # the host waits for the device to read a number
    warm_up = 3  # runs before the capture, in which libraries set themselves up

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def run(self, step: Run) -> None:
        """Run the step after what is under way, and before what follows."""
        around = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(around)
        with torch.cuda.stream(self.stream):
            step()
        around.wait_stream(self.stream)

    def capture(
        self, step: Run, inputs: Sequence[Tensor] = (), state: Sequence[Tensor] = ()
    ) -> Run:
        """Capture the step as a CUDA graph, with its own memory for all that lives within it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            step()
        replay: Run = graph.replay
        return replay


class TracingDevice:
    """A CPU, which records the operations of steps."""

    asynchronous, warm_up = False, 1

    def run(self, step: Run) -> None:
        """Run the step."""
        step()

    def capture(self, step: Run, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> Run:
        """Record the step; RuntimeError if the record does not repeat it."""
        return record_step(step, inputs, state)


class CapturedRunner(StepRunner):
    """Replays a captured step; one that cannot be captured runs as it is, or is an error."""

    def __init__(
        self, program: StepProgram, device: CudaDevice | TracingDevice, required: bool
    ) -> None:
        elbo = program.elbo.without_reads()
        super().__init__(program, program.svi(partial(CapturedOptim, elbo=elbo), elbo))
        self.device, self.required = device, required
        if device.asynchronous:  # a step reads no loss after which it could be undone
            self._changing, self._first = [], False
        like = self.optim.parameters[0]
        self.kl_weight = torch.zeros((), dtype=like.dtype, device=like.device)
        self.captured: dict[torch.Size, tuple[Batch, Run]] = {}  # with the minibatch that it reads
        self._unrecorded: list[tuple[Tensor, float, float]] = []

    def run(self, parts: Parts, lr: float) -> None:
        """Run one step on the one part."""
        ((x, y, kl_weight),) = parts
        self.optim.set_lr(lr)
        self.kl_weight.fill_(kl_weight)
        if x.shape not in self.captured and len(self.captured) < _SIZES:
            self.captured[x.shape] = self._capture((x, y))
        if x.shape in self.captured:
            batch, replay = self.captured[x.shape]
            for buffer, value in zip(_tensors(batch), _tensors((x, y)), strict=True):
                buffer.copy_(value)
            replay()
        else:
            self.device.run(partial(self._step, (x, y)))
        if self.device.asynchronous:
            self._unrecorded.append((self.optim.row.clone(), kl_weight, lr))
        else:
            row, _ = self.optim.row.tolist(), self.optim.failed.zero_()
            self._record(row, kl_weight, lr, parts)

    def flush(self) -> None:
        """Record the steps since the last call; NonFiniteError if one was not finite."""
        super().flush()
        unrecorded, self._unrecorded = self._unrecorded, []
        if unrecorded:
            rows = torch.stack([row for row, *_ in unrecorded]).tolist()
            for row, (_, kl_weight, lr) in zip(rows, unrecorded, strict=True):
                self._record(row, kl_weight, lr)

    def _record(self, row: list[float], kl_weight: float, lr: float, parts: Parts = ()) -> None:
        loss, kl, log_guide, nll, norm = row
        if not math.isfinite(loss + norm):
            error = NonFiniteError("gradient" if math.isfinite(loss) else "loss", [])
            raise numbered(self._named(error, parts), self.program.history)
        self.program.history.steps.append(loss_parts(loss, kl, log_guide, nll, kl_weight), lr)

    def _named(self, error: NonFiniteError, parts: Parts) -> NonFiniteError:
        """Return the error with the names of where it is, found by other draws on the minibatch."""
        program = self.program
        try:
            with self._without_effect(), program.scope():
                for batch in parts:
                    program.elbo.loss_and_grads(program.model, program.guide, *batch)
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
            try:
                if changes:
                    raise RuntimeError("a step changes an attribute of network or guide")
                return batch, self.device.capture(step, inputs, self.optim.tensors + self.buffers)
            except RuntimeError as error:
                if self.required:
                    raise RuntimeError(_UNCAPTURABLE.format(error)) from error
        return batch, partial(self.device.run, step)

    def _warm_up(self, step: Run) -> bool:
        """Run the step as often as the device needs; return whether that changes an attribute."""
        before = _Attributes(self.program.modules)
        for _ in range(self.device.warm_up):
            self.device.run(step)
        if self.optim.flat is None and not self.device.asynchronous:
            self.optim.flatten()
        return before.differ()

    @contextmanager
    def _without_effect(self) -> Iterator[None]:
        """Inside, steps move no parameter, no buffer, no random state and no attribute."""
        device, touched = self.kl_weight.device, [*self.buffers, self.optim.failed]
        before, attributes = [x.clone() for x in touched], _Attributes(self.program.modules)
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


class UnsupportedOptimizerError(ValueError):
    """The optimiser cannot skip a step without the host."""


class CapturedOptim(JointOptim):
    """`JointOptim` that makes a step without reading a number; its steps are fused.

    ``row`` has the loss, ``kl``, ``log_guide``, ``nll`` and the gradient's norm of the latest step.
    ``failed`` is 1 once a loss or a gradient was not finite, and then no parameter moves.
    """

    def __init__(
        self,
        optim_constructor: Callable[..., torch.optim.Optimizer],
        optim_args: Mapping[str, Any],
        *,
        parameters: Mapping[str, Any],
        elbo: Any,
    ) -> None:
        self.lrs: list[Tensor] = []
        self.flat: FlatAdam | None = None
        super().__init__(optim_constructor, optim_args, parameters=parameters)
        if type(self.optimizer) not in (Adam, AdamW, NaturalGradient):
            raise UnsupportedOptimizerError(
                "cuda_graph=True needs Adam or AdamW, which can skip a step without the host, "
                f"got optimizer {type(self.optimizer).__name__}"
            )
        device = self.parameters[0].device
        self.elbo = elbo
        self.row = torch.zeros(5, dtype=torch.float64, device=device)
        self.failed = torch.zeros((), device=device, dtype=torch.float)
        self.optimizer.found_inf = self.failed  # type: ignore[union-attr]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all parameters, which fused kernels of a GPU read as single."""
        if not 0 <= lr < math.inf:
            raise ValueError(f"lr must be a finite number of at least 0, got {lr}")
        for tensor, rate in zip(self.lrs, self._lrs(lr), strict=True):
            tensor.fill_(rate)

    def _add_parameters(self, parameters: list[Any]) -> None:
        super()._add_parameters(parameters)
        groups = self.optimizer.param_groups if self.optimizer else []
        for group in groups[len(self.lrs) :]:
            device = group["params"][0].device
            precision = torch.float if device.type == "cuda" else torch.double
            self.lrs.append(torch.zeros((), device=device, dtype=precision))
            group.update(lr=self.lrs[-1], fused=True, capturable=True, foreach=False)

    def flatten(self) -> None:
        """Make further steps on flat vectors, up to `close`; one was made already."""
        if isinstance(self.optimizer, NaturalGradient):  # it has its own
            return
        self.flat = FlatAdam(self.optimizer)  # type: ignore[arg-type]
        self.flat.optimizer.found_inf = self.failed  # type: ignore[attr-defined]

    def close(self) -> None:
        """Give the parameters their own memory back."""
        super().close()
        if self.flat is not None:
            self.flat.close()
        self.flat = None

    def _step(self) -> None:
        (self.flat or self).optimizer.step()  # type: ignore[union-attr]

    def _gradients(self) -> list[Tensor]:
        return self.flat.gather() if self.flat is not None else super()._gradients()

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that a step may change, once one was made."""
        states = self.optimizer.state.values()  # type: ignore[union-attr]
        moments = [x for state in states for x in state.values() if isinstance(x, Tensor)]
        flat = self.flat.tensors if self.flat is not None else []
        return [*self.parameters, *moments, *flat, self.row, self.failed]

    def set_state(self, state_dict: dict[str, Any]) -> None:
        """Restore a state from `get_state`; the learning rate stays in its tensor."""
        super().set_state(state_dict)
        for group, lr in zip(self.optimizer.param_groups, self.lrs, strict=True):  # type: ignore[union-attr]
            group["lr"] = lr

    def _checked(self, norm: Tensor, grads: list[Tensor]) -> Tensor:
        """Return the norm, after noting the step's numbers, and whether it failed."""
        torch.cat([self.elbo.take(), norm.double().view(1)], out=self.row)
        nan_or_0 = (self.row[0] + self.row[4]) * 0  # 0 of finite numbers
        torch.logical_or(self.failed, nan_or_0, out=self.failed)
        return norm


class _Attributes:
    """Numbers, words, lists and dicts of modules, such as a counter of calls, as they are now."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        modules = {module for root in roots for module in root.modules()}
        named = [(m, name, value) for m in modules for name, value in vars(m).items()]
        self._scalars = [x for x in named if isinstance(x[2], bool | int | float | str)]
        containers = [value for *_, value in named if isinstance(value, list | dict)]
        self._containers = [(value, value.copy()) for value in containers]

    def differ(self) -> bool:
        """Return whether a scalar attribute or a container's length has changed."""
        changed = (vars(module)[name] != value for module, name, value in self._scalars)
        return any(changed) or any(len(now) != len(then) for now, then in self._containers)

    def restore(self) -> None:
        """Set them to what they were."""
        for module, name, value in self._scalars:
            vars(module)[name] = value
        for now, then in self._containers:
            if len(now) != len(then):
                now.clear()
                now.extend(then) if isinstance(now, list) else now.update(then)
