"""The choice of the step runner of a run."""

from __future__ import annotations

from pyro_bbb._utils.distributed import Processes
from pyro_bbb._utils.interrupts import Interrupts
from pyro_bbb.training._runners.cuda_graph import CaptureDevice, CudaGraphRunner
from pyro_bbb.training._runners.distributed import DistributedRunner
from pyro_bbb.training._runners.eager import EagerRunner
from pyro_bbb.training._runners.protocol import StepProgram, StepRunner
from pyro_bbb.training._runners.rollback import NonFiniteRollback


def make_runner(
    program: StepProgram,
    nonfinite: str,
    capture: CaptureDevice | None,
    group: Processes,
    interrupts: Interrupts,
) -> StepRunner:
    """The runner of a program: a CUDA graph, several processes, or eager."""
    if capture is not None:
        return CudaGraphRunner(program, capture)
    alone = group.size == 1
    runner = EagerRunner(program) if alone else DistributedRunner(program, group, interrupts)
    return NonFiniteRollback(runner, program, nonfinite)
