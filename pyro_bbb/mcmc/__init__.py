"""Markov chain Monte Carlo (NUTS) on the same models, and its chains.

Imports the rooms up to `prediction`. A new sampler is one module here beside ``_kernel.py``.
"""

from pyro_bbb.mcmc._chains import Chains
from pyro_bbb.mcmc._run import run_nuts

__all__ = ["Chains", "run_nuts"]
