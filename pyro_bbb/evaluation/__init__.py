# SPDX-License-Identifier: Apache-2.0
"""Scores of a posterior on test data, under shift and out of distribution, as one table.

`evaluate` stands in ``_evaluate.py``, the table of several models in ``_compare.py``, the verdict
on a posterior's convergence, fit and band in ``_verdict.py``. A new score
is a function of `pyro_bbb.metrics`, a line in ``_scores.py``, and its name and format in print in
``_tables.py``.

Imports any room but `cli`; matplotlib when it draws.
"""

from pyro_bbb.evaluation._compare import Comparison, compare
from pyro_bbb.evaluation._evaluate import Evaluation, evaluate
from pyro_bbb.evaluation._verdict import Verdict, check

__all__ = ["Comparison", "Evaluation", "Verdict", "check", "compare", "evaluate"]
