# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: its state, its fingerprint, and when they are written.

Imports the modules of `training` beside it, but those of `fit`. What a run adds to its state goes
into ``state.py``.
"""
