# SPDX-License-Identifier: Apache-2.0
"""Markov chain Monte Carlo on the same models, and its chains: NUTS, and SG-MCMC on minibatches.

Imports the rooms up to `prediction` and `persistence`. A new sampler of full-data chains is one
module here beside ``_kernel.py``, one on minibatches an update in ``_langevin.py``.
"""

from pyro_bbb.mcmc._chains import Chains
from pyro_bbb.mcmc._run import run_nuts
from pyro_bbb.mcmc._sample import probe_inputs as probe_inputs
from pyro_bbb.mcmc._sample import sample
from pyro_bbb.mcmc._sample import spread_rows as spread_rows
from pyro_bbb.mcmc._sgmcmc import run_sgmcmc
from pyro_bbb.mcmc._sgmcmc_loop import DivergedError

__all__ = ["Chains", "DivergedError", "run_nuts", "run_sgmcmc", "sample"]
