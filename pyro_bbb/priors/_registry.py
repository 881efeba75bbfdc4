# SPDX-License-Identifier: Apache-2.0
"""Priors by name: a new one needs a line here."""

from pyro_bbb.priors._base import PRIORS
from pyro_bbb.priors._fixed import FanInNormal, laplace, normal, scale_mixture, student_t
from pyro_bbb.priors._hierarchical import horseshoe, inverse_gamma
from pyro_bbb.priors._learned import LearnedNormal, LearnedScaleMixture

PRIORS.update(
    normal=normal,
    laplace=laplace,
    student_t=student_t,
    scale_mixture=scale_mixture,
    fan_in_normal=FanInNormal,
    learned_scale_mixture=LearnedScaleMixture,
    learned_normal=LearnedNormal,
    horseshoe=horseshoe,
    inverse_gamma=inverse_gamma,
)
