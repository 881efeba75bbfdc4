# SPDX-License-Identifier: Apache-2.0
"""Step runners: ways to run one training step, behind one protocol.

Imports `training.objectives`, `optim` and `history`. A new runner is one module here with the
methods of `protocol.StepRunner`, and its line in ``choose.py``.
"""
