# SPDX-License-Identifier: Apache-2.0
"""Markov chain Monte Carlo on the same models, and its chains: NUTS, and SG-MCMC on minibatches.

Imports the packages up to `prediction` and `persistence`. ``_sample.py`` is the sampler to begin
with, and a new one that tunes itself is a class in ``_samplers.py``; ``_nuts.py`` is the exact one,
``_sgmcmc.py`` that of minibatches. All of them move on the energy in ``_potential.py``.
"""

from pyro_bbb.mcmc._chains import Chains
from pyro_bbb.mcmc._nuts import run_nuts
from pyro_bbb.mcmc._run import DivergedError
from pyro_bbb.mcmc._sample import probe_inputs as probe_inputs
from pyro_bbb.mcmc._sample import sample
from pyro_bbb.mcmc._sample import spread_rows as spread_rows
from pyro_bbb.mcmc._sgmcmc import run_sgmcmc

__all__ = ["Chains", "DivergedError", "run_nuts", "run_sgmcmc", "sample"]
