"""How `fit` takes its steps: alone, together with other processes, or captured on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pyro.infer import SVI

from pyro_bbb._utils.distributed import Processes
from pyro_bbb.training._interrupts import Interrupts
from pyro_bbb.training._runners.cuda_graph import CapturedSteps, Device
from pyro_bbb.training._runners.rollback import NonFiniteRollback
from pyro_bbb.training._runners.steps import JoinedOptim, JoinedSteps, take_step
from pyro_bbb.training._runners.sync_free import SyncFreeOptim, sync_free
from pyro_bbb.training.history import History
from pyro_bbb.training.objectives import RecordedELBO


@dataclass(frozen=True)
class Engine:
    """What takes steps.

    Args:
        svi: Pyro's, with objective and optimiser.
        take: takes a step on the parts of a minibatch, at a learning rate.
        read: adds to the history what steps left unread.
    """

    svi: SVI
    take: Callable[..., None]
    read: Callable[[], None]


def engine(
    program: Any,
    guide: Any,
    elbo: RecordedELBO,
    make: Callable[..., Any],
    history: History,
    modules: tuple[Any, Any],
    nonfinite: str,
    graphs: Device | None,
    processes: Processes,
    interrupts: Interrupts,
) -> Engine:
    """What takes the steps of a run.

    Args:
        program: the model.
        guide: its guide.
        elbo: the objective.
        make: makes the optimiser; its argument is the kind, if not `JointOptim`.
        history: of the run.
        modules: model and guide as the user gave them.
        nonfinite: what to do with a step that is not finite.
        graphs: captures the steps, if they are to be captured.
        processes: those that take the steps together.
        interrupts: of the run.
    """
    if graphs is not None:
        quiet = sync_free(elbo)
        svi = SVI(program, guide, make(partial(SyncFreeOptim, elbo=quiet)), quiet)
        captured = CapturedSteps(svi, graphs, history, modules)
        return Engine(svi, lambda parts, lr: captured.take(parts[0], lr), captured.read)
    read: Callable[[], None] = _nothing
    if processes.size > 1:
        joint = partial(JoinedOptim, processes=processes, interrupts=interrupts)
        svi = SVI(program, guide, make(joint), elbo)
        steps = JoinedSteps(svi, elbo, history, modules)
        take, read = steps.take, steps.read
    else:
        svi = SVI(program, guide, make(), elbo)
        take = partial(take_step, svi, elbo, history)
    return Engine(svi, NonFiniteRollback(take, elbo, modules, history, nonfinite), read)


def _nothing() -> None:
    """What there is to read of steps that are read one by one."""
