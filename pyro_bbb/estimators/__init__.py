# SPDX-License-Identifier: Apache-2.0
r"""Gradient estimators of the ELBO, as effect handlers around any Pyro inference.

- `flipout` (Wen et al. 2018): random signs of each example's own perturb the drawn weights;
- `local_reparameterization` (Kingma et al. 2015): each output is drawn from its own Normal;
- `sticking_the_landing` (Roeder et al. 2017): the draws stay as they are, and the part of the
  gradient of $\ln q$ whose expectation is zero is dropped.

Imports the packages up to `latents`. A new estimator is a module here with a context manager,
and one entry of `ESTIMATORS`, its name in `fit`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from pyro_bbb.estimators._flipout import flipout
from pyro_bbb.estimators._local_reparam import local_reparameterization
from pyro_bbb.estimators._per_example import Draws as Draws
from pyro_bbb.estimators._sticking_the_landing import DetachScores as DetachScores
from pyro_bbb.estimators._sticking_the_landing import sticking_the_landing

__all__ = ["flipout", "local_reparameterization", "sticking_the_landing"]

ESTIMATORS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "reparam": nullcontext,
    "local_reparam": local_reparameterization,
    "flipout": flipout,
    "stl": sticking_the_landing,
}
