# SPDX-License-Identifier: Apache-2.0
"""Priors: from a weight's name and shape to its distribution.

Wherever the library takes ``prior=``, it accepts a scalar distribution (every weight has it,
independently), a `Prior`, the name of one, a callable ``(module, name, shape) -> distribution``, or
a dict from name patterns to any of these. `make` takes a name with options:

| name | prior | options and their defaults |
|---|---|---|
| ``normal`` | Normal | ``scale=1``, ``loc=0`` |
| ``laplace`` | Laplace | ``scale=1`` |
| ``student_t`` | Student t | ``df=3``, ``scale=1`` |
| ``scale_mixture`` | `ScaleMixtureNormal` | ``pi=.5``, ``sigma1=1``, ``sigma2=exp(-6)`` |
| ``fan_in_normal`` | `FanInNormal` | ``gain=sqrt(2)`` |
| ``learned_scale_mixture`` | `LearnedScaleMixture` | ``pi=.5``, ``sigma1=1``, ``sigma2=.1`` |
| ``learned_normal`` | `LearnedNormal` | ``scale=1`` |
| ``log_uniform`` | `LogUniform`, which prunes weights | |
| ``normal_jeffreys`` | `NormalJeffreys`, which prunes groups | ``per="unit"`` |
| ``horseshoe`` | `HierarchicalNormal`, half-Cauchy scale | ``scale=1``, ``per="unit"`` |
| ``inverse_gamma`` | `HierarchicalNormal` | ``concentration=1``, ``rate=1``, ``per="layer"`` |

`FunctionNormal` is a prior of the outputs, for a network whose last layer alone is random.

Imports the packages up to `latents`. A new prior is one module here: `named` gives it a name in
`PRIORS`, `saveable` defines how its class is saved.
"""

from pyro_bbb.priors._base import (
    PRIORS,
    ByName,
    Function,
    Independent,
    Prior,
    PriorFunction,
    PriorLike,
    as_prior,
    default_prior,
    make,
)
from pyro_bbb.priors._fixed import FanInNormal
from pyro_bbb.priors._from_guide import FromGuide, from_guide
from pyro_bbb.priors._function_normal import CONTEXTS, FunctionNormal
from pyro_bbb.priors._hierarchical import HierarchicalNormal
from pyro_bbb.priors._learned import LearnedNormal, LearnedScaleMixture
from pyro_bbb.priors._sparse import NormalJeffreys
from pyro_bbb.priors.declaration import declare

__all__ = [
    "ByName",
    "CONTEXTS",
    "FanInNormal",
    "FromGuide",
    "Function",
    "FunctionNormal",
    "HierarchicalNormal",
    "Independent",
    "LearnedNormal",
    "LearnedScaleMixture",
    "NormalJeffreys",
    "PRIORS",
    "Prior",
    "PriorFunction",
    "PriorLike",
    "as_prior",
    "declare",
    "default_prior",
    "from_guide",
    "make",
]
