# SPDX-License-Identifier: Apache-2.0
"""Names of the objective: its KL schedules, its parts and its error."""

from pyro_bbb.elbo import LossParts, MinibatchELBO, NonFiniteError, minibatch_elbo
from pyro_bbb.training._kl_schedule import KLSchedule, as_kl_schedule, blundell, uniform

__all__ = [
    "KLSchedule",
    "LossParts",
    "MinibatchELBO",
    "NonFiniteError",
    "as_kl_schedule",
    "blundell",
    "minibatch_elbo",
    "uniform",
]
