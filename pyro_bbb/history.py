# SPDX-License-Identifier: Apache-2.0
"""Moved to `pyro_bbb.training.history`; this name stays until the first release."""

from pyro_bbb.training.history import History, Record

__all__ = ["History", "Record"]
