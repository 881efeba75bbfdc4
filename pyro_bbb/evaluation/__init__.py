# SPDX-License-Identifier: Apache-2.0
"""Scores of a posterior on test data, under shift and out of distribution, and its verdict.

`evaluate` and `compare` are in ``_evaluate.py`` with all scores and tables, the verdict on a
posterior's convergence, fit and band in ``_verdict.py``, and detectors of inputs unlike the
training data in ``_out_of_distribution.py``.

Imports any package but `cli`; matplotlib when it draws.
"""

from pyro_bbb.evaluation._evaluate import Comparison, Evaluation, compare, evaluate
from pyro_bbb.evaluation._out_of_distribution import Detector, ood
from pyro_bbb.evaluation._verdict import Verdict, check

__all__ = ["Comparison", "Detector", "Evaluation", "Verdict", "check", "compare", "evaluate", "ood"]
