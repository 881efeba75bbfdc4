# SPDX-License-Identifier: Apache-2.0
"""Training by stochastic variational inference: `fit` and its record.

`_fit.py` has the options and the loop, `_step.py` a step, `_captured.py` steps recorded once and
replayed, `_ivon.py` natural gradients, `_checkpoint.py` the content of a checkpoint,
`_kl_schedule.py` and `_lr_schedule.py` the schedules. Imports the packages up to `persistence`. A
way to run a step goes into `_step.py`.
"""

from pyro_bbb.training import history, objectives, optim
from pyro_bbb.training._baseline import UndertrainedWarning
from pyro_bbb.training._baseline import least_costs as least_costs
from pyro_bbb.training._checkpoint import CheckpointError
from pyro_bbb.training._fit import Callback as Callback
from pyro_bbb.training._fit import EpochEnd, fit
from pyro_bbb.training._kl_schedule import KLSchedule
from pyro_bbb.training._negative_elbo import NegativeELBO, negative_elbo

__all__ = [
    "CheckpointError",
    "EpochEnd",
    "KLSchedule",
    "NegativeELBO",
    "UndertrainedWarning",
    "fit",
    "history",
    "negative_elbo",
    "objectives",
    "optim",
]
