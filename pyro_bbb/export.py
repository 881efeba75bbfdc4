# SPDX-License-Identifier: Apache-2.0
"""Moved to `pyro_bbb.deployment`; this name stays until the first release."""

from pyro_bbb.deployment import to_module

__all__ = ["to_module"]
